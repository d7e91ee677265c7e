"""Driving the compiled kernels and their reference on the same data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_plugin import kernels
from zero_plugin.optim import reference
from zero_plugin.optim.lion import Lion
from zero_plugin.optim.rule import Rule, rule_for

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ISAS = kernels.available_isas()

# Every rule with the options that change its formula.
CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-5}),
    (torch.optim.AdamW, {"weight_decay": 0.0, "betas": (0.3, 0.5), "maximize": True}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.5, 0.99), "maximize": True}),
    (torch.optim.Adagrad, {}),
    (
        torch.optim.Adagrad,
        {"lr": 0.05, "lr_decay": 0.01, "weight_decay": 0.01, "initial_accumulator_value": 0.1},
    ),
    (Lion, {}),
    (Lion, {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.95, 0.98), "maximize": True}),
    (torch.optim.SGD, {"lr": 0.01}),
    (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.1}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
]
CASE_IDS = [
    f"{kind.__name__}-{'-'.join(f'{key}={value}' for key, value in options.items()) or 'default'}"
    for kind, options in CASES
]


def make_optimizer(
    kind: type[torch.optim.Optimizer], parameters: Iterable[Tensor], options: dict[str, Any]
) -> torch.optim.Optimizer:
    """torch's single-tensor implementation, the plainest there is."""
    plain = {} if kind is Lion else {"foreach": False}
    return kind(parameters, **options, **plain)  # type: ignore[call-arg]


@dataclass
class Problem:
    """Master weights and states of one rule, cut into segments of one flat buffer each."""

    rule: Rule
    group: dict[str, Any]
    master: Tensor
    states: list[Tensor]
    output: Tensor | None
    sizes: Sequence[int] = ()
    step: int = 0
    hyper: list[tuple[float, ...]] = field(default_factory=list)

    @classmethod
    def create(
        cls,
        kind: type[torch.optim.Optimizer],
        options: dict[str, Any],
        master: Tensor,
        output_dtype: torch.dtype | None = None,
        sizes: Sequence[int] = (),
    ) -> Problem:
        optimizer = make_optimizer(kind, [torch.nn.Parameter(master.clone())], options)
        rule = rule_for(optimizer)
        assert rule is not None
        group = optimizer.param_groups[0]
        states = [torch.full_like(master, value) for value in rule.initial_state(group)]
        output = None if output_dtype is None else torch.zeros(master.numel(), dtype=output_dtype)
        return cls(rule, group, master.clone(), states, output, sizes or [master.numel()])

    def copy(self) -> Problem:
        """An independent problem in the same state."""
        return Problem(
            self.rule,
            self.group,
            self.master.clone(),
            [state.clone() for state in self.states],
            None if self.output is None else self.output.clone(),
            self.sizes,
            self.step,
        )

    def next_row(self) -> tuple[float, ...]:
        """Counts a step and gives its hyper row."""
        self.step += 1
        return self.rule.hyper(self.group, self.step)

    def native(
        self,
        handle: kernels.Kernels,
        gradient: Tensor,
        *,
        scale: float = 1.0,
        clip_value: float | None = None,
    ) -> None:
        """One step with the compiled kernel."""
        rows = torch.tensor([self.next_row()], dtype=torch.float64)
        table = []
        start = 0
        for size in self.sizes:
            table.append(
                [
                    address(self.master, start),
                    *(address(state, start) for state in self.states),
                    *[0] * (2 - len(self.states)),
                    address(gradient, start),
                    0 if self.output is None else address(self.output, start),
                    size,
                    0,
                ]
            )
            start += size
        handle.update(
            self.rule.native_id,
            torch.tensor(table, dtype=torch.int64).reshape(-1, kernels.SEGMENT_COLUMNS),
            rows,
            gradient_dtype=gradient.dtype,
            output_dtype=None if self.output is None else self.output.dtype,
            scale=scale,
            clip_value=clip_value,
        )

    def plain(
        self, gradient: Tensor, *, scale: float = 1.0, clip_value: float | None = None
    ) -> None:
        """One step with the reference."""
        reference.update(
            self.rule,
            master=self.master,
            states=self.states,
            gradient=gradient,
            output=self.output,
            hyper=self.next_row(),
            scale=scale,
            clip_value=clip_value,
        )

    def tensors(self) -> list[Tensor]:
        """All that a step changes."""
        return [self.master, *self.states, *([] if self.output is None else [self.output])]


def address(tensor: Tensor, element: int = 0) -> int:
    """Address of an element of a contiguous tensor."""
    return tensor.data_ptr() + element * tensor.element_size()


def bits(tensor: Tensor) -> Tensor:
    """Bit patterns, every NaN the same."""
    canonical = torch.where(torch.isnan(tensor), torch.full_like(tensor, torch.nan), tensor)
    return canonical.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Bit for bit, signs of zero included; any NaN equals any NaN."""
    assert actual.dtype == expected.dtype
    differing = (bits(actual) != bits(expected)).nonzero().flatten()
    if differing.numel():
        index = int(differing[0])
        raise AssertionError(
            f"{what}: {differing.numel()} of {actual.numel()} differ, first at {index}: "
            f"{actual.flatten()[index]!r} instead of {expected.flatten()[index]!r}"
        )


def specials() -> Tensor:
    """fp32 values at which conversions and rules may go wrong."""
    values = [
        0.0,
        1.0,
        65504.0,
        65519.99,
        65520.0,
        65536.0,
        1e30,
        3.4028234e38,
        torch.inf,
        torch.nan,
    ]
    values += [2.0**-14, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 6.1e-5, 1e-40, 1.4e-45, 1.1754944e-38]
    values += [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 3.3895e38]
    both = torch.tensor(values)
    return torch.cat([both, -both])
