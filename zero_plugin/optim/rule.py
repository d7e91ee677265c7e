"""Update rules that have a compiled kernel, and how their hyper-parameters are laid out for it.

A rule turns one torch param group and a step count into a hyper row of 16 floats. Everything that does not depend on
an element (bias corrections, the decayed learning rate) is computed here in float64, as torch does, and rounded
once to float32 where it meets the elements. Columns:

- all rules: 0 sign of the gradient (-1 to maximize), 2 L2 weight decay added to the gradient, 9 number of the step (for the
  random bits of `zero_plugin.optim.moments`);
- Adam, AdamW: 1 factor of decoupled decay, 3 `1 - beta1`, 4 `beta2`, 5 `1 - beta2`,
  6 `sqrt(1 - beta2**step)`, 7 `eps`, 8 `-lr / (1 - beta1**step)`;
- Adagrad: 3 minus the decayed learning rate, 4 `eps`;
- Lion: 1 factor of decoupled decay, 3 `beta1`, 4 `1 - beta1`, 5 `beta2`, 6 `1 - beta2`, 7 `lr`;
- SGD: 3 momentum, 4 `1 - dampening`, 5 whether nesterov, 6 whether this is the first step, 7 `-lr`,
  8 whether there is momentum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from typing_extensions import override

from zero_plugin.errors import OptimizerError
from zero_plugin.optim.lion import Lion

Group = Mapping[str, Any]
_NUM_COLUMNS = 16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SQUARES = ("exp_avg_sq", "sum")
"""States that are never below zero."""


def _row(values: Mapping[int, float]) -> tuple[float, ...]:
    return tuple(float(values.get(column, 0.0)) for column in range(_NUM_COLUMNS))


def _sign(group: Group) -> float:
    return -1.0 if group.get("maximize", False) else 1.0


def _check_step(step: int) -> None:
    if step < 1:
        raise OptimizerError(f"step is {step}; the first update is step 1")


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """One element-wise update with a compiled kernel."""

    name: str
    """"adam", "adamw", "adagrad", "lion" or "sgd"."""
    native_id: int
    """What `Kernels.update` takes as `rule`."""
    state_names: tuple[str, ...]
    """torch's names in `optimizer.state`, in the order of the state columns of a segment; fp32 each."""

    @abstractmethod
    def hyper(self, group: Group, step: int) -> tuple[float, ...]:
        """The 16 floats of a hyper row.

        Args:
            group: a param group as torch keeps it.
            step: number of this update, 1 for the first.

        Raises:
            OptimizerError: the step count is below 1 or the group asks for what the rule cannot do.
        """

    @property
    def signed(self) -> tuple[bool, ...]:
        """Of each state whether it can be below zero."""
        return tuple(name not in _SQUARES for name in self.state_names)

    def writes_states(self, hyper: Sequence[float]) -> bool:
        """Whether an update with this hyper row writes every state; else some stay as they are."""
        del hyper
        return True

    def initial_state(self, group: Group) -> tuple[float, ...]:
        """Fill values of the states before the first update."""
        del group
        return (0.0,) * len(self.state_names)


@dataclass(frozen=True, kw_only=True)
class AdamRule(Rule):
    """Adam and AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019); each group says whether decay is decoupled."""

    @override
    def hyper(self, group: Group, step: int) -> tuple[float, ...]:
        _check_step(step)
        beta1, beta2 = (float(beta) for beta in group["betas"])
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        decoupled = bool(group.get("decoupled_weight_decay", self.name == "adamw"))
        return _row(
            {
                0: _sign(group),
                1: 1 - lr * decay if decoupled else 1.0,
                2: 0.0 if decoupled else decay,
                3: 1 - beta1,
                4: beta2,
                5: 1 - beta2,
                6: (1 - beta2**step) ** 0.5,
                7: float(group["eps"]),
                8: -(lr / (1 - beta1**step)),
                9: step,
            }
        )


@dataclass(frozen=True, kw_only=True)
class AdagradRule(Rule):
    """Adagrad (Duchi et al. 2011) with torch's learning-rate decay."""

    @override
    def hyper(self, group: Group, step: int) -> tuple[float, ...]:
        _check_step(step)
        rate = float(group["lr"]) / (1 + (step - 1) * float(group["lr_decay"]))
        return _row(
            {
                0: _sign(group),
                2: float(group["weight_decay"]),
                3: -rate,
                4: float(group["eps"]),
                9: step,
            }
        )

    @override
    def initial_state(self, group: Group) -> tuple[float, ...]:
        return (float(group["initial_accumulator_value"]),)


@dataclass(frozen=True, kw_only=True)
class LionRule(Rule):
    """Lion, as `zero_plugin.Lion`."""

    @override
    def hyper(self, group: Group, step: int) -> tuple[float, ...]:
        _check_step(step)
        beta1, beta2 = (float(beta) for beta in group["betas"])
        lr = float(group["lr"])
        return _row(
            {
                0: _sign(group),
                1: 1 - lr * float(group["weight_decay"]),
                3: beta1,
                4: 1 - beta1,
                5: beta2,
                6: 1 - beta2,
                7: lr,
                9: step,
            }
        )


@dataclass(frozen=True, kw_only=True)
class SgdRule(Rule):
    """SGD with momentum, dampening and Nesterov as torch defines them.

    torch keeps no step count for SGD: the first step is the one where it has no `momentum_buffer` yet.
    """

    @override
    def hyper(self, group: Group, step: int) -> tuple[float, ...]:
        _check_step(step)
        momentum = float(group["momentum"])
        if momentum != 0.0 and not self.state_names:
            raise OptimizerError(
                f"momentum became {momentum} after setup, where it was 0 in every param group and no momentum "
                "buffer was laid out; build the optimizer with a momentum that is not 0"
            )
        return _row(
            {
                0: _sign(group),
                2: float(group["weight_decay"]),
                3: momentum,
                4: 1 - float(group["dampening"]),
                5: float(bool(group["nesterov"])),
                6: float(step == 1),
                7: -float(group["lr"]),
                8: float(momentum != 0.0),
                9: step,
            }
        )

    @override
    def writes_states(self, hyper: Sequence[float]) -> bool:
        return not self.state_names or hyper[8] != 0.0


ADAM = AdamRule(name="adam", native_id=0, state_names=("exp_avg", "exp_avg_sq"))
ADAMW = AdamRule(name="adamw", native_id=0, state_names=("exp_avg", "exp_avg_sq"))
ADAGRAD = AdagradRule(name="adagrad", native_id=1, state_names=("sum",))
LION = LionRule(name="lion", native_id=2, state_names=("exp_avg",))
SGD_MOMENTUM = SgdRule(name="sgd", native_id=3, state_names=("momentum_buffer",))
SGD_PLAIN = SgdRule(name="sgd", native_id=3, state_names=())

_RULES: Mapping[type[Optimizer], Rule] = {
    Adam: ADAM,
    AdamW: ADAMW,
    Adagrad: ADAGRAD,
    Lion: LION,
    SGD: SGD_MOMENTUM,
}
_UNSUPPORTED_OPTIONS = {
    "amsgrad": "keeps a third state",
    "differentiable": "must run through autograd",
    "capturable": "keeps its step count on the device and rounds in another order",
}


def unsupported_option(group: Group) -> str | None:
    """An option of a param group that no compiled rule has, with the reason, or None."""
    for option, reason in _UNSUPPORTED_OPTIONS.items():
        if group.get(option, False):
            return f"{option}=True, which {reason}"
    return None


def why_not(optimizer: Optimizer) -> str | None:
    """Why this optimizer has no compiled rule, or None when it has one."""
    kind = type(optimizer)
    if kind not in _RULES:
        names = ", ".join(sorted(known.__name__ for known in _RULES))
        return (
            f"{kind.__module__}.{kind.__qualname__} is not one of {names} (subclasses do not count)"
        )
    for index, group in enumerate(optimizer.param_groups):
        reason = unsupported_option(group)
        if reason is not None:
            return f"param group {index} has {reason}"
        for parameter in group["params"]:
            if parameter.dtype not in _DTYPES:
                return f"param group {index} holds a parameter of dtype {parameter.dtype}"
    return None


def rule_for(optimizer: Optimizer) -> Rule | None:
    """The compiled rule of a torch optimizer, or None; `why_not` then tells the reason.

    `foreach` and `fused` are accepted: they choose an implementation, not a formula.
    """
    if why_not(optimizer) is not None:
        return None
    rule = _RULES[type(optimizer)]
    if rule is SGD_MOMENTUM and all(group["momentum"] == 0 for group in optimizer.param_groups):
        return SGD_PLAIN
    return rule
