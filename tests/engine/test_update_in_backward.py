"""Updates that run inside backward for good: the plain step's bits, and an error for whatever comes too late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import OddMLP, TinyMLP, make, mlp_loss
from support.training import (
    Recipe,
    adamw,
    assert_same_bits,
    assert_same_outcome,
    config,
    ranks,
    snapshot,
    train,
)

from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import ConfigError, EngineStateError

IN_BACKWARD: dict[str, Any] = {"nonfinite": "propagate", "update_in_backward": True}
PLACES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 2, "gradients": "device", "backend": "chaos"},
    {"stage": 2, "device_fraction": 0.5, "bucket_bytes": 1024},
    {"stage": 3, "params": "device"},
    {"stage": 3, "params": "host", "backend": "chaos"},
]


def recipe(**options: Any) -> Recipe:
    return Recipe(**{"steps": 5, "width": 12, "layers": 2, **options})


@pytest.mark.parametrize("settings", PLACES, ids=str)
def test_updates_inside_backward_change_no_bit(settings: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        expected = train(recipe(dtype=dtype), overlap=False, nonfinite="propagate")
        assert_same_outcome(train(recipe(dtype=dtype), **IN_BACKWARD, **settings), expected)


def outcomes_on(rank: int, size: int) -> Any:
    settings = ({"stage": 2, "nonfinite": "propagate"}, {"stage": 2, **IN_BACKWARD})
    return [train(recipe(), rank=rank, **each) for each in (*settings, {"stage": 3, **IN_BACKWARD})]


@pytest.mark.dist
def test_updates_inside_backward_change_no_bit_on_ranks() -> None:
    for plain, *others in ranks(2, outcomes_on, deadline=100.0):
        for other in others:
            assert_same_outcome(other, plain)


class Run:
    """An engine that updates inside backward."""

    def __init__(self, model: Any = None, **settings: Any) -> None:
        self.model = make(TinyMLP) if model is None else model
        self.optimizer = adamw(self.model.parameters())
        chosen = {"bucket_bytes": 256, "stage": 2, **IN_BACKWARD, **settings}
        self.engine = ZeroEngine(self.model, self.optimizer, config(**chosen))

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def backward(self, step: int) -> None:
        self.engine.backward(mlp_loss(self.model, step))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def everything(self) -> Any:
        return snapshot(self.model), self.optimizer.state_dict()


def plain(model: Any = None) -> Run:
    return Run(model, update_in_backward=False, overlap=False)


def test_each_block_is_updated_inside_backward_and_shown_by_the_step(tmp_path: Any) -> None:
    with Run(trace=tmp_path / "t.json", backend="threads") as one:
        blocks = len(one.engine._roster.blocks)
        assert blocks > 1
        before = snapshot(one.model)
        one.backward(0)
        one.engine.wait_for_update()
        assert_same_bits(snapshot(one.model), before)
        trace = one.engine._resources.trace
        assert trace is not None
        labels = [e.label for e in trace.events() if e.phase == "issued"]
        first = next(i for i, name in enumerate(labels) if name.startswith("update block"))
        assert first < max(i for i, name in enumerate(labels) if name.startswith("offload"))
        one.step()
        assert one.engine.speculation == {"taken": blocks, "undone": 0}
        assert not torch.equal(one.model.first.weight, before["first.weight"])


def test_micro_batches_inside_no_sync_are_not_the_last() -> None:
    with Run() as one, plain() as other:
        for step in range(3):
            for each in (one, other):
                with each.engine.no_sync():
                    each.backward(2 * step)
                each.backward(2 * step + 1)
                each.step()
        assert_same_bits(one.everything(), other.everything())


def test_absent_and_frozen_parameters() -> None:
    with Run(make(OddMLP)) as one, plain(make(OddMLP)) as other:
        for step in range(4):
            for each in (one, other):
                each.backward(step)
                each.step()
        assert_same_bits(one.everything(), other.everything())


def write_and_step(run: Run) -> None:
    with torch.no_grad():
        run.model.first.weight.mul_(1.0)
    run.optimizer.step()


TOO_LATE: dict[str, tuple[Callable[[Run], Any], str]] = {
    "zero_grad": (lambda run: run.optimizer.zero_grad(), "call step\\(\\) before gradients"),
    "states": (lambda run: run.optimizer.state_dict(), "call step\\(\\) before"),
    "save": (lambda run: run.engine.save_checkpoint("nowhere"), "call step\\(\\) before"),
    "write": (write_and_step, "call step\\(\\) before"),
}


@pytest.mark.parametrize("what", TOO_LATE)
def test_what_would_need_an_undo_is_refused_and_the_step_still_holds(
    what: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    act, message = TOO_LATE[what]
    with Run() as one, plain() as other:
        for each in (one, other):
            each.backward(0)
        with pytest.raises(EngineStateError, match=message):
            act(one)
        for each in (one, other):
            each.step()
        assert_same_bits(one.everything(), other.everything())
        assert not (tmp_path / "nowhere").exists()


def test_a_learning_rate_that_changes_too_late_is_refused_before_the_step_is_counted() -> None:
    with Run() as one, plain() as other:
        for each in (one, other):
            each.backward(0)
        one.optimizer.param_groups[0]["lr"] *= 0.5
        with pytest.raises(EngineStateError, match="before backward, not between"):
            one.optimizer.step()
        one.optimizer.param_groups[0]["lr"] *= 2.0
        for each in (one, other):
            each.step()
            each.backward(1)
            each.step()
        assert_same_bits(one.everything(), other.everything())


def test_clips_are_refused_and_the_norm_can_be_measured() -> None:
    with Run() as one:
        one.backward(0)
        with pytest.raises(ConfigError, match="use speculate=True"):
            one.engine.clip_grad_norm_(1.0)
        with pytest.raises(ConfigError, match="use speculate=True"):
            one.engine.clip_grad_value_(1.0)
        assert float(one.engine.clip_grad_norm_(float("inf"))) > 0
        one.step()


def test_a_second_backward_is_refused_and_what_was_updated_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The error comes from inside the second backward, which drops its gradients; training goes on."""
    with Run() as one, plain() as other:
        for each in (one, other):
            each.backward(0)
        with pytest.raises(EngineStateError, match=r"engine\.no_sync"):
            one.backward(1)
        assert "keep their update" in caplog.text
        other.step()
        assert_same_bits(one.everything(), other.everything())
        for each in (one, other):
            each.backward(2)
            each.step()
        assert_same_bits(one.everything(), other.everything())


def test_closing_before_the_step_shows_what_was_updated() -> None:
    with Run() as one, plain() as other:
        for each in (one, other):
            each.backward(0)
        other.step()
        one.engine.close()
        assert_same_bits(snapshot(one.model), snapshot(other.model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nonfinite": "skip"}, "needs nonfinite='propagate', not 'skip'"),
        ({"optimizer": "device"}, "needs optimizer='host', not 'device'"),
        ({"speculate": True}, "contradicts speculate=True"),
        ({"delayed_update": True}, "contradicts delayed_update=True"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**{**IN_BACKWARD, **settings})


@pytest.mark.parametrize("settings", [{}, {"stage": 3, "params": "host"}], ids=str)
def test_norms_are_computed_for_whoever_asks(settings: dict[str, Any], tmp_path: Any) -> None:
    """A step that propagates looks at no norm: none is computed in backward, where updates run, until one was asked for."""
    trace = {"trace": tmp_path / "t.json"}
    plain = Run(update_in_backward=False, nonfinite="skip", overlap=False)
    with Run(**settings, **trace) as one, plain:

        def norms(step: int) -> tuple[int, int, torch.Tensor | None]:
            """Passes over gradients in backward and until the step's end, and the norm where this step asks for it."""
            found = one.engine._resources.trace
            assert found is not None
            found.clear()

            def passes() -> int:
                one.engine.wait_for_update()
                labels = [event.label for event in found.events() if event.phase == "issued"]
                return labels.count("norm_partials")

            for each in (one, plain):
                each.backward(step)
            inside = passes()
            value = None
            if 2 <= step <= 3:
                value = one.engine.clip_grad_norm_(float("inf"))
                assert torch.equal(value, plain.engine.clip_grad_norm_(float("inf")))
            for each in (one, plain):
                each.step()
            return inside, passes(), value

        blocks = len(one.engine._roster.blocks)
        found = [norms(step)[:2] for step in range(6)]
        assert found == [
            (blocks, blocks),
            (0, 0),
            (0, blocks),
            (blocks, blocks),
            (blocks, blocks),
            (0, 0),
        ]
        with one.engine.full_params():
            assert_same_bits(one.everything(), plain.everything())


def norms_on(rank: int, size: int) -> Any:
    left = []
    for settings in ({"nonfinite": "propagate"}, {"nonfinite": "skip"}):
        run = Run(update_in_backward=False, **settings)
        with run:
            for step in range(4):
                run.backward(step + 10 * rank)
                with run.engine.full_grads():
                    left.append([p.grad.clone() for p in run.model.parameters()])
                if step == 2:
                    left.append(run.engine.clip_grad_norm_(0.1))
                run.step()
            left.append(run.everything())
    half = len(left) // 2
    assert_same_bits(left[:half], left[half:])
    return True


@pytest.mark.dist
def test_ranks_agree_on_norms_that_only_some_steps_ask_for() -> None:
    assert ranks(2, norms_on, deadline=100.0) == [True, True]
