"""Sharded weights on several ranks: other branches are an error and no hang, and the rest is as at stage 2."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
from support.models import BranchMLP, TinyMLP, features, gpt_batch, make, make_gpt, mlp_loss
from support.ranks import Killed, mark
from support.training import adamw, assert_same_bits, engine_for, exact_sgd, ranks, snapshot
from torch import nn

from zero_plugin.errors import ParameterError, ZeroError
from zero_plugin.sharding import watchdog

pytestmark = pytest.mark.dist

STAGE_2 = {"stage": 2, "backend": "threads", "bucket_bytes": 256}
STAGE_3 = (
    {"stage": 3, "backend": "threads", "bucket_bytes": 256},
    {"stage": 3, "params": "host", "backend": "chaos", "bucket_bytes": 512, "prefetch_units": 2},
)
SECONDS = 15.0
"""In which a rank must have its error; waits in these tests last 60."""


class Chosen(nn.Module):
    """Layers of which a call uses those it names, in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.head = nn.Linear(7, 5)

    def forward(self, hidden: torch.Tensor, *chosen: int) -> torch.Tensor:
        for number in chosen:
            hidden = torch.tanh(self.layers[number](hidden))
        return self.head(hidden)


def other_branches(rank: int, size: int, orders: list[tuple[int, ...]], settings: Any) -> Any:
    """Three good steps, then every rank its own layers."""
    model = make(Chosen)
    started = 0.0
    with contextlib.ExitStack() as stack:
        engine, optimizer = stack.enter_context(
            engine_for(model, exact_sgd(model.parameters()), timeout_seconds=60.0, **settings)
        )
        try:
            for step in range(5):
                started = time.monotonic()
                order = orders[rank] if step >= 3 else (0, 1, 2, 3)
                engine.backward(mlp_loss(model, step, *order, rank=rank))
                optimizer.step()
                optimizer.zero_grad()
        except ZeroError as error:
            return time.monotonic() - started, f"{type(error).__name__}: {error} {error.__cause__}"
    return "no error"


@pytest.mark.parametrize(
    "orders",
    [
        [(0, 1, 3), (0, 2, 3)],
        [(0, 1, 2, 3), (0, 1, 3, 2)],
        [(0,), (0, 1, 2, 3)],
        [(0, 1, 2), (0, 1, 2), (0, 1, 3)],
    ],
)
@pytest.mark.parametrize("settings", STAGE_3)
def test_ranks_in_other_branches_get_an_error_that_names_both(orders: Any, settings: Any) -> None:
    found = ranks(len(orders), other_branches, orders, settings, deadline=90)
    for number, one in enumerate(found):
        assert one != "no error", number
        seconds, text = one
        assert seconds < SECONDS, (number, text)
        assert "rank" in text
        assert text.count("layers.") >= 1 or "head" in text, text
    assert any("layers.1" in t or "layers.2" in t or "layers.3" in t for _, t in found)


def as_at_stage_2(rank: int, size: int, kind: str, settings: Any) -> Any:
    torch.manual_seed(0)
    model = make(BranchMLP) if kind == "experts" else make(Chosen)
    losses = []
    with engine_for(model, exact_sgd(model.parameters()), **settings) as (engine, optimizer):
        for step in range(5):
            for micro in range(2):
                last = micro == 1
                step_losses: Any
                with contextlib.nullcontext() if last else engine.no_sync():
                    if kind == "unused units":
                        order = ((0, 1, 2), (2, 1), (3,), (0,), ())[step]
                        step_losses = mlp_loss(model, 2 * step + micro, *order, rank=rank)
                    else:
                        chosen = ((0, 1), (1,), (2, 0), (0,), (1, 2))[step]
                        step_losses = mlp_loss(model, step, *chosen, rank=rank)
                    engine.backward(step_losses)
                losses.append(step_losses.detach().clone())
            losses.append(engine.clip_grad_norm_(0.5))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad(), engine.full_params():
                losses += [mlp_loss(model, 90 + i, 0, rank=rank) for i in range(rank + 1)]
        with engine.full_params():
            return losses, snapshot(model)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["experts", "unused units"])
def test_branches_that_are_the_same_on_all_ranks_have_the_bits_of_stage_2(
    kind: str, size: int
) -> None:
    expected = ranks(size, as_at_stage_2, kind, STAGE_2)
    found = ranks(size, as_at_stage_2, kind, STAGE_3[size % 2])
    for one, other in zip(found, expected, strict=True):
        assert_same_bits({"": one}, {"": other})


def other_graphs(rank: int, size: int, odd: int, settings: Any) -> Any:
    """Every rank runs every unit, but one has only some in its graph."""
    model = make(Chosen)
    settings = {"stage": 3, "timeout_seconds": 60.0, **settings}
    started = time.monotonic()
    try:
        with engine_for(model, exact_sgd(model.parameters()), **settings) as (engine, optimizer):
            for step in range(2):
                outputs = model(features(step, rank=rank), 0, 1, 2, 3)
                other = model(features(step + 40, rank=rank), 2)
                engine.backward((other if rank == odd else outputs).square().mean())
                optimizer.step()
    except ZeroError as error:
        return time.monotonic() - started, f"{type(error).__name__}: {error} {error.__cause__}"
    return "no error"


@pytest.mark.parametrize(
    ("size", "odd", "settings"),
    [
        (2, 1, {"backend": "threads"}),
        (3, 0, {"backend": "threads", "bucket_bytes": 256, "params": "host"}),
        (2, 0, {"backend": "inline"}),
    ],
)
def test_ranks_whose_graphs_need_other_units_get_an_error_in_time(
    size: int, odd: int, settings: Any
) -> None:
    for found in ranks(size, other_graphs, odd, settings, deadline=60):
        assert found != "no error"
        seconds, text = found
        for rank in range(size):
            assert f"  rank {rank}: " in text
        assert "layers." in text
        assert seconds < SECONDS


def one_is_slow(rank: int, size: int) -> Any:
    """The last rank computes for many times what a circle of waiting ranks is found in, forward and backward."""
    watchdog.PATIENCE_SECONDS = 0.2
    model = make(Chosen)
    settings = {"stage": 3, "bucket_bytes": 256, "backend": "threads"}

    def sleep(*_: Any) -> None:
        if rank == size - 1:
            time.sleep(1.5)

    with engine_for(model, exact_sgd(model.parameters()), **settings) as (engine, optimizer):
        for step in range(3):
            handle = model.layers[2].register_forward_hook(sleep)
            hidden = model.layers[1](features(step, rank=rank))
            loss = mlp_loss(model, step, 0, 1, 2, 3, rank=rank) + hidden.square().mean()
            handle.remove()
            if step == 1:
                hidden.register_hook(sleep)
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return "done"


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_computes_for_long_is_waited_for(size: int) -> None:
    assert ranks(size, one_is_slow) == ["done"] * size


def generate(rank: int, size: int, synced: bool) -> Any:
    """Each rank another number of tokens; in step with `synced_gpus`, or with whole weights."""
    import transformers

    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=67,
            hidden_size=24,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    prompt = gpt_batch(0, rank=rank)[:, :4]

    def tokens() -> Any:
        limits = {"max_new_tokens": 3 + 2 * rank, "do_sample": False}
        return model.generate(prompt, synced_gpus=synced, **limits)

    found = []
    with engine_for(model, adamw(model.parameters()), stage=3, timeout_seconds=20.0) as engined:
        engine, optimizer = engined
        for step in range(3):
            batch = gpt_batch(step, rank=rank)
            engine.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            with contextlib.nullcontext() if synced else engine.full_params():
                found.append(tokens())
        with engine.full_params():
            weights = snapshot(model)
            with torch.no_grad():
                expected = model.generate(prompt, max_new_tokens=3 + 2 * rank, do_sample=False)
    return found, expected, weights


@pytest.mark.parametrize("synced", [True, False])
def test_generate_with_other_numbers_of_tokens(synced: bool) -> None:
    results = ranks(3, generate, synced, deadline=120)
    for rank, (found, expected, weights) in enumerate(results):
        assert [item.shape[1] for item in found] == [4 + 3 + 2 * rank] * 3
        assert torch.equal(found[-1], expected)
        assert_same_bits(weights, results[0][2])


def uneven_evaluation(rank: int, size: int, whole: bool) -> str:
    model = make_gpt(width=12)
    settings = {"stage": 3, "timeout_seconds": 6.0}
    try:
        with engine_for(model, adamw(model.parameters()), **settings) as (engine, optimizer):
            for step in range(3):
                with torch.no_grad(), engine.full_params() if whole else contextlib.nullcontext():
                    for number in range(3 + rank):
                        model(gpt_batch(number, rank=rank))
                engine.backward(model(gpt_batch(step, rank=rank)))
                optimizer.step()
                optimizer.zero_grad()
    except ZeroError as error:
        return f"{type(error).__name__} {error} {error.__cause__}"
    return "done"


def test_evaluation_loops_of_other_lengths() -> None:
    assert ranks(2, uneven_evaluation, True) == ["done", "done"]
    for text in ranks(2, uneven_evaluation, False):
        assert text != "done"
        assert "rank" in text


def outside_modules(rank: int, size: int) -> str:
    model = make(TinyMLP)
    with engine_for(model, exact_sgd(model.parameters()), stage=3) as (engine, optimizer):
        loss = mlp_loss(model, 0, rank=rank)
        loss = loss + sum(p.norm() for p in model.parameters()) / 8
        engine.backward(loss)
        optimizer.step()
        with torch.no_grad(), pytest.raises(ParameterError) as caught:
            model.first.weight.norm()
        with engine.full_params():
            model.first.weight.norm()
    return str(caught.value)


def test_computing_outside_a_module_where_ranks_may_be_apart() -> None:
    for text in ranks(2, outside_modules):
        assert "'first.weight'" in text
        assert "full_params" in text


def evaluation_with_weights_of_others(rank: int, size: int, settings: Any) -> Any:
    """TinyGPT's root slices the embedding of places itself, under `no_grad` too."""
    model = make_gpt(width=12)
    losses = []
    with engine_for(model, adamw(model.parameters()), **settings) as (engine, optimizer):
        for step in range(3):
            with torch.no_grad():
                losses.append(model(gpt_batch(9, rank=rank)))
            engine.backward(model(gpt_batch(step, rank=rank)))
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_evaluation_with_weights_used_outside_their_module() -> None:
    expected = ranks(2, evaluation_with_weights_of_others, STAGE_2)
    for settings in STAGE_3:
        found = ranks(2, evaluation_with_weights_of_others, settings)
        assert_same_bits({"": found}, {"": expected})


def one_raises(rank: int, size: int, where: str) -> str:
    model = make(Chosen)
    started = time.monotonic()
    try:
        settings = {"stage": 3, "timeout_seconds": 60.0}
        with engine_for(model, exact_sgd(model.parameters()), **settings) as (engine, optimizer):
            for step in range(4):
                started = time.monotonic()
                if step == 2 and rank == 1:
                    if where == "die":
                        mark("dead")
                    handle = model.layers[2].register_forward_pre_hook(fail)
                    assert handle
                engine.backward(mlp_loss(model, step, 0, 1, 2, 3, rank=rank))
                optimizer.step()
                optimizer.zero_grad()
    except ArithmeticError:
        return "own error"
    except ZeroError as error:
        assert time.monotonic() - started < SECONDS
        return f"{type(error).__name__} {error} {error.__cause__}"
    return "done"


def fail(*_: Any) -> None:
    raise ArithmeticError("a failure of the user's code")


def test_a_rank_that_raises_in_its_forward_stops_the_others() -> None:
    found = ranks(3, one_raises, "raise", deadline=90)
    assert found[1] == "own error"
    for number in (0, 2):
        assert "rank 1" in found[number], found[number]


def test_a_rank_that_dies_stops_the_others() -> None:
    found = ranks(3, one_raises, "die", deadline=90, kill={1: "dead"})
    assert found[1] == Killed(rank=1)
    for number in (0, 2):
        assert "rank 1" in found[number], found[number]


def closed(rank: int, size: int) -> str:
    model = make(TinyMLP)
    with engine_for(model, exact_sgd(model.parameters()), stage=3):
        pass
    texts = []
    for use in (
        lambda: model(features(0)),
        model.first.weight.sum,
        model.state_dict,
    ):
        with pytest.raises(ParameterError) as caught:
            use()
        texts.append(str(caught.value))
    return "\n".join(texts)


def test_using_the_model_after_close_is_a_clear_error() -> None:
    for text in ranks(2, closed):
        assert text.count("full_state_dict") == 3, text
        assert "close" in text


def writes(rank: int, size: int, settings: Any) -> Any:
    model = make(TinyMLP)
    with engine_for(model, exact_sgd(model.parameters()), **settings) as (engine, optimizer):
        for step in range(4):
            engine.backward(mlp_loss(model, step, rank=rank))
            optimizer.step()
            optimizer.zero_grad()
            with engine.full_params(writeback=True), torch.no_grad():
                model.first.weight.clamp_(-0.1, 0.1)
                if step == 2:
                    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})
        state = engine.full_state_dict()
        with engine.full_params():
            weights = snapshot(model)
    return weights, state


def test_writes_reach_the_masters_of_every_rank() -> None:
    expected = ranks(3, writes, STAGE_2)
    for settings in STAGE_3:
        found = ranks(3, writes, settings)
        for one, other in zip(found, expected, strict=True):
            assert_same_bits({"": one[0]}, {"": other[0]})
        assert_same_bits(found[0][1], expected[0][1])
        assert found[1][1] == {}
