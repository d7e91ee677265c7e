"""The delayed parameter update against its recurrence, bit for bit: step i sees the weights of step i-2."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import gpt_batch, make_gpt
from support.training import (
    assert_same_bits,
    clip_exactly,
    config,
    exact_sgd,
    ranks,
    snapshot,
)
from torch import Tensor, nn

from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import CheckpointError, ConfigError
from zero_plugin.optim.reference import update as reference_update
from zero_plugin.optim.rule import rule_for

WARMUP = 4
STEPS = 12
CLIP = 0.5

PLACEMENTS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "gradients": "device", "backend": "chaos"},
    {"stage": 2},
    {"stage": 2, "overlap": False},
    {"stage": 2, "optimizer": "nvme", "backend": "chaos"},
    {"stage": 3, "params": "device"},
    {"stage": 3, "params": "host", "backend": "chaos"},
    {"stage": 3, "params": "host", "optimizer": "nvme", "gradients": "nvme"},
    {"stage": 3, "params": "nvme", "optimizer": "nvme"},
]


class ByReference(torch.optim.AdamW):
    """AdamW whose step is the plain-torch oracle of the compiled one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rule = rule_for(torch.optim.AdamW([torch.zeros(1)]))
        assert rule is not None
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(
                        step=0, m=torch.zeros_like(parameter), v=torch.zeros_like(parameter)
                    )
                state["step"] += 1
                reference_update(
                    rule,
                    master=parameter.view(-1),
                    states=(state["m"].view(-1), state["v"].view(-1)),
                    gradient=parameter.grad.view(-1),
                    output=None,
                    hyper=rule.hyper(group, state["step"]),
                    scale=1.0,
                    clip_value=None,
                )


def model_of() -> nn.Module:
    return make_gpt(width=12, layers=2)


def adam(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def reference_adam(parameters: Any) -> torch.optim.AdamW:
    return ByReference(parameters, lr=3e-3, weight_decay=0.1)


def rate(step: int) -> float:
    """A schedule of learning rates by powers of two, so that products with them are exact."""
    return 2.0 ** -(3 + step % 3)


@torch.no_grad()
def show(ahead: nn.Module, model: nn.Module) -> None:
    for new, old in zip(ahead.parameters(), model.parameters(), strict=True):
        old.copy_(new)


def recurrence(
    make: Callable[..., Any], *, warmup: int, accumulate: int = 1, size: int = 1, steps: int = STEPS
) -> Iterator[dict[str, Tensor]]:
    """Weights that a forward sees after each step, then those after the drain. `ahead` has every update."""
    model = model_of()
    ahead = copy.deepcopy(model)
    optimizer = make(ahead.parameters())
    for step in range(1, steps + 1):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for micro in range(accumulate):
            parts = []
            for rank in range(size):
                loss = model(gpt_batch(step * accumulate + micro, rank=rank)) / accumulate
                parts.append(torch.autograd.grad(loss, list(model.parameters())))
            for total, each in zip(sums, zip(*parts, strict=True), strict=True):
                total.add_(sum(each) / size)
        for parameter, gradient in zip(ahead.parameters(), sums, strict=True):
            parameter.grad = gradient
        clip_exactly(ahead, CLIP)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        if step > warmup:
            show(ahead, model)
        optimizer.step()
        if step < warmup:
            show(ahead, model)
        yield snapshot(model)
    yield snapshot(ahead)


def trained(
    folder: str,
    make: Callable[..., Any],
    *,
    accumulate: int = 1,
    rank: int = 0,
    stop: int | None = None,
    start: Any = None,
    steps: int = STEPS,
    **settings: Any,
) -> tuple[list[dict[str, Tensor]], Any]:
    """Train under the engine; after `stop` steps what is needed to go on, else the drained weights last."""
    if "nvme" in settings.values():
        settings["nvme_path"] = folder
    model = model_of()
    optimizer = make(model.parameters())
    first = 1
    if start is not None:
        model.load_state_dict(start["model"])
        first = start["step"] + 1
    settings = {"delayed_update": True, "delayed_update_warmup": WARMUP, **settings}
    seen: list[dict[str, Tensor]] = []
    with ZeroEngine(model, optimizer, config(**settings)) as engine:
        if start is not None:
            optimizer.load_state_dict(start["optimizer"])
            engine.load_delayed_update_state(start["delayed"])
        for step in range(first, (stop or steps) + 1):
            for micro in range(accumulate):
                last = micro == accumulate - 1
                with contextlib.nullcontext() if last else engine.no_sync():
                    loss = model(gpt_batch(step * accumulate + micro, rank=rank))
                    engine.backward(loss / accumulate)
            engine.clip_grad_norm_(CLIP)
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
            # A scheduler goes on at once; the update under way must not see it.
            for group in optimizer.param_groups:
                group["lr"] = 77.0
            optimizer.zero_grad()
            with engine.full_params():
                seen.append(snapshot(model))
        if stop is not None:
            return seen, {
                "step": stop,
                "model": seen[-1],
                "optimizer": optimizer.state_dict(),
                "delayed": engine.delayed_update_state(),
            }
        state = engine.full_state_dict()
        engine.drain()
        with engine.full_params():
            seen.append(snapshot(model))
        if engine.rank == 0:
            assert_same_bits(state, seen[-1], "exported before the drain: ")
    return seen, None


def assert_follows(seen: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert len(seen) == len(expected)
    for number, (one, other) in enumerate(zip(seen, expected, strict=True), start=1):
        assert_same_bits(one, other, f"after step {number}: ")


@pytest.mark.parametrize("settings", PLACEMENTS, ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_placement_follows_the_recurrence(
    settings: dict[str, Any], accumulate: int, tmp_path: Path
) -> None:
    if accumulate > 1 and settings["stage"] < 2:
        accumulate = 3
    expected = list(recurrence(exact_sgd, warmup=WARMUP, accumulate=accumulate))
    seen, _ = trained(str(tmp_path), exact_sgd, accumulate=accumulate, **settings)
    assert_follows(seen, expected)


@functools.cache
def expected_weights() -> list[dict[str, Tensor]]:
    return list(recurrence(exact_sgd, warmup=WARMUP))


@pytest.mark.parametrize("settings", PLACEMENTS[2::3], ids=str)
def test_adamw_follows_the_recurrence(settings: dict[str, Any], tmp_path: Path) -> None:
    expected = list(recurrence(reference_adam, warmup=WARMUP))
    seen, _ = trained(str(tmp_path), adam, **settings)
    assert_follows(seen, expected)


def test_the_recurrence_is_not_the_plain_one() -> None:
    delayed = list(recurrence(exact_sgd, warmup=WARMUP))
    plain = list(recurrence(exact_sgd, warmup=STEPS + 1))
    for number in range(WARMUP - 1):
        assert_same_bits(delayed[number], plain[number])
    # Step N changes nothing, and every one after it is another.
    assert_same_bits(delayed[WARMUP - 1], delayed[WARMUP - 2])
    assert_same_bits(delayed[WARMUP], plain[WARMUP - 1])
    for number in range(WARMUP + 1, STEPS + 1):
        with pytest.raises(AssertionError, match="differs by"):
            assert_same_bits(delayed[number], plain[number])


@pytest.mark.parametrize("stop", range(WARMUP - 3, WARMUP + 7))
@pytest.mark.parametrize("number", [0, 2, 4, 6, 8])
def test_a_run_goes_on_where_it_was_saved(stop: int, number: int, tmp_path: Path) -> None:
    settings = {**PLACEMENTS[number], "backend": "auto"}
    settings = {k: v for k, v in settings.items() if k != "overlap"}
    before, state = trained(str(tmp_path), exact_sgd, stop=stop, **settings)
    after, _ = trained(str(tmp_path), exact_sgd, start=state, **settings)
    assert_follows([*before, *after], expected_weights())


def test_what_was_saved_loads_without_a_delay(tmp_path: Path) -> None:
    _, state = trained(str(tmp_path), exact_sgd, stop=WARMUP + 3, stage=2)
    seen, _ = trained(str(tmp_path), exact_sgd, stop=None, steps=WARMUP + 3, stage=2)
    model = model_of()
    model.load_state_dict(state["model"])
    optimizer = exact_sgd(model.parameters())
    with ZeroEngine(model, optimizer, config(stage=2)) as engine:
        optimizer.load_state_dict(state["optimizer"])
        engine.load_delayed_update_state(state["delayed"])
        assert_same_bits(snapshot(model), seen[-1])
        assert engine.delayed_update_state()[0]["held"] == []


def rank_main(rank: int, size: int, folder: str, placements: list[dict[str, Any]]) -> list[Any]:
    return [
        [
            trained(folder, exact_sgd, rank=rank, **settings)[0],
            *(
                trained(folder, exact_sgd, rank=rank, start=state, **settings)[0]
                for _, state in [trained(folder, exact_sgd, rank=rank, stop=WARMUP + 1, **settings)]
            ),
        ]
        for settings in placements
    ]


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_follow_the_recurrence(size: int, tmp_path: Path) -> None:
    placements = [{**item, "backend": "threads"} for item in PLACEMENTS[size - 1 :: 3]]
    placements = [{k: v for k, v in item.items() if k != "overlap"} for item in placements]
    expected = list(recurrence(exact_sgd, warmup=WARMUP, size=size))
    for result in ranks(size, rank_main, str(tmp_path), placements, deadline=100.0):
        for whole, resumed in result:
            assert_follows(whole, expected)
            assert_follows(resumed, expected[WARMUP + 1 :])


# Around the edges -----------------------------------------------------------------------------------------------------


def delayed(model: nn.Module, **settings: Any) -> tuple[ZeroEngine, Any]:
    optimizer = exact_sgd(model.parameters())
    chosen = {"delayed_update": True, "delayed_update_warmup": 1, **settings}
    return ZeroEngine(model, optimizer, config(**chosen)), optimizer


def take_step(model: nn.Module, engine: ZeroEngine, step: int, factor: float = 1.0) -> None:
    engine.backward(model(gpt_batch(step)) * factor)
    engine.step()
    engine.zero_grad()


def test_a_drained_run_starts_its_delay_again() -> None:
    model = model_of()
    with delayed(model)[0] as engine:
        take_step(model, engine, 1)
        take_step(model, engine, 2)
        engine.drain()
        drained = snapshot(model)
        # Like step N: nothing is applied.
        take_step(model, engine, 3)
        assert_same_bits(snapshot(model), drained)
        take_step(model, engine, 4)
        with pytest.raises(AssertionError, match="differs by"):
            assert_same_bits(snapshot(model), drained)


def test_a_skipped_step_skips_its_own_update_only() -> None:
    model, other = model_of(), model_of()
    with delayed(model)[0] as engine, delayed(other)[0] as plain:
        take_step(model, engine, 1)
        with pytest.warns(RuntimeWarning, match="step skipped"):
            take_step(model, engine, 2, factor=float("inf"))
        assert engine.step_was_skipped
        take_step(other, plain, 1)
        plain.drain()
        assert_same_bits(snapshot(model), snapshot(other))
        assert engine.delayed_update_state()[0]["held"] == []


def test_closing_applies_what_is_pending() -> None:
    model, other = model_of(), model_of()
    engine, _ = delayed(model)
    take_step(model, engine, 1)
    engine.close()
    with delayed(other)[0] as drained:
        take_step(other, drained, 1)
        drained.drain()
        assert_same_bits(snapshot(model), snapshot(other))


def test_an_aborted_step_leaves_the_pending_update() -> None:
    model, other = model_of(), model_of()
    with delayed(model)[0] as engine, delayed(other)[0] as plain:
        take_step(model, engine, 1)
        take_step(other, plain, 1)
        engine.backward(model(gpt_batch(7)))
        engine.abort_step()
        for step in (2, 3):
            take_step(model, engine, step)
            take_step(other, plain, step)
        assert_same_bits(snapshot(model), snapshot(other))


def test_evaluation_sees_the_shown_weights_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "zero_plugin")
    model = model_of()
    with delayed(model)[0] as engine:
        take_step(model, engine, 1)
        take_step(model, engine, 2)
        before, held = snapshot(model), engine.delayed_update_state()
        losses: list[Tensor] = []
        for _ in range(2):
            with engine.evaluation_context(), torch.no_grad():
                losses.append(model(gpt_batch(9)))
        assert torch.equal(losses[0], losses[1])
        told = [item.getMessage() for item in caplog.records if "evaluation" in item.getMessage()]
        assert len(told) == 1
        assert "after step 2 of optimizer 0" in told[0]
        assert_same_bits(snapshot(model), before)
        assert engine.delayed_update_state() == held
        assert held[0]["held"]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_users_write_takes_the_place_of_the_pending_update(stage: int) -> None:
    model = model_of()
    name, parameter = next(
        (name, item) for name, item in model.named_parameters() if item.dim() == 2
    )
    with delayed(model, stage=stage)[0] as engine:
        take_step(model, engine, 1)
        with engine.full_params(writeback=True), torch.no_grad():
            parameter.fill_(0.125)
        engine.drain()
        with engine.full_params():
            assert parameter.eq(0.125).all(), name


def test_bf16_masters_are_ahead_of_the_weights() -> None:
    outcomes = []
    for settings in (
        {"stage": 2},
        {"stage": 3, "params": "host"},
        {"stage": 0, "backend": "chaos"},
    ):
        model = make_gpt(torch.bfloat16, width=12, layers=2)
        engine, optimizer = delayed(model, **settings)
        with engine:
            seen = []
            for step in range(1, 6):
                take_step(model, engine, step)
                with engine.full_params():
                    seen.append(snapshot(model))
            state = optimizer.state_dict()
            masters = [state["state"][i]["master"].bfloat16() for i in sorted(state["state"])]
            engine.drain()
            with engine.full_params():
                drained = [p.detach().clone() for p in model.parameters()]
            assert_same_bits(masters, drained)
            outcomes.append((seen, drained))
    for other in outcomes[1:]:
        assert_same_bits(outcomes[0], other)


def test_memory_counts_the_second_copies() -> None:
    sizes = {}
    for wanted in (False, True):
        model = make_gpt(torch.bfloat16, width=12, layers=2)
        settings = {"delayed_update": True} if wanted else {}
        with ZeroEngine(model, exact_sgd(model.parameters()), config(**settings)) as engine:
            sizes[wanted] = engine.memory()["host"]
            chunk = sum(block.chunk for block in engine._roster.blocks)
    assert sizes[True]["gradients"] == 2 * sizes[False]["gradients"]
    assert sizes[True]["staging"] >= sizes[False]["staging"] + 2 * chunk
    assert sizes[True]["master"] == sizes[False]["master"]


def test_settings_that_contradict_a_delay_are_refused() -> None:
    with pytest.raises(ConfigError, match="delayed_update=True has no use with"):
        config(delayed_update=True, optimizer="device")
    with pytest.raises(ConfigError, match="delayed_update_warmup=3 has no effect"):
        config(delayed_update_warmup=3)


def test_a_foreign_delay_is_refused_before_anything_changes() -> None:
    model = model_of()
    with delayed(model)[0] as engine:
        take_step(model, engine, 1)
        before = engine.delayed_update_state()
        with pytest.raises(CheckpointError, match=r"names parameter 'nobody\.weight'"):
            engine.load_delayed_update_state([{"steps": 3, "held": ["nobody.weight"]}])
        with pytest.raises(CheckpointError, match="of 2 optimizers, this engine has 1"):
            engine.load_delayed_update_state([before[0], before[0]])
        assert engine.delayed_update_state() == before


def test_no_combination_is_left_out() -> None:
    met = {(item["stage"], item.get("optimizer", "host")) for item in PLACEMENTS}
    assert met >= set(itertools.product((2, 3), ("host", "nvme")))
