"""Tiled models under the engine: the same bits as in plain torch, and the untiled model's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import gpt_batch, make_gpt
from support.tiling import tile
from support.training import (
    SETTINGS,
    Session,
    adamw,
    assert_like_plain_torch,
    assert_same_bits,
    engine_for,
    exact_sgd,
    ranks,
    run_script,
    snapshot,
)

from zero_plugin import ZeroEngine, tiled_cross_entropy
from zero_plugin.errors import EngineStateError, OptimizerError
from zero_plugin.sharding.units import plan_units
from zero_plugin.tiling.modules import Tile

STEPS = 3


def tiled_gpt() -> Any:
    return tile(make_gpt(), max_bytes=3000)


def script(session: Any) -> None:
    for step in range(STEPS):
        for micro in range(2):
            loss = session.model(gpt_batch(2 * step + micro))
            session.backward(loss / 2)
            session.notes.append(loss.detach().clone())
        session.clip(1.0)
        session.update()


def test_same_bits_as_plain_torch() -> None:
    assert_like_plain_torch(tiled_gpt, script, settings=SETTINGS)


@pytest.mark.parametrize("stage", [1, 2])
def test_like_the_untiled_model_in_plain_torch(stage: int) -> None:
    expected = run_script(make_gpt, script)
    found = run_script(tiled_gpt, script, settings={"stage": stage})
    assert list(found["weights"]) == list(expected["weights"])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_tiles_are_gathered_one_by_one_at_stage_3() -> None:
    expected = run_script(tiled_gpt, script)
    torch.manual_seed(0)
    model = tiled_gpt()
    plan = plan_units(model, persist_below=0)
    tiles = {id(module) for module in model.modules() if isinstance(module, Tile)}
    assert tiles == {id(module) for module, _ in plan.uses} & tiles
    largest = max(
        sum(parameter.nbytes for _, parameter in unit.parameters)
        for unit in plan.units
        if id(unit.module) in tiles
    )
    assert largest <= 3000
    optimizer = exact_sgd(model.parameters())
    with engine_for(model, optimizer, stage=3, persist_below=0) as (engine, _):
        session = Session(model=model, optimizer=optimizer, engine=engine)
        script(session)
        assert_same_bits(session.notes, expected["notes"])
        assert_same_bits(engine.full_state_dict(), expected["weights"])


def two_ranks(rank: int, size: int, stage: int) -> Any:
    model = tiled_gpt()
    with engine_for(model, stage=stage) as (engine, optimizer):
        for step in range(3):
            engine.backward(model(gpt_batch(step, rank=rank)))
            optimizer.step()
            optimizer.zero_grad()
        saved = engine.full_state_dict()
        return snapshot(model), saved


@pytest.mark.dist
def test_two_ranks_and_the_state_dict_of_the_engine() -> None:
    (one, saved), (other, _) = ranks(2, two_ranks, 2)
    assert_same_bits(one, other)
    assert_same_bits(saved, one)
    assert list(saved) == list(make_gpt().state_dict())
    stage_1, _ = ranks(2, two_ranks, 1)[0]
    assert_same_bits(stage_1, one)


def test_a_loss_in_chunks_trains_a_tied_head() -> None:
    def chunked(session: Any) -> None:
        model = session.model
        states: list[Any] = []
        handle = model.norm.register_forward_hook(lambda *call: states.append(call[2]))
        for step in range(3):
            tokens = gpt_batch(step)
            model(tokens)
            loss = tiled_cross_entropy(states.pop(), model.head, tokens[:, 1:], chunk_tokens=7)
            session.backward(loss)
            session.update()
        handle.remove()

    assert_like_plain_torch(tiled_gpt, chunked)


def test_writes_through_the_handle_reach_the_masters() -> None:
    def writing(session: Any) -> None:
        for step in range(3):
            session.backward(session.model(gpt_batch(step)))
            session.update()
            with session.full_params(writeback=True), torch.no_grad():
                session.model.head.weight.clamp_(-0.02, 0.02)
                session.model.blocks[0].attention.mix.weight.data *= 0.5

    assert_like_plain_torch(tiled_gpt, writing)


def test_a_live_engine_is_noticed() -> None:
    model = make_gpt()
    with engine_for(model):
        before = list(model.parameters())
        with pytest.raises(EngineStateError, match=r"'tokens.weight' belongs to a live engine"):
            tile(model, max_bytes=3000)
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    tile(model, max_bytes=3000)
    with engine_for(model) as (engine, optimizer):
        engine.backward(model(gpt_batch(0)))
        optimizer.step()


def test_an_optimizer_built_before_tiling_is_refused() -> None:
    model = make_gpt()
    optimizer = adamw(model.parameters())
    tile(model, max_bytes=3000)
    with pytest.raises(OptimizerError, match="after any step that replaces them"):
        ZeroEngine(model, optimizer)
