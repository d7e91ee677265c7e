"""Lion for plain torch, which has none.

Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, Algorithm 2: the sign of an interpolation between
momentum and gradient is the update, weight decay is decoupled, and the momentum is updated with a second beta.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim.optimizer import ParamsT


class Lion(Optimizer):
    """Lion, element-wise, with one state `exp_avg` a parameter.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, about 3 to 10 times smaller than for AdamW.
        betas: interpolation for the update and for the momentum, each in [0, 1).
        weight_decay: decoupled weight decay, about 3 to 10 times larger than for AdamW.
        maximize: ascend instead of descend.

    Raises:
        ValueError: a hyper-parameter is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not lr >= 0.0:
            raise ValueError(f"lr is {lr}; it must not be negative")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas are {betas}; each must be in [0, 1)")
        if not weight_decay >= 0.0:
            raise ValueError(f"weight_decay is {weight_decay}; it must not be negative")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            The loss of `closure`, or None without one.
        """
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if gradient.is_sparse:
            raise RuntimeError(
                "Lion does not support sparse gradients; build the layer with sparse=False"
            )
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        average: Tensor = state["exp_avg"]
        beta1, beta2 = group["betas"]
        lr = float(group["lr"])
        if group["maximize"]:
            gradient = -gradient
        # Products and sums are separate operations, so that every device and the compiled rule round alike: a
        # differing last bit could turn the sign of an update.
        direction = (average * beta1).add_(gradient * (1.0 - beta1)).sign_()
        parameter.mul_(1.0 - lr * group["weight_decay"]).sub_(direction.mul_(lr))
        average.mul_(beta2).add_(gradient * (1.0 - beta2))
