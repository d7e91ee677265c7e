"""Beginning and end: what a closed, broken or forgotten engine leaves behind."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from support.models import NormMLP, TinyMLP, mlp_loss
from support.training import adamw, assert_same_bits, config, engine_for, exact_sgd, ranks, snapshot

from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import EngineStateError, LaneError


def lane_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("zero-")]


@pytest.mark.parametrize("backend", ["inline", "threads", "chaos"])
def test_closing_twice_leaves_a_plain_model_and_no_threads(backend: str) -> None:
    torch.manual_seed(0)
    model, twin = NormMLP(), NormMLP()
    optimizer = exact_sgd(model.parameters())
    engine = ZeroEngine(model, optimizer, config(backend=backend))
    assert bool(lane_threads()) == (backend != "inline")
    for step in range(2):
        engine.backward(mlp_loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
    engine.backward(mlp_loss(model, 2))
    engine.close()
    engine.close()
    assert lane_threads() == []
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not model._forward_pre_hooks
    # It trains on, in plain torch, from where it was.
    twin.load_state_dict(model.state_dict())
    for net in (model, twin):
        plain = exact_sgd(net.parameters())
        mlp_loss(net, 3).backward()
        plain.step()
    assert_same_bits(snapshot(model), snapshot(twin))


def test_calls_after_closing_are_refused() -> None:
    model = TinyMLP()
    optimizer = adamw(model.parameters())
    engine = ZeroEngine(model, optimizer, config())
    engine.backward(mlp_loss(model, 0))
    optimizer.step()
    engine.close()
    calls: dict[str, Any] = {
        "backward": lambda: engine.backward(mlp_loss(model, 0)),
        "step": engine.step,
        "optimizer.step": optimizer.step,
        "optimizer.zero_grad": optimizer.zero_grad,
        "optimizer.state_dict": optimizer.state_dict,
        "load": lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        "no_sync": lambda: engine.no_sync().__enter__(),
        "full_params": lambda: engine.full_params().__enter__(),
        "full_grads": lambda: engine.full_grads().__enter__(),
        "full_state_dict": engine.full_state_dict,
        "optimizer_state_dict": lambda: engine.optimizer_state_dict(optimizer),
        "drain": engine.drain,
        "zero_grad": engine.zero_grad,
    }
    for name, call in calls.items():
        print(name)  # shown when it is accepted
        with pytest.raises(EngineStateError, match=r"after .*close"):
            call()
    engine.abort_step()


@pytest.mark.parametrize("closed", [True, False])
def test_copies_of_the_model_are_plain(closed: bool) -> None:
    model = NormMLP()
    optimizer = exact_sgd(model.parameters())
    engine = ZeroEngine(model, optimizer, config())
    engine.backward(mlp_loss(model, 0))
    optimizer.step()
    optimizer.zero_grad()
    if closed:
        engine.close()
    copied = copy.deepcopy(model)
    assert not any(parameter._backward_hooks for parameter in copied.parameters())
    assert_same_bits(snapshot(copied), snapshot(model))
    before = snapshot(model)
    plain = exact_sgd(copied.parameters())
    mlp_loss(copied, 1).backward()
    assert type(copied.first.weight.grad) is torch.Tensor
    plain.step()
    assert not torch.equal(copied.first.weight, model.first.weight)
    assert torch.equal(model.first.weight, before["first.weight"])
    engine.close()


def test_the_same_model_is_given_to_a_second_engine_after_the_first() -> None:
    def run(*, parts: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = TinyMLP()
        state = None
        for part in range(parts):
            optimizer = exact_sgd(model.parameters())
            with engine_for(model, optimizer) as (engine, _):
                if state is not None:
                    optimizer.load_state_dict(state)
                for step in range(4 // parts):
                    engine.backward(mlp_loss(model, part * 4 // parts + step))
                    optimizer.step()
                    optimizer.zero_grad()
                state = optimizer.state_dict()
        return snapshot(model)

    assert_same_bits(run(parts=2), run(parts=1))


def test_a_forgotten_engine_is_collected_with_its_threads() -> None:
    model = TinyMLP()
    engine = ZeroEngine(model, adamw(model.parameters()), config(backend="threads"))
    engine.backward(mlp_loss(model, 0))
    engine.step()
    gone = weakref.ref(engine)
    del engine, model
    gc.collect()
    assert gone() is None
    for thread in threading.enumerate():
        if thread.name.startswith("zero-"):
            thread.join(5.0)
    assert lane_threads() == []


def test_the_context_closes_on_an_exception() -> None:
    model = TinyMLP()

    def broken() -> None:
        with ZeroEngine(model, adamw(model.parameters()), config()) as engine:
            engine.backward(mlp_loss(model, 0))
            raise ZeroDivisionError

    before = lane_threads()
    with pytest.raises(ZeroDivisionError):
        broken()
    assert lane_threads() == before


# Errors of workers ----------------------------------------------------------------------------------------------------


class Broken(torch.optim.RMSprop):
    """Fails at a chosen step, deep in a worker; element-wise otherwise."""

    fail = False

    def step(self, closure: Any = None) -> Any:
        if Broken.fail:
            raise ValueError("the update is broken")
        return super().step(closure)


def _step_to_the_end(engine: ZeroEngine) -> None:
    engine.step()
    engine.wait_for_update()


@pytest.mark.parametrize("backend", ["inline", "threads", "chaos"])
def test_a_workers_exception_surfaces_with_its_label(backend: str, monkeypatch: Any) -> None:
    model = TinyMLP()
    optimizer = Broken(model.parameters(), lr=0.01)
    with engine_for(model, optimizer, backend=backend, bucket_bytes=256) as (engine, _):
        engine.backward(mlp_loss(model, 0))
        monkeypatch.setattr(Broken, "fail", True)
        with pytest.raises(
            LaneError, match=r"update block \d+ \(.*ValueError: the update is broken"
        ) as caught:
            _step_to_the_end(engine)
        assert isinstance(caught.value.__cause__, ValueError)
        monkeypatch.setattr(Broken, "fail", False)
        # The engine goes on once the broken step is dropped.
        engine.abort_step()
        optimizer.zero_grad()
        if backend == "chaos":
            # It fills what an operation will write when that is submitted, so weights that were never uploaded are NaN.
            return
        before = snapshot(model)
        engine.backward(mlp_loss(model, 1))
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(before["second.bias"], model.second.bias)
    assert lane_threads() == []


@pytest.mark.parametrize("backend", ["inline", "threads", "chaos"])
def test_a_broken_copy_in_backward_surfaces_and_leaves_no_thread(
    backend: str, monkeypatch: Any
) -> None:
    from zero_plugin.runtime.operations import Copy

    model = TinyMLP()
    with engine_for(model, backend=backend, bucket_bytes=256) as (engine, optimizer):
        original = Copy.run

        def broken(self: Copy, kernels: Any) -> None:
            raise OSError("the bus is on fire")

        monkeypatch.setattr(Copy, "run", broken)

        def step() -> None:
            engine.backward(mlp_loss(model, 0))
            optimizer.step()

        with pytest.raises(LaneError, match="OSError: the bus is on fire"):
            step()
        monkeypatch.setattr(Copy, "run", original)
        engine.abort_step()
        before = snapshot(model)
        engine.backward(mlp_loss(model, 1))
        optimizer.step()
        assert not torch.equal(before["second.bias"], model.second.bias)
    assert lane_threads() == []


class Interrupted(torch.optim.RMSprop):
    """Ctrl-C while the step runs."""

    now = False

    def step(self, closure: Any = None) -> Any:
        if Interrupted.now:
            raise KeyboardInterrupt
        return super().step(closure)


def test_keyboard_interrupt_in_a_step_hangs_nothing(monkeypatch: Any) -> None:
    model = TinyMLP()
    optimizer = Interrupted(model.parameters(), lr=0.01)
    with engine_for(model, optimizer, backend="inline") as (engine, _):
        engine.backward(mlp_loss(model, 0))
        monkeypatch.setattr(Interrupted, "now", True)
        with pytest.raises((KeyboardInterrupt, LaneError)):
            optimizer.step()
        monkeypatch.setattr(Interrupted, "now", False)
        engine.abort_step()
        engine.backward(mlp_loss(model, 1))
        optimizer.step()


def interrupted_between(rank: int, size: int, backend: str) -> dict[str, torch.Tensor]:
    """In a rank: a real SIGINT arrives while the main thread waits for a step."""
    import os
    import signal

    torch.manual_seed(0)
    model = TinyMLP()
    caught = 0
    with engine_for(model, backend=backend) as (engine, optimizer):
        for step in range(20):
            timer = threading.Timer(0.004 * (step % 5), os.kill, (os.getpid(), signal.SIGINT))
            try:
                try:
                    timer.start()
                    engine.backward(mlp_loss(model, step))
                    optimizer.step()
                    optimizer.zero_grad()
                finally:
                    timer.join()
            except KeyboardInterrupt:
                caught += 1
                engine.abort_step()
                optimizer.zero_grad()
        engine.backward(mlp_loss(model, 99))
        optimizer.step()
    assert caught > 0
    assert lane_threads() == []
    return snapshot(model)


@pytest.mark.parametrize("backend", ["threads", "chaos"])
def test_real_interrupts_at_any_moment_hang_nothing(backend: str) -> None:
    (weights,) = ranks(1, interrupted_between, backend, store="none", deadline=60.0)
    # Chaos poisons what an interrupted upload would have written; elsewhere the old weights stand.
    assert backend == "chaos" or all(value.isfinite().all() for value in weights.values())
