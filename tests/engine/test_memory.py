"""The process's real memory against what `memory()` declares, and no allocation once training runs."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.models import BranchMLP, gpt_batch, make_gpt, mlp_loss
from support.training import adamw, config, engine_for, exact_sgd, ranks
from torch import Tensor, nn

from zero_plugin.engine import ZeroEngine

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
MEBIBYTE = 1 << 20


def resident() -> int:
    """Bytes of this process that lie in memory."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def map_every_large_block() -> None:
    """Make glibc give every block of 64 KiB and more back at once, so that the resident bytes are those in use."""
    threshold = -3  # M_MMAP_THRESHOLD of malloc.h; setting it stops glibc from raising it
    ctypes.CDLL(None).mallopt(threshold, 65536)


class Wide(nn.Module):
    """Thirty million parameters in twelve layers, of which a step touches all and which need no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(2_500_000)) for _ in range(12))

    def loss(self) -> Tensor:
        return torch.stack([weight[:1000].float().square().mean() for weight in self.weights]).sum()


def thirty_million(rank: int, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: resident bytes before and after the engine, and after steps 3 and 8."""
    map_every_large_block()
    model = Wide().bfloat16()
    psi = sum(p.numel() for p in model.parameters())
    warm = torch.optim.AdamW([nn.Parameter(torch.ones(4))])
    warm.param_groups[0]["params"][0].sum().backward()
    warm.step()
    before = resident()
    engine = ZeroEngine(model, adamw(model.parameters()), config(bucket_bytes="8MiB", **settings))
    started = resident()
    states = [states for item in engine._states for states in item.blocks.values()]
    watched = {
        f"{states.block.index}": [
            t.data_ptr() for t in (states.master, *states.states) if t is not None
        ]
        for states in states
    }
    chunks = {i: shard.low.data_ptr() for i, shard in engine._gradients._shards.items()}
    peaks: list[int] = []
    for _ in range(8):
        engine.backward(model.loss())
        engine.step()
        engine.zero_grad()
        peaks.append(resident())
    assert watched == {
        f"{states.block.index}": [
            t.data_ptr() for t in (states.master, *states.states) if t is not None
        ]
        for states in states
    }
    assert chunks == {i: shard.low.data_ptr() for i, shard in engine._gradients._shards.items()}
    memory = engine.memory()
    engine.close()
    del engine, states
    return {
        "psi": psi,
        "taken": started - before,
        "after": peaks,
        "left": resident() - before,
        "memory": memory,
    }


@pytest.mark.dist
@pytest.mark.serial
@pytest.mark.parametrize("settings", [{}, {"gradients": "device"}, {"backend": "inline"}], ids=str)
def test_real_memory_is_what_is_declared(settings: dict[str, Any]) -> None:
    (found,) = ranks(1, thirty_million, settings, store="none", deadline=90.0)
    host, device = found["memory"]["host"], found["memory"]["device"]
    psi = found["psi"]
    # 12 bytes a parameter for master and moments; every chunk is a multiple of 16 elements already.
    assert host["master"] + host["moments"] == 12 * psi
    assert host["gradients"] + device["gradients"] == 2 * psi
    declared = sum(host.values()) + sum(device.values()) - device["params"]
    # Every declared page is there at the start (nothing is left to be faulted in), and little else. The slack covers the
    # stacks of the lanes' threads and the allocator's arenas.
    assert declared - 2 * MEBIBYTE <= found["taken"] <= declared + 24 * MEBIBYTE, found
    # From the third step on nothing is added; a step's own gradients (2 bytes) have gone by then.
    assert max(found["after"][3:]) - found["after"][2] <= 3 * MEBIBYTE, found
    # And it is given back.
    assert found["left"] <= 40 * MEBIBYTE + 2 * psi, found


def big_storages() -> dict[int, int]:
    """Address and size of every tensor storage of 4 KiB and more that Python can see."""
    gc.collect()
    found: dict[int, int] = {}
    for item in gc.get_objects():
        if type(item) is Tensor and item.device.type == "cpu" and item.layout == torch.strided:
            storage = item.untyped_storage()
            if storage.nbytes() >= 4096:
                found[storage.data_ptr()] = storage.nbytes()
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"stage": 1, "optimizer": "device"}], ids=str)
def test_nothing_is_allocated_after_the_second_step(
    settings: dict[str, Any], accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zero_plugin.runtime import threads

    original, allocated = threads.allocate_host, []

    def counting(nbytes: int, node: int | None = None) -> Tensor:
        allocated.append(nbytes)
        return original(nbytes, node)

    monkeypatch.setattr(threads, "allocate_host", counting)
    model = make_gpt(torch.bfloat16)
    with engine_for(model, backend="threads", **settings) as (engine, optimizer):

        def step(number: int) -> None:
            for micro in range(accumulate):
                engine.backward(model(gpt_batch(accumulate * number + micro)))
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

        for number in range(2):
            step(number)
        assert allocated
        allocated.clear()
        before = big_storages()
        for number in range(2, 8):
            step(number)
        assert allocated == []
        assert big_storages().keys() <= before.keys()


def workspaces(rank: int, size: int) -> list[int]:
    """In a rank: everything memory() declares, after each step."""
    model = make_gpt(torch.bfloat16, width=16)
    found: list[int] = []
    with engine_for(model) as (engine, optimizer):
        for step in range(5):
            engine.backward(model(gpt_batch(step, rank=rank)))
            optimizer.step()
            optimizer.zero_grad()
            found.append(sum(sum(kinds.values()) for kinds in engine.memory().values()))
    return found


@pytest.mark.dist
def test_declared_memory_is_constant_from_the_second_step_on() -> None:
    for found in ranks(2, workspaces):
        assert len(set(found[1:])) == 1


def test_gradients_are_released_when_they_are_cleared() -> None:
    model = BranchMLP()
    with engine_for(model, exact_sgd(model.parameters()), stage=1) as (engine, optimizer):
        for _ in range(2):
            with engine.no_sync():
                engine.backward(mlp_loss(model, 0, 0, 1))
            assert engine._reducer.local._live > 0
            optimizer.zero_grad()
            assert engine._reducer.local._live == 0
            engine.backward(mlp_loss(model, 0, 0, 1))
            optimizer.step()
            optimizer.zero_grad()
            assert engine._reducer.local._live == 0
