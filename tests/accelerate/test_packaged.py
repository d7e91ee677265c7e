"""Accelerate's own packaged scripts, run on us by two processes as `accelerate test` runs them."""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from typing import Any

import pytest
from support.accelerate_runs import PRELOAD, SMALL, ranks

SCRIPTS = "accelerate.test_utils.scripts"
PACKAGED = (*PRELOAD, f"{SCRIPTS}.test_script", f"{SCRIPTS}.test_ops")


def packaged(_rank: int, _size: int, name: str, settings: dict[str, Any]) -> None:
    from accelerate.state import AcceleratorState, GradientState

    from zero_plugin.integrations.accelerate import ZeroOffloadPlugin

    os.environ.update(ZeroOffloadPlugin(**SMALL, **settings).to_environment())
    os.environ["ACCELERATE_USE_CPU"] = "true"
    sys.argv = [name]
    import_module(f"{SCRIPTS}.{name}").main()
    gc.collect()  # the script drops its Accelerators, and their engines end when they are collected
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# At stage 3 test_script compares the weights of a model whose engine is open, outside `full_params`, which is refused.
# test_sync asserts DistributedDataParallel's own `Parameter.grad`, which an engine does not show.
@pytest.mark.dist
@pytest.mark.parametrize(("name", "stage"), [("test_script", 2), ("test_ops", 3)])
def test_packaged_script(name: str, stage: int) -> None:
    ranks(2, packaged, name, {"stage": stage}, preload=PACKAGED)
