"""Threads that change places after every few instructions: what one of them may see half done shows in the bits.

The chaos backend finds waits that the engine lacks. This finds those that are there and do not hold: a race between two
instructions of the runtime itself is met once in thousands of steps, and here in nearly every one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from support.training import Outcome, Recipe, assert_same_outcome, ranks, train

SWITCH_SECONDS = 1e-5
"""Time after which a thread gives way to another that waits for its turn; Python's own is 5 ms."""

DELAYED: dict[str, Any] = {"delayed_update": True, "delayed_update_warmup": 2}
MODES: dict[str, dict[str, Any]] = {
    "stage 0, speculation": {"stage": 0, "speculate": True},
    "stage 1, inside backward": {
        "stage": 1,
        "nonfinite": "propagate",
        "update_in_backward": True,
    },
    "stage 2, states in files": {"stage": 2, "optimizer": "nvme"},
    "stage 3": {"stage": 3},
    "stage 3, weights and states in files": {"stage": 3, "params": "nvme", "optimizer": "nvme"},
    "stage 3, delayed": {"stage": 3, "params": "host", **DELAYED},
}


@contextlib.contextmanager
def preempted(seconds: float) -> Generator[None]:
    """Inside, threads change places after `seconds`."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def outcome(rank: int, size: int, settings: dict[str, Any]) -> Outcome:
    clip = None if settings.get("update_in_backward") else 0.5
    recipe = Recipe(steps=6, accumulate=2, clip=clip, width=12)
    return train(recipe, rank=rank, bucket_bytes=512, **settings)


@pytest.mark.dist
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_whose_threads_change_places_all_the_time(mode: str, tmp_path: Path) -> None:
    settings = {**MODES[mode], "nvme_path": tmp_path} if "nvme" in str(MODES[mode]) else MODES[mode]
    expected = ranks(2, outcome, {**settings, "backend": "inline"})
    with preempted(SWITCH_SECONDS):
        found = ranks(2, outcome, {**settings, "backend": "threads"})
    for rank in range(2):
        assert_same_outcome(found[rank], expected[rank], f"{mode}, rank {rank}")
