"""A checkpoint is loaded at another number of ranks, stage and placement: equal bits, and the run goes on as it would have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import CASES, Case, build, draw_pairs, spread, state_of, train
from support.ranks import run_ranks
from support.training import PRELOAD, assert_same_bits, flatten

WHOLE = os.environ.get("ZERO_PLUGIN_WHOLE_MATRIX") == "1"
"""Run all pairs: a few minutes. docs/checkpoints.md says how that went."""

ALL_PAIRS = draw_pairs(48)
PAIRS = ALL_PAIRS if WHOLE else spread(ALL_PAIRS, 3)
BEFORE, AFTER = range(3), range(3, 13)


def uninterrupted(rank: int, size: int, folder: Path) -> Any:
    model, _, engine = build(folder, Case(size, 2, "host"))
    train(model, engine, BEFORE)
    train(model, engine, AFTER)
    state = state_of(engine)
    engine.close()
    return state if rank == 0 else None


def save_all(rank: int, size: int, folder: Path, cases: list[Case]) -> Any:
    for case in cases:
        model, _, engine = build(folder, case)
        train(model, engine, BEFORE)
        engine.save_checkpoint(folder / str(case), extra={"case": str(case)})
        state = state_of(engine)
        if rank == 0:
            torch.save(state, folder / f"{case}.pt")
        engine.close()
    return uninterrupted(rank, size, folder)


def load_all(rank: int, size: int, folder: Path, pairs: list[tuple[Case, Case]]) -> Any:
    states: list[Any] = []
    for source, target in pairs:
        model, _, engine = build(folder, target)
        extra = engine.load_checkpoint(folder / str(source))
        assert extra == {"case": str(source)}
        state = state_of(engine)
        if rank == 0:
            saved = torch.load(folder / f"{source}.pt", weights_only=True)
            assert_same_bits(state, saved, f"{source} -> {target}: ")
        train(model, engine, AFTER)
        state = state_of(engine)
        states.append(state if rank == 0 else None)
        engine.close()
    return states


def close(one: Any, other: Any) -> bool:
    left, right = flatten(one), flatten(other)
    return left.keys() == right.keys() and all(
        torch.allclose(value, right[key], rtol=1e-4, atol=1e-6)
        for key, value in left.items()
        if isinstance(value, torch.Tensor)
    )


def test_the_pairs_are_as_many_as_promised() -> None:
    assert len(ALL_PAIRS) >= 40
    assert {source for source, _ in ALL_PAIRS} == set(CASES)
    assert {target.world for _, target in PAIRS} == {1, 2, 3, 4}
    assert {target.tier for _, target in PAIRS} == {"device", "host", "nvme"}
    assert {target.stage for _, target in PAIRS} == {1, 2, 3}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(1200 if WHOLE else 120)
def test_every_world_stage_and_tier_loads_what_another_saved(tmp_path: Path) -> None:
    deadline = 500.0 if WHOLE else 60.0
    references: dict[int, Any] = {}
    for world in (1, 2, 3, 4):
        cases = [case for case in CASES if any(case == source for source, _ in PAIRS)]
        cases = [case for case in cases if case.world == world]
        references[world] = run_ranks(
            world, save_all, tmp_path, cases, preload=PRELOAD, deadline=deadline
        )[0]
    for world in (1, 2, 3, 4):
        pairs = [pair for pair in PAIRS if pair[1].world == world]
        found = run_ranks(world, load_all, tmp_path, pairs, preload=PRELOAD, deadline=deadline)[0]
        for (source, target), state in zip(pairs, found, strict=True):
            if source.world == target.world:
                assert_same_bits(state, references[world], f"{source} -> {target}, later: ")
            else:
                assert close(state, references[world]), f"{source} -> {target}, later"
