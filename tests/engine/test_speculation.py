"""Updates that begin inside backward: taken or undone, the result is the plain step's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import OddMLP, TinyMLP, gpt_batch, make, make_gpt, mlp_loss
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
from torch import Tensor, nn

from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import BudgetError, ConfigError

SMALL = Recipe(steps=6, width=12, layers=2)
PLACES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 2, "gradients": "device", "backend": "chaos"},
    {"stage": 2, "undo_bytes": 9000},
    {"stage": 3, "params": "device"},
    {"stage": 3, "params": "host", "backend": "chaos"},
]


def recipe(**options: Any) -> Recipe:
    return Recipe(**{"steps": 6, "width": 12, "layers": 2, **options})


@pytest.mark.parametrize("settings", PLACES, ids=str)
@pytest.mark.parametrize("clip", [None, 0.5], ids=["free", "clipped"])
def test_speculation_changes_no_bit(settings: dict[str, Any], clip: float | None) -> None:
    for accumulate, dtype in ((1, torch.float32), (3, torch.bfloat16)):
        chosen = recipe(clip=clip, accumulate=accumulate, dtype=dtype)
        expected = train(chosen, overlap=False, stage=2)
        assert_same_outcome(train(chosen, speculate=True, **settings), expected)


def losses_on(rank: int, size: int, clip: float | None, settings: dict[str, Any]) -> Any:
    return [
        train(recipe(clip=clip), rank=rank, stage=stage, **settings)
        for stage, settings in ((2, {"overlap": False}), (2, settings), (3, settings))
    ]


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
def test_speculation_changes_no_bit_on_ranks(size: int) -> None:
    for plain, *others in ranks(size, losses_on, 0.5, {"speculate": True}, deadline=100.0):
        for other in others:
            assert_same_outcome(other, plain)


class Watched:
    """An engine that speculates, and the same steps without."""

    def __init__(self, model: Any = None, **settings: Any) -> None:
        self.model = model or make(TinyMLP)
        self.optimizer = adamw(self.model.parameters())
        chosen = {"bucket_bytes": 256, "speculate": True, **settings}
        self.engine = ZeroEngine(self.model, self.optimizer, config(**chosen))

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def backward(self, step: int, factor: float = 1.0) -> None:
        self.engine.backward(mlp_loss(self.model, step) * factor)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def counts(self) -> tuple[int, int]:
        found = self.engine.speculation
        return found["taken"], found["undone"]

    def everything(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return snapshot(self.model), self.optimizer.state_dict()


def pair() -> tuple[Watched, Watched]:
    return Watched(), Watched(speculate=False, overlap=False)


def test_a_step_takes_what_backward_began() -> None:
    with Watched() as one:
        blocks = len(one.engine._roster.blocks)
        assert blocks > 1
        before = [item.alias.clone() for item in one.engine._roster.members]
        one.backward(0)
        # No weight has changed yet, whatever has run.
        one.engine._resources.backend.settle()
        for member, old in zip(one.engine._roster.members, before, strict=True):
            assert torch.equal(member.alias, old)
        one.step()
        assert one.counts == (blocks, 0)


def test_updates_begin_before_backward_has_ended(tmp_path: Any) -> None:
    with Watched(trace=tmp_path / "t.json", backend="threads") as one:
        one.backward(0)
        one.step()
        trace = one.engine._resources.trace
        assert trace is not None
        trace.clear()
        one.backward(1)
        events = [e for e in trace.events() if e.lane in ("update", "offload")]
        labels = [e.label for e in events if e.phase == "issued"]
        first_update = next(i for i, name in enumerate(labels) if name.startswith("update block"))
        last_gradient = max(i for i, name in enumerate(labels) if name.startswith("offload"))
        assert first_update < last_gradient


def test_a_clip_that_binds_undoes_and_is_exact() -> None:
    one, plain = pair()
    with one, plain:
        for step in range(5):
            for each in (one, plain):
                each.backward(step)
                each.engine.clip_grad_norm_(0.01 if step % 2 else 1e6)
                each.step()
            assert_same_bits(one.everything(), plain.everything(), f"step {step} ")
        taken, undone = one.counts
        assert taken > 0 < undone


def test_a_step_that_is_skipped_leaves_nothing_behind() -> None:
    one, plain = pair()
    with one, plain:
        for step, factor in enumerate((1.0, float("inf"), 1.0)):
            for each in (one, plain):
                each.backward(step, factor)
                if factor == 1.0:
                    each.step()
                else:
                    with pytest.warns(RuntimeWarning, match="step skipped"):
                        each.step()
        assert_same_bits(one.everything(), plain.everything())
        assert one.counts[1] > 0


@pytest.mark.parametrize(
    "between",
    [
        "second backward",
        "learning rate",
        "zero_grad",
        "zeroed",
        "state_dict",
        "write",
        "abort",
        "grads",
    ],
)
def test_whatever_happens_before_the_step(between: str) -> None:
    one, plain = pair()
    with one, plain:
        for each in (one, plain):
            each.backward(0)
            each.step()
            each.backward(1)
            if between == "second backward":
                each.backward(2)
            elif between == "learning rate":
                each.optimizer.param_groups[0]["lr"] *= 0.5
            elif between == "zero_grad":
                each.optimizer.zero_grad()
                each.backward(3)
            elif between == "zeroed":
                each.model.zero_grad()
                each.backward(3)
            elif between == "state_dict":
                each.state = each.optimizer.state_dict()  # type: ignore[attr-defined]
            elif between == "write":
                with torch.no_grad():
                    each.model.first.weight.mul_(0.5)
            elif between == "abort":
                each.engine.abort_step()
                each.backward(4)
            elif between == "grads":
                with each.engine.full_grads():
                    each.state = each.model.first.weight.grad.clone()  # type: ignore[attr-defined]
            each.step()
        assert_same_bits(one.everything(), plain.everything(), between)
        if hasattr(one, "state"):
            assert_same_bits(one.state, plain.state)  # type: ignore[attr-defined]


def test_absent_frozen_and_empty_parameters() -> None:
    outcomes = []
    for settings in ({"speculate": False}, {}, {"backend": "chaos"}):
        with Watched(make(OddMLP), **settings) as one:
            for step in range(4):
                one.backward(step)
                one.step()
            outcomes.append(one.everything())
    assert_same_bits(outcomes[0], outcomes[1])
    assert_same_bits(outcomes[0], outcomes[2])


def test_accumulation_is_learned() -> None:
    """An update before the last micro-batch of a step would be undone: after one step none is begun there."""
    first = -1
    with Watched() as one:
        for step in range(4):
            one.backward(2 * step)
            one.backward(2 * step + 1)
            one.step()
            if step == 0:
                first = one.counts[1]
        blocks = len(one.engine._roster.blocks)
        assert first == blocks
        assert one.counts == (3 * blocks, first)


def test_memory_for_undoing_is_counted_and_bounded() -> None:
    def staging(**settings: Any) -> int:
        model = make_gpt(width=12, layers=2)
        with ZeroEngine(model, adamw(model.parameters()), config(**settings)) as engine:
            engine.backward(model(gpt_batch(0)))
            engine.step()
            return engine.memory()["host"]["staging"]

    plain, whole = staging(), staging(speculate=True)
    elements = sum(p.numel() for p in make_gpt(width=12, layers=2).parameters())
    assert whole - plain >= 12 * elements
    assert plain < staging(speculate=True, undo_bytes=9000) <= plain + 9000
    with pytest.raises(BudgetError, match="host"):
        staging(speculate=True, host_limit=plain + 20 * elements)


def test_an_optimizer_without_a_compiled_rule_is_not_speculated() -> None:
    model: nn.Module = make(TinyMLP)
    optimizer = torch.optim.Adamax(model.parameters())
    with ZeroEngine(model, optimizer, config(speculate=True)) as engine:
        engine.backward(mlp_loss(model, 0))
        engine.step()
        assert engine.speculation == {"taken": 0, "undone": 0}


def test_an_optimizer_that_never_begins_early_takes_no_second_set() -> None:
    """An optimizer without a compiled rule runs at the step; its blocks leave the room to those of others."""
    model = make(TinyMLP)
    with ZeroEngine(model, torch.optim.RAdam(model.parameters()), config(speculate=True)) as engine:
        engine.backward(mlp_loss(model, 0))
        assert engine._undo.nbytes == 0
    with Watched() as one:
        one.backward(0)
        assert one.engine._undo.nbytes > 0


def test_settings_that_contradict_speculation() -> None:
    for settings, words in (
        ({"optimizer": "device"}, "speculate=True needs optimizer='host'"),
        ({"delayed_update": True}, "speculate=True contradicts delayed_update=True"),
    ):
        with pytest.raises(ConfigError, match=words):
            config(speculate=True, **settings)
    with pytest.raises(ConfigError, match="undo_bytes=5 has no effect"):
        config(undo_bytes=5)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_two_sets_of_states_change_roles_and_nothing_is_copied(moments: str, tmp_path: Any) -> None:
    """An update reads one set and writes the other; only small moments, which are updated in place, are copied first."""
    settings = {"moment_dtype": moments, "bucket_bytes": 1024}
    one = Watched(trace=tmp_path / "t.json", backend="threads", **settings)
    plain = Watched(speculate=False, overlap=False, **settings)
    with one, plain:
        item = next(iter(one.engine._states[0].blocks.values()))
        first = item.master
        seen: list[bool] = []
        for step in range(4):
            for each in (one, plain):
                each.backward(step)
                each.engine.clip_grad_norm_(0.01 if step == 2 else 1e6)
                each.step()
            seen.append(item.master is first)
            assert_same_bits(one.everything(), plain.everything(), f"step {step} ")
        # Exchanged, exchanged, exchanged and undone, exchanged.
        assert seen == [False, True, True, False]
        trace = one.engine._resources.trace
        assert trace is not None
        labels = {event.label for event in trace.events()}
        assert any(label.startswith("keep states") for label in labels) == (moments != "fp32")
        assert not any(label.startswith("undo") for label in labels)


def test_momentum_that_a_step_does_not_use_is_not_lost() -> None:
    """torch keeps the buffers of a group whose momentum is 0 for a while, and so does a block that changes sets meanwhile."""
    found: list[tuple[dict[str, Tensor], dict[str, Any]]] = []
    for speculate in (True, False):
        model = make(TinyMLP)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings = config(bucket_bytes=1024, speculate=speculate)
        with ZeroEngine(model, optimizer, settings) as engine:
            for step, momentum in enumerate((0.9, 0.9, 0.0, 0.9)):
                optimizer.param_groups[0]["momentum"] = momentum
                engine.backward(mlp_loss(model, step))
                optimizer.step()
                optimizer.zero_grad()
            assert bool(engine.speculation["taken"]) == speculate
            assert engine.speculation["undone"] == 0
            found.append((snapshot(model), optimizer.state_dict()))
    assert_same_bits(found[0], found[1], "momentum left out once ")


@pytest.mark.parametrize("early", ["speculate", "update_in_backward"])
def test_weights_are_written_in_the_order_of_their_updates(early: str, tmp_path: Any) -> None:
    """Copies of one lane keep their order: behind the first block's, whose update ends last, the others would wait."""
    settings: dict[str, Any] = {"speculate": False, early: True}
    if early == "update_in_backward":
        settings["nonfinite"] = "propagate"
    with Watched(trace=tmp_path / "t.json", backend="threads", **settings) as one:
        one.backward(0)
        one.step()
        one.engine.wait_for_update()
        trace = one.engine._resources.trace
        assert trace is not None
        trace.clear()
        one.backward(1)
        one.step()
        one.engine.wait_for_update()
        begun = [event for event in trace.events() if event.phase == "issued"]
        updates = [e.label.split()[1] for e in begun if e.label.startswith("update ")]
        uploads = [e.label.split()[1] for e in begun if e.label.startswith("upload ")]
        assert len(updates) > 1
        assert uploads == updates
        trace.clear()
        # A step that begins nothing early writes them in the order of the next forward.
        one.backward(2)
        if early == "speculate":
            one.engine.clip_grad_norm_(1e-6)
            one.step()
            one.engine.wait_for_update()
            begun = [event for event in trace.events() if event.phase == "issued"]
            assert [e.label.split()[1] for e in begun if e.label.startswith("upload ")] == uploads[
                ::-1
            ]
        else:
            one.step()
