"""Every way to take a step over seeded chaos, and the five waits without which one of them goes wrong.

The five are those of a pipeline whose optimizer runs beside the computation, layer by layer (RoundPipe): a use of weights
waits for their update, an update for its gradient, the next gradient for the update that reads the last one, a publication for
the computation that still uses the old weights, and the next update for the publication of the last.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
from support.models import TinyMLP, make, mlp_loss
from support.training import adamw, assert_same_bits, config, snapshot
from torch import Tensor

from zero_plugin.engine import ZeroEngine
from zero_plugin.grads.offload import GradientShards
from zero_plugin.optim.pipeline import StepPipeline
from zero_plugin.runtime.operations import Copy, Zero
from zero_plugin.sharding.pending import PendingWeights

DELAYED: dict[str, Any] = {"delayed_update": True, "delayed_update_warmup": 2}
IN_BACKWARD: dict[str, Any] = {"nonfinite": "propagate", "update_in_backward": True}
MODES: dict[str, tuple[dict[str, Any], bool]] = {
    # settings, and whether steps are clipped
    "exact": ({}, True),
    "speculation": ({"speculate": True}, True),
    "a little speculation": ({"speculate": True, "undo_bytes": 3000}, True),
    "inside backward": (IN_BACKWARD, False),
    "delayed": (DELAYED, True),
    "part on the device": ({"device_fraction": 0.6}, True),
    "delayed, part on the device": ({"device_fraction": 0.6, **DELAYED}, True),
}
STEPS = 5
DEADLINE = 20.0


def run(settings: dict[str, Any], *, clip: bool, to_none: bool = True) -> dict[str, Any]:
    """Losses and weights of a few steps; a clip binds in some and not in others."""
    model = make(TinyMLP)
    optimizer = adamw(model.parameters())
    losses: list[Tensor] = []
    with ZeroEngine(model, optimizer, config(**{"bucket_bytes": 128, **settings})) as engine:
        for step in range(STEPS):
            loss = mlp_loss(model, step)
            losses.append(loss.detach().clone())
            engine.backward(loss)
            if clip:
                engine.clip_grad_norm_(0.2 if step % 2 else 1e6)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        engine.drain()
        with engine.full_params():
            return {"losses": losses, "weights": snapshot(model)}


def drawn(seed: int, mode: str) -> dict[str, Any]:
    generator = random.Random(seed)
    stage = generator.choice([0, 1, 2, 3])
    return {
        **MODES[mode][0],
        "stage": stage,
        "params": generator.choice(["device", "host"]) if stage == 3 else "device",
        "gradients": generator.choice(["device", "host"]),
        "bucket_bytes": generator.choice([64, 128, 400, "32MiB"]),
        "backend": "chaos",
        "backend_seed": seed,
    }


def expected(mode: str) -> dict[str, Any]:
    settings, clip = MODES[mode]
    plain = DELAYED if "delayed_update" in settings else {}
    return run({"overlap": False, **plain}, clip=clip)


@pytest.mark.parametrize("mode", MODES)
def test_no_schedule_finds_a_stale_or_torn_read(mode: str, schedules: int) -> None:
    plain = expected(mode)
    count = -(-schedules // len(MODES))
    for seed in range(count):
        found = run(drawn(seed, mode), clip=MODES[mode][1])
        assert_same_bits(found, plain, f"{mode}, seed {seed}: ")


def without_some_schedule_goes_wrong(
    patch: pytest.MonkeyPatch, owner: type, wait: str, settings: dict[str, Any], *, to_none: bool
) -> bool:
    def trained(**changed: Any) -> dict[str, Any]:
        return run(changed, clip=False, to_none=to_none)

    chaos = {**settings, "backend": "chaos"}
    plain = trained(overlap=False)
    for seed in range(3):
        assert_same_bits(trained(**chaos, backend_seed=seed), plain)
    patch.setattr(owner, wait, lambda *_: None)

    def goes_wrong(seed: int) -> bool:
        try:
            assert_same_bits(trained(**chaos, backend_seed=seed), plain)
        except Exception:  # noqa: BLE001 - other bits, or NaN that some check found
            return True
        return False

    return any(goes_wrong(seed) for seed in range(20))


def test_a_use_waits_for_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_some_schedule_goes_wrong(
        monkeypatch, PendingWeights, "expect", {"stage": 2}, to_none=True
    )


def test_the_next_gradient_waits_for_the_update_that_reads_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backward comes after a forward, which has waited for all it uses; the zeros of `zero_grad` come at once."""
    assert without_some_schedule_goes_wrong(
        monkeypatch, GradientShards, "read_by", {"stage": 2}, to_none=False
    )


class Gate:
    """Holds back the copies whose label begins so, until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch, prefix: str) -> None:
        self.opened = threading.Event()
        self.opened.set()
        plain = Copy.run

        def held(copy: Copy, kernels: Any) -> Any:
            if copy.label.startswith(prefix) and not self.opened.wait(DEADLINE):
                raise TimeoutError(f"{copy.label} was never let through")
            return plain(copy, kernels)

        patch.setattr(Copy, "run", held)


def ends(ticket: Any, *, soon: bool) -> bool:
    """Whether an operation ends, given time where it should."""
    limit = time.monotonic() + (DEADLINE if soon else 0.2)
    while not ticket.done and time.monotonic() < limit:
        time.sleep(0.01)
    return bool(ticket.done)


ONE_BLOCK: dict[str, Any] = {"stage": 2, "bucket_bytes": "32MiB", "backend": "threads"}


@pytest.mark.parametrize("removed", [False, True], ids=["kept", "removed"])
def test_an_update_waits_for_its_gradient(
    *, removed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "offload")
    if removed:
        plain = GradientShards.chunk
        monkeypatch.setattr(
            GradientShards, "chunk", lambda self, block: (plain(self, block)[0], ())
        )
    model = make(TinyMLP)
    settings = {**ONE_BLOCK, **IN_BACKWARD}
    with ZeroEngine(model, adamw(model.parameters()), config(**settings)) as engine:
        gate.opened.clear()
        engine.backward(mlp_loss(model, 0))
        (update,) = engine._pipeline._running.values()
        assert ends(update, soon=removed) == removed
        gate.opened.set()


@pytest.mark.parametrize("removed", [False, True], ids=["kept", "removed"])
def test_an_update_waits_for_the_publication_of_the_last(
    *, removed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "upload")
    if removed:
        plain = StepPipeline._publish_block

        def forgets(self: StepPipeline, done: Any) -> Any:
            before = dict(self._running)
            published = plain(self, done)
            self._running.clear()
            self._running.update(before)
            return published

        monkeypatch.setattr(StepPipeline, "_publish_block", forgets)
    model = make(TinyMLP)
    optimizer = adamw(model.parameters())
    with ZeroEngine(model, optimizer, config(**{**ONE_BLOCK, **DELAYED})) as engine:
        for step in range(3):
            engine.backward(mlp_loss(model, step))
            if step == 2:
                gate.opened.clear()
            optimizer.step()
            optimizer.zero_grad()
        (update,) = engine._pipeline._running.values()
        assert update.label.startswith("update")
        assert ends(update, soon=removed) == removed
        gate.opened.set()


@pytest.mark.parametrize("waits", [True, False], ids=["kept", "removed"])
def test_a_publication_waits_for_computation_that_uses_the_old_weights(
    *, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is a lane here: what it computes reads the weights late, as a stream does."""
    model = make(TinyMLP)
    optimizer = adamw(model.parameters())
    seen: list[Tensor] = []
    with ZeroEngine(model, optimizer, config(bucket_bytes=128, backend="threads")) as engine:
        backend = engine._resources.backend
        device = backend.lane("device computation", "device")
        weight = model.first.weight
        memory, old = weight.data, weight.detach().clone()
        engine.backward(mlp_loss(model, 0))
        reading = device.submit(Reads(memory, seen))
        marks = backend.mark

        def mark(label: str) -> Any:
            return reading if label.startswith("step of") and waits else marks(label)

        monkeypatch.setattr(backend, "mark", mark)
        optimizer.step()
        engine.wait_for_update()
        reading.wait()
    assert torch.equal(seen[0], old) == waits


class Reads(Zero):
    """A slow computation on weights."""

    def __init__(self, memory: Tensor, seen: list[Tensor]) -> None:
        super().__init__(destinations=(), label="backward of the last step")
        object.__setattr__(self, "found", (memory, seen))

    def run(self, kernels: Any) -> None:
        del kernels
        time.sleep(0.3)
        memory, seen = self.found  # type: ignore[attr-defined]
        seen.append(memory.clone())
