"""Accelerate's own packaged scripts, run on us by two processes as `accelerate test` runs them.

What cannot run as it stands, and why; each is looked at below:

- test_script at stage 3 compares the weights of a model whose engine is open, on each rank by itself. `accelerate launch` starts
  `packaged.py` in its place, whose Accelerator closes the engines first (tests/accelerate/test_commands.py runs it).
- test_sync on several processes reads `Parameter.grad` of DistributedDataParallel. An engine does not show gradients there, so its
  check of them is given those of `engine.full_grads()`; the two parts that prepare a model without an optimizer are refused.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from typing import Any

import pytest
import torch
from support.accelerate_runs import PRELOAD, SMALL, ranks

from zero_plugin import errors

SCRIPTS = "accelerate.test_utils.scripts"
PACKAGED = (*PRELOAD, *(f"{SCRIPTS}.test_{name}" for name in ("script", "ops", "cli", "sync")))


def select(settings: dict[str, Any]) -> None:
    """Clean the process, and have its next Accelerators be ours."""
    from accelerate.state import AcceleratorState, GradientState

    from zero_plugin.integrations.accelerate import ZeroOffloadPlugin

    gc.collect()  # a script drops its Accelerators, and their engines end when they are collected
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.update(ZeroOffloadPlugin(**SMALL, **settings).to_environment())
    os.environ["ACCELERATE_USE_CPU"] = "true"


def plain_if_alone(size: int) -> None:
    """The harness sets these for one process too, which Accelerate takes for a distributed run."""
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") if size == 1 else ():
        os.environ.pop(name, None)


def script(name: str) -> Any:
    sys.argv = [name]
    return import_module(f"{SCRIPTS}.{name}")


def as_they_are(_rank: int, size: int) -> None:
    plain_if_alone(size)
    for name, stage in (("test_script", 2), ("test_ops", 3), ("test_cli", 3)):
        select({"stage": stage})
        script(name).main()
    if size == 1:
        select({"stage": 3})
        script("test_sync").main()
    select({"stage": 2})


@pytest.mark.dist
def test_scripts_pass_as_they_are() -> None:
    ranks(2, as_they_are, preload=PACKAGED)


@pytest.mark.dist
def test_scripts_pass_on_one_process() -> None:
    """Where test_sync reads no gradient."""
    ranks(1, as_they_are, preload=PACKAGED)


def synchronised(_rank: int, _size: int) -> None:
    from accelerate import Accelerator

    sync = script("test_sync")
    seen: dict[str, Any] = {}
    compared: list[int] = []

    class Looking(Accelerator):
        def backward(self, loss: torch.Tensor, **options: Any) -> None:
            super().backward(loss, **options)
            ours: Any = self
            for engine in ours.zero_engines if self.sync_gradients else ():
                with engine.full_grads():
                    seen.update(
                        (name, p.grad.clone()) for name, p in engine.model.named_parameters()
                    )

    def check(model: Any, _ours: Any, did_step: bool, iteration: int, **options: Any) -> None:
        for name, parameter in model.named_parameters():
            if did_step and parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, seen[name], atol=1e-6, **options)
                compared.append(iteration)

    sync.Accelerator, sync.check_model_parameters = Looking, check
    for stage in (1, 3):
        select({"stage": stage})
        sync.test_dataloader_break()
        compared.clear()
        sync.test_gradient_accumulation_with_opt_and_scheduler()
        # two weights, after each second batch and the last one
        assert len(compared) == 2 * len({1, 2}), compared
        accelerator = Looking()
        for part in (sync.test_distributed_sync, sync.test_distributed_sync_multiple_fwd):
            with pytest.raises(errors.EngineStateError, match="no model and optimizer prepared"):
                part(accelerator)
    select({"stage": 3})


@pytest.mark.dist
def test_the_script_of_synchronisation_passes_with_gathered_gradients() -> None:
    ranks(2, synchronised, preload=PACKAGED)
