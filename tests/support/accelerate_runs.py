"""One Accelerate training loop for stock Accelerate and for ours, called inside rank processes.

The optimizer is SGD with powers of two, so that every product is exact and a run has DDP's bits whatever the update fuses.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from support.ranks import run_ranks

PRELOAD = (
    "accelerate",
    "torch._dynamo",
    "zero_plugin.engine",
    "zero_plugin.integrations.accelerate",
)
SMALL: dict[str, Any] = {"threads": 1, "bucket_bytes": 1024, "timeout_seconds": 30.0}
STAGES: tuple[dict[str, Any], ...] = (
    {"stage": 1, "optimizer": "device", "gradients": "device"},
    {"stage": 2},
    {"stage": 3, "params": "device"},
    {"stage": 3, "params": "host"},
)


def ranks(size: int, function: Any, *args: Any, **options: Any) -> list[Any]:
    """`run_ranks` with Accelerate imported once for all tests."""
    return run_ranks(
        size,
        function,
        *args,
        **{
            "store": "none" if size == 1 else "file",
            "preload": PRELOAD,
            "deadline": 90.0,
            **options,
        },
    )


@contextlib.contextmanager
def accelerator_for(settings: dict[str, Any] | None, **options: Any) -> Iterator[Any]:
    """An Accelerator on the CPU: stock for None, else with our plugin; the process is clean again afterwards."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from zero_plugin.integrations.accelerate import ZeroOffloadPlugin

    if not torch.distributed.is_initialized():
        # The harness sets these for one rank too, which Accelerate takes for a distributed run.
        for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    if settings is not None:
        options["zero_plugin"] = ZeroOffloadPlugin(**{**SMALL, **settings})
    accelerator = Accelerator(cpu=True, **options)
    try:
        yield accelerator
    finally:
        accelerator.free_memory()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def data(
    *, count: int = 48, batch: int = 4, seed: int = 0, shuffle: bool = False
) -> DataLoader[Any]:
    """Batches of ([batch, 8] features, [batch] labels of two classes)."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 8, generator=generator)
    labels = (features.sum(dim=1) > 0).long()
    return DataLoader(TensorDataset(features, labels), batch_size=batch, shuffle=shuffle)


def network(seed: int = 0) -> nn.Sequential:
    """8 -> 16 -> 2."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    )


def sgd(parameters: Any, lr: float = 0.125) -> torch.optim.SGD:
    """SGD whose products are exact."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.5)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of one batch."""
    features, labels = batch
    return nn.functional.cross_entropy(model(features), labels)


@dataclass
class Run:
    """What a run left."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def evaluate(accelerator: Any, model: nn.Module, loader: Any) -> float:
    """The mean loss over all ranks."""
    model.eval()
    with torch.no_grad():
        found = [accelerator.gather(loss_of(model, batch).reshape(1)) for batch in loader]
    model.train()
    return float(torch.cat(found).mean())


def train(
    settings: dict[str, Any] | None,
    *,
    max_norm: float | None = None,
    clip_value: float | None = None,
    evaluate_first: bool = False,
    **options: Any,
) -> Run:
    """Two epochs with evaluation, a schedule, and what the options ask for."""
    run = Run()
    with accelerator_for(settings, **options) as accelerator:
        model = network()
        held_out = accelerator.prepare(data(count=16, seed=1))
        if evaluate_first:
            model = accelerator.prepare_model(model, evaluation_mode=True)
            run.evaluations.append(evaluate(accelerator, model, held_out))
            if settings is None:
                # Stock Accelerate would leave such a model without DDP.
                del model._is_accelerate_prepared
                accelerator._models.clear()
        optimizer = sgd(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, data(), schedule)
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = loss_of(model, batch)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and max_norm is not None:
                        norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                        run.norms.append(float(norm))
                    if accelerator.sync_gradients and clip_value is not None:
                        accelerator.clip_grad_value_(model.parameters(), clip_value)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                run.losses.append(float(loss.detach()))
                run.lrs.append(schedule.get_last_lr()[0])
            run.evaluations.append(evaluate(accelerator, model, held_out))
        state = accelerator.get_state_dict(model)
        run.weights = {name.removeprefix("module."): value.clone() for name, value in state.items()}
    return run


def assert_same(one: Run, other: Run, *, tolerance: float = 0.0) -> None:
    """Equal bits, or within `tolerance`; weights where both have them."""
    assert one.losses
    assert one.lrs == other.lrs
    assert one.weights.keys() == other.weights.keys() or not one.weights or not other.weights
    pairs: list[Any] = [
        (torch.tensor(getattr(one, name)), torch.tensor(getattr(other, name)))
        for name in ("losses", "norms", "evaluations")
    ]
    pairs += [
        (one.weights[name], other.weights[name])
        for name in one.weights.keys() & other.weights.keys()
    ]
    for a, b in pairs:
        assert a.shape == b.shape
        if tolerance:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(a, b), f"differ by {(a - b).abs().max()}"
