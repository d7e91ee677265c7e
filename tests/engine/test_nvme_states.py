"""Optimizer states on NVMe: the same bits as in memory, exact bytes, in order, and within their slabs."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.models import BranchMLP, OddMLP, gpt_batch, make, make_gpt, mlp_loss
from support.training import (
    Recipe,
    adamw,
    assert_same_bits,
    assert_same_outcome,
    config,
    engine_for,
    ranks,
    snapshot,
    train,
)
from torch import Tensor, nn

from zero_plugin import Lion, _native
from zero_plugin.engine import ZeroEngine
from zero_plugin.optim.swap import SwappedStates, TileUpdate
from zero_plugin.store.layout import round_up
from zero_plugin.store.store import NvmeStore
from zero_plugin.trace import Event

PAGE = 4096
TILE = PAGE // 4
"""Elements of the smallest tile."""

THREE = 4 * 3 * PAGE
"""The smallest `nvme_buffer_bytes` for a master and two states."""

MEBIBYTE = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that stands for a disk and is empty again at the end."""
    folder = tmp_path / "disk"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []


def on_nvme(disk: Path, **settings: Any) -> dict[str, Any]:
    """Settings: one block of many tiles, the smallest there are."""
    return {
        "optimizer": "nvme",
        "nvme_path": disk,
        "nvme_buffer_bytes": THREE,
        "bucket_bytes": "1MiB",
        **settings,
    }


def slab_bytes(tiles: int, states: int = 3) -> int:
    """A cache that holds this many of the smallest tiles."""
    return tiles * states * PAGE


def uring_refusal() -> str:
    engine = _native.IoEngine("auto", 1, 4096)
    reason = "" if engine.name == "uring" else engine.reason
    engine.close()
    return reason


# The same bits -------------------------------------------------------------------------------------------------------

VARIATIONS = [
    {
        "stage": stage,
        "backend": backend,
        "nvme_cache_bytes": (0, slab_bytes(3), "4MiB")[(stage + place) % 3],
        "nvme_checksum": (stage + place) % 2 == 0,
        "bucket_bytes": ("1MiB", 4096, 65536)[(2 * stage + place) % 3],
        "nvme_buffer_bytes": (THREE, 2 * THREE + 5000, "1MiB")[(stage + 2 * place) % 3],
        "threads": 1 + place,
        "backend_seed": 10 * stage + place,
        "gradients": ("host", "device")[(stage + place) % 2],
    }
    for stage, (place, backend) in itertools.product(
        (0, 1, 2, 3), enumerate(("inline", "threads", "chaos"))
    )
]


@pytest.mark.parametrize("io", ["threads", "uring"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_setting_gives_the_bits_of_states_in_memory(disk: Path, dtype: str, io: str) -> None:
    refusal = uring_refusal()
    if io == "uring" and refusal:
        pytest.skip(refusal)
    recipe = Recipe(
        steps=6,
        clip=0.5,
        accumulate=2,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype],
        width=24,
        layers=1,
    )
    expected = train(recipe, backend="inline")
    assert expected.skipped == 0
    for settings in VARIATIONS:
        outcome = train(recipe, **on_nvme(disk, nvme_engine=io, **settings))
        assert_same_outcome(outcome, expected, f"{settings}")


def test_the_variations_meet_every_value() -> None:
    for name, count in (("nvme_cache_bytes", 3), ("bucket_bytes", 3), ("nvme_buffer_bytes", 3)):
        assert len({item[name] for item in VARIATIONS}) == count
    for stage in range(4):
        assert len({i["nvme_cache_bytes"] for i in VARIATIONS if i["stage"] == stage}) == 3
    assert {i["nvme_checksum"] for i in VARIATIONS if i["backend"] == "chaos"} == {True, False}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, weight_decay=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=3e-3, initial_accumulator_value=0.3)


def lion(parameters: Any) -> torch.optim.Optimizer:
    return Lion(parameters, lr=1e-3, weight_decay=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=3e-3, weight_decay=0.1)


STATES = {sgd: 1, momentum: 2, adagrad: 2, lion: 2, adam: 3}


@pytest.mark.parametrize("build", STATES, ids=lambda build: build.__name__)
def test_optimizers_of_one_two_and_three_states(disk: Path, build: Any) -> None:
    recipe = Recipe(steps=5, width=24, layers=1, optimizer=build, dtype=torch.bfloat16, clip=1.0)
    expected = train(recipe, backend="inline")
    count = STATES[build]
    for stage, cache in ((2, 0), (3, slab_bytes(3, count)), (1, "1MiB")):
        settings = on_nvme(
            disk,
            stage=stage,
            nvme_cache_bytes=cache,
            backend="chaos",
            nvme_buffer_bytes=4 * count * PAGE,
        )
        assert_same_outcome(train(recipe, **settings), expected, f"{stage}, {cache}")


def several(model: Any) -> list[torch.optim.Optimizer]:
    """Optimizers of three, two and one state, the first with two groups."""
    block = model.blocks[0]
    groups = [
        {"params": list(block.attention.parameters()), "lr": 1e-2, "weight_decay": 0.2},
        {"params": list(block.up.parameters())},
    ]
    rest = [model.places.weight, *model.norm.parameters(), *block.norm_1.parameters()]
    rest += block.norm_2.parameters()
    return [
        adamw(groups),
        Lion([model.tokens.weight, *block.down.parameters()], lr=1e-3),
        torch.optim.SGD(rest, lr=0.05),
    ]


def train_several(**settings: Any) -> dict[str, Any]:
    """Every optimizer steps at its own pace."""
    model = make_gpt(torch.bfloat16, width=36, layers=1)
    optimizers = several(model)
    engine = ZeroEngine(model, optimizers, config(**settings))
    moved = []
    try:
        for step in range(8):
            before = engine.ledger()
            engine.backward(model(gpt_batch(step)))
            for number, optimizer in enumerate(optimizers):
                if step % (number + 1) == 0 or step > 5:
                    optimizer.step()
            engine.zero_grad()
            engine.drain()
            after = engine.ledger()
            moved.append(after["nvme_read"] - before["nvme_read"])
        with engine.full_params():
            found = {"weights": snapshot(model)}
        states = [optimizer.state_dict() for optimizer in optimizers]
        return {**found, "states": states, "moved": moved}
    finally:
        engine.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_several_optimizers_and_groups(disk: Path, stage: int) -> None:
    expected = train_several(backend="inline")
    expected.pop("moved")
    reads = []
    for cache in (0, slab_bytes(5), "4MiB"):
        found = train_several(**on_nvme(disk, stage=stage, nvme_cache_bytes=cache, backend="chaos"))
        moved = found.pop("moved")
        assert_same_bits(found, expected, f"cache {cache}")
        reads.append(moved)
    # Each has its share of the cache, so that none evicts what another one keeps.
    all_step = reads[0][-1] // (3 * PAGE)
    assert all_step > 8
    assert reads[1][-1] <= reads[0][-1] - 5 * PAGE
    assert reads[2][1:] == [0] * 7


def branch_run(**settings: Any) -> dict[str, Any]:
    """Experts of several tiles, of which most steps use some; a step with none, and one that overflows."""
    torch.manual_seed(0)
    model = WideBranches()
    with engine_for(model, **settings) as (engine, optimizer):
        warned = pytest.warns(RuntimeWarning, match="step skipped")
        chosen = [(0,), (0, 1, 2), (1,), (), (2, 0), (1,), (0, 1, 2), (2,), (2, 0), (1, 0)]
        for step, numbers in enumerate(chosen):
            loss = model.loss(step, *numbers)
            if step == 5:
                loss = loss * float("inf")
            engine.backward(loss)
            if numbers and step != 5:
                engine.clip_grad_norm_(1.0)
            with warned if step == 5 else contextlib.nullcontext():
                optimizer.step()
            optimizer.zero_grad()
        with engine.full_params():
            return {
                "weights": snapshot(model),
                "state": optimizer.state_dict(),
                "skipped": engine.skipped_steps,
            }


class WideBranches(nn.Module):
    """Three experts of 2,000 elements and more, each of its own use."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(41, 50 + number) for number in range(3))
        self.scale = nn.Parameter(torch.ones(3))

    def loss(self, step: int, *numbers: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(5, 41, generator=generator)
        total = self.scale.square().sum()
        for number in numbers:
            total = total + self(inputs, number)
        return total

    def forward(self, inputs: Tensor, number: int) -> Tensor:
        return (self.experts[number](inputs) - 1).square().mean() * self.scale[number]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tiles_without_a_gradient_are_left_out_cached_or_not(disk: Path, stage: int) -> None:
    expected = branch_run(backend="inline", bucket_bytes="1MiB")
    assert expected["skipped"] == 1
    for tiles, backend in itertools.product((0, 1, 2, 4, 50), ("threads", "chaos")):
        settings = on_nvme(disk, stage=stage, backend=backend, nvme_cache_bytes=slab_bytes(tiles))
        assert_same_bits(branch_run(**settings), expected, f"{tiles} cached, {backend}")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_of_odd_parameters(disk: Path, stage: int) -> None:
    def run(**settings: Any) -> dict[str, Any]:
        model = make(OddMLP)
        with engine_for(model, **settings) as (engine, optimizer):
            for step in range(4):
                engine.backward(mlp_loss(model, step))
                optimizer.step()
                optimizer.zero_grad()
            with engine.full_params():
                return {"weights": snapshot(model), "state": optimizer.state_dict()}

    expected = run()
    for bucket in (64, "1MiB"):
        assert_same_bits(run(**on_nvme(disk, stage=stage, bucket_bytes=bucket)), expected)


def rank_run(rank: int, size: int, recipe: Recipe, settings: dict[str, Any]) -> Any:
    return train(recipe, rank=rank, **settings)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_several_ranks(disk: Path, size: int, stage: int) -> None:
    for dtype, cache, backend in (
        (torch.float32, 0, "chaos"),
        (torch.bfloat16, slab_bytes(1), "threads"),
    ):
        recipe = Recipe(steps=4, width=24, layers=1, dtype=dtype, clip=0.5)
        expected = ranks(size, rank_run, recipe, {"stage": stage})
        settings = on_nvme(disk, stage=stage, nvme_cache_bytes=cache, backend=backend)
        found = ranks(size, rank_run, recipe, settings)
        for one, other in zip(found, expected, strict=True):
            assert_same_outcome(one, other, f"{dtype}, cache {cache}, {backend}")


# Bytes ---------------------------------------------------------------------------------------------------------------


def file_elements(chunk: int, most: int) -> tuple[int, int]:
    """Tiles of a chunk, and its elements once each tile is rounded up to pages."""
    number = -(-chunk // most)
    size = round_up(-(-chunk // number), TILE)
    pieces = [min(size, chunk - start) for start in range(0, chunk, size)]
    return len(pieces), sum(round_up(piece, TILE) for piece in pieces)


def steady_bytes(disk: Path, cache: int, **settings: Any) -> dict[str, Any]:
    """What a step moves from the third on, and the blocks' chunks."""
    model = make_gpt(torch.bfloat16, width=44, layers=1)
    with engine_for(
        model, **on_nvme(disk, nvme_cache_bytes=cache, bucket_bytes=32768, **settings)
    ) as (engine, optimizer):
        moved = []
        for step in range(6):
            before = engine.ledger()
            engine.backward(model(gpt_batch(step)))
            optimizer.step()
            optimizer.zero_grad()
            engine.drain()
            after = engine.ledger()
            moved.append(
                (
                    after["nvme_read"] - before["nvme_read"],
                    after["nvme_write"] - before["nvme_write"],
                )
            )
        chunks = [block.chunk for block in engine._roster.blocks]
        return {"moved": moved, "chunks": chunks, "memory": engine.memory()}


@pytest.mark.parametrize("buffer", [THREE, 3 * THREE])
def test_a_step_moves_12_bytes_a_parameter_each_way(disk: Path, buffer: int) -> None:
    found = steady_bytes(disk, 0, nvme_buffer_bytes=buffer)
    tiles, padded = zip(
        *(file_elements(chunk, buffer // THREE * TILE) for chunk in found["chunks"]), strict=True
    )
    assert len(found["chunks"]) > 2
    assert sum(tiles) > len(found["chunks"])
    # 4 bytes each of master, first and second moment, of every page-padded tile, and nothing else.
    assert found["moved"] == [(12 * sum(padded), 12 * sum(padded))] * 6
    nvme = found["memory"]["nvme"]
    assert nvme["master"] == 4 * sum(padded)
    assert nvme["moments"] == 8 * sum(padded)
    assert sum(nvme.values()) == 12 * sum(padded)
    host = found["memory"]["host"]
    assert host["master"] == host["moments"] == 0


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_is_cached_is_neither_read_nor_written(disk: Path, stage: int) -> None:
    plain = steady_bytes(disk, 0, stage=stage)
    chunks = plain["chunks"]
    count = sum(file_elements(chunk, TILE)[0] for chunk in chunks)
    assert plain["moved"][-1] == (count * 3 * PAGE, count * 3 * PAGE)
    for cached in (1, 2, 7, count - 1, count, count + 5):
        found = steady_bytes(disk, slab_bytes(cached), stage=stage)
        left = max(0, count - cached)
        assert found["moved"][2:] == [(left * 3 * PAGE, left * 3 * PAGE)] * 4, cached
        # The first step writes what it does not keep, too.
        assert found["moved"][0] == (count * 3 * PAGE, left * 3 * PAGE)


def test_memory_of_the_slabs_is_what_was_asked_for(disk: Path) -> None:
    for cached in (0, 4):
        found = steady_bytes(disk, slab_bytes(cached))
        without = steady_bytes(disk, 0)
        more = found["memory"]["host"]["staging"] - without["memory"]["host"]["staging"]
        assert more == slab_bytes(cached)
    large = steady_bytes(disk, 0, nvme_buffer_bytes="1MiB")["memory"]["host"]["staging"]
    # No larger than the largest block, however much was allowed.
    largest = max(file_elements(chunk, 10**9)[1] for chunk in found["chunks"])
    assert large - without["memory"]["host"]["staging"] == 4 * 12 * largest - THREE


# Order ---------------------------------------------------------------------------------------------------------------


def traced(disk: Path, tmp_path: Path, **settings: Any) -> list[Event]:
    """Events of five steps of one block of many tiles."""
    model = make_gpt(torch.bfloat16, width=44, layers=1)
    settings = on_nvme(disk, trace=tmp_path / "trace.json", **settings)
    with engine_for(model, **settings) as (engine, optimizer):
        for step in range(5):
            engine.backward(model(gpt_batch(step)))
            optimizer.step()
            optimizer.zero_grad()
        engine.drain()
        trace = engine._resources.trace
        assert trace is not None
        return trace.events()


@pytest.mark.parametrize("cache", [0, slab_bytes(3)])
@pytest.mark.parametrize("backend", ["threads", "chaos"])
def test_no_read_starts_before_the_tiles_last_write_has_ended(
    disk: Path, tmp_path: Path, backend: str, cache: int
) -> None:
    events = traced(disk, tmp_path, backend=backend, nvme_cache_bytes=cache)
    ended = {event.sequence: place for place, event in enumerate(events) if event.phase == "end"}
    writes: dict[str, list[int]] = {}
    for event in events:
        if event.lane == "write states" and event.phase == "issued":
            writes.setdefault(event.label.removeprefix("write "), []).append(event.sequence)
    checked = 0
    for place, event in enumerate(events):
        if event.lane == "read states" and event.phase == "begin":
            tile = event.label.removeprefix("read ")
            before = [number for number in writes[tile] if number < event.sequence]
            assert ended[before[-1]] < place, event
            checked += 1
    assert checked > 50


def slow_disk(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Writes that arrive late."""
    original = NvmeStore.write

    def write(self: NvmeStore, extent: Any, offset: int, source: Tensor) -> None:
        time.sleep(seconds)
        original(self, extent, offset, source)

    monkeypatch.setattr(NvmeStore, "write", write)


class Unordered(dict[Any, Any]):
    """Forgets which write a read has to come after."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default


def test_the_wait_for_the_last_write_is_what_keeps_the_bits_right(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(steps=3, width=24, layers=1, dtype=torch.bfloat16)
    expected = train(recipe, backend="inline")
    slow_disk(monkeypatch, 0.02)
    settings = on_nvme(disk, backend="threads")
    assert_same_outcome(train(recipe, **settings), expected)
    original = SwappedStates.begin_step

    def begin_step(self: SwappedStates, tiles: Any) -> None:
        self._written = Unordered()
        original(self, tiles)

    monkeypatch.setattr(SwappedStates, "begin_step", begin_step)
    with pytest.raises(AssertionError, match="differs"):
        assert_same_outcome(train(recipe, **settings), expected)


def test_a_slab_is_not_reused_before_its_write_has_ended(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(steps=3, width=24, layers=1, dtype=torch.bfloat16)
    expected = train(recipe, backend="inline")
    slow_disk(monkeypatch, 0.01)
    settings = on_nvme(disk, backend="threads")
    original = SwappedStates._write

    def write(self: SwappedStates, *arguments: Any) -> Any:
        original(self, *arguments)
        return self._backend.mark("too early")

    monkeypatch.setattr(SwappedStates, "_write", write)
    with pytest.raises(AssertionError, match="differs"):
        assert_same_outcome(train(recipe, **settings), expected)


@pytest.mark.serial
def test_reads_updates_and_writes_run_side_by_side(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO-Infinity, section 5.2.2: read(i+1) | update(i) | write(i-1), in the time of the slowest."""
    seconds = 0.02
    for owner, name in ((NvmeStore, "read"), (NvmeStore, "write"), (TileUpdate, "apply")):
        original = getattr(owner, name)

        def slow(self: Any, *arguments: Any, original: Any = original) -> None:
            until = time.perf_counter() + seconds
            original(self, *arguments)
            time.sleep(max(0.0, until - time.perf_counter()))

        monkeypatch.setattr(owner, name, slow)
    model = make_gpt(torch.bfloat16, width=44, layers=2)
    settings = on_nvme(disk, trace=tmp_path / "trace.json", backend="threads")
    ratios = []
    with engine_for(model, **settings) as (engine, optimizer):
        trace = engine._resources.trace
        assert trace is not None
        for step in range(4):
            engine.backward(model(gpt_batch(step)))
            engine.drain()
            trace.clear()
            begin = time.perf_counter()
            optimizer.step()
            engine.drain()
            elapsed = time.perf_counter() - begin
            optimizer.zero_grad()
            spans = {
                lane: [e for e in trace.events() if e.lane == lane and e.phase == "end"]
                for lane in ("read states", "update", "write states")
            }
            count = len(spans["update"])
            assert count >= 40
            ratios.append(elapsed / (count * seconds))
            begins = [
                e.time for e in trace.events() if e.lane == "read states" and e.phase == "begin"
            ]
            ahead = [
                begin < update.time
                for begin, update in zip(begins[1:], spans["update"], strict=False)
            ]
            # A stalled thread may cost some, on a busy machine.
            assert sum(ahead) >= 0.8 * len(ahead), (
                "tiles are read while the ones before are updated"
            )
    # Two tiles more than there are, for filling and emptying the pipeline: I6.
    assert min(ratios) <= 1.15, ratios


# Memory --------------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Twelve million parameters, of which a step touches all and which need no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(1_500_000)) for _ in range(8))

    def loss(self) -> Tensor:
        return torch.stack([weight[:1000].float().square().mean() for weight in self.weights]).sum()


def resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def twelve_million(rank: int, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: resident bytes before and after the engine, and after each step."""
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: large blocks go back at once
    model = Wide().bfloat16()
    warm = torch.optim.AdamW([nn.Parameter(torch.ones(4))])
    warm.param_groups[0]["params"][0].sum().backward()
    warm.step()
    before = resident()
    engine = ZeroEngine(model, adamw(model.parameters()), config(**settings))
    started = resident()
    peaks: list[int] = []
    for _ in range(5):
        engine.backward(model.loss())
        engine.step()
        engine.zero_grad()
        peaks.append(resident())
    memory = engine.memory()
    engine.close()
    del engine
    return {
        "taken": started - before,
        "peaks": peaks,
        "left": resident() - before,
        "memory": memory,
    }


@pytest.mark.dist
@pytest.mark.serial
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_real_memory_is_slabs_and_not_states(disk: Path) -> None:
    settings = on_nvme(disk, nvme_buffer_bytes="8MiB", nvme_cache_bytes="8MiB", bucket_bytes="8MiB")
    (found,) = ranks(1, twelve_million, settings, store="none", deadline=100.0)
    memory = found["memory"]
    host, device = memory["host"], memory["device"]
    assert memory["nvme"]["master"] + memory["nvme"]["moments"] >= 12 * 12_000_000
    assert host["master"] == host["moments"] == 0
    declared = sum(host.values()) + sum(device.values()) - device["params"]
    assert declared < 90 * MEBIBYTE, "the states alone are 137 MiB"
    assert declared - 2 * MEBIBYTE <= found["taken"] <= declared + 24 * MEBIBYTE, found
    assert max(found["peaks"][2:]) - found["peaks"][1] <= 3 * MEBIBYTE, found
    assert found["left"] <= 40 * MEBIBYTE + 24_000_000, found


def big_storages() -> dict[int, int]:
    """Address and size of every tensor storage of 4 KiB and more that Python can see."""
    gc.collect()
    return {
        item.untyped_storage().data_ptr(): item.untyped_storage().nbytes()
        for item in gc.get_objects()
        if type(item) is Tensor
        and item.device.type == "cpu"
        and item.layout == torch.strided
        and item.untyped_storage().nbytes() >= PAGE
    }


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("cache", [0, slab_bytes(3)])
def test_nothing_is_allocated_after_the_second_step(
    disk: Path, cache: int, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zero_plugin.runtime import threads
    from zero_plugin.store import store

    original, allocated = threads.allocate_host, []

    def counting(nbytes: int, node: int | None = None) -> Tensor:
        allocated.append(nbytes)
        return original(nbytes, node)

    model = make_gpt(torch.bfloat16)
    for module in (threads, store):
        monkeypatch.setattr(module, "allocate_host", counting)
    with engine_for(
        model, **on_nvme(disk, stage=stage, nvme_cache_bytes=cache, backend="threads")
    ) as (engine, optimizer):

        def step(number: int) -> None:
            engine.backward(model(gpt_batch(number)))
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

        for number in range(2):
            step(number)
        assert allocated
        allocated.clear()
        before = big_storages()
        for number in range(2, 6):
            step(number)
        assert allocated == []
        assert big_storages().keys() <= before.keys()


# State dicts and weights that users write -----------------------------------------------------------------------------


def steps(engine: ZeroEngine, optimizer: Any, model: Any, numbers: range) -> None:
    for number in numbers:
        engine.backward(model(gpt_batch(number)))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("cache", [0, slab_bytes(4), "4MiB"])
def test_states_move_between_memory_and_nvme(disk: Path, stage: int, cache: Any) -> None:
    nvme = on_nvme(disk, stage=stage, nvme_cache_bytes=cache, backend="chaos")
    expected = train(Recipe(steps=6, width=24, layers=1, dtype=torch.bfloat16), backend="inline")
    kinds: list[dict[str, Any]] = [nvme, {"stage": stage}]
    for first, second in itertools.product(kinds, kinds):
        model = make_gpt(torch.bfloat16, width=24, layers=1)
        with engine_for(model, **first) as (engine, optimizer):
            steps(engine, optimizer, model, range(3))
            weights = engine.full_state_dict()
            state = copy.deepcopy(optimizer.state_dict())
            # Looking does not change what follows.
            steps(engine, optimizer, model, range(3, 6))
            assert_same_bits(optimizer.state_dict(), expected.state)
        model = make_gpt(torch.bfloat16, seed=5, width=24, layers=1)
        model.load_state_dict(weights)
        with engine_for(model, **second) as (engine, optimizer):
            optimizer.load_state_dict(state)
            assert_same_bits(optimizer.state_dict(), state)
            steps(engine, optimizer, model, range(3, 6))
            assert_same_bits(optimizer.state_dict(), expected.state)
            assert_same_bits(engine.full_state_dict(), expected.weights)
            # And back to the older state in a run that has gone on.
            with engine.full_params(writeback=True), torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(weights[name])
            optimizer.load_state_dict(state)
            steps(engine, optimizer, model, range(3, 6))
            assert_same_bits(optimizer.state_dict(), expected.state)


def test_state_of_an_optimizer_that_has_stepped_goes_to_the_disk(disk: Path) -> None:
    found = []
    for settings in ({}, on_nvme(disk)):
        model = make_gpt(width=24, layers=1)
        optimizer = adamw(model.parameters())
        for step in range(3):
            model(gpt_batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with engine_for(model, optimizer, **settings) as (engine, _):
            steps(engine, optimizer, model, range(3, 5))
            found.append({"weights": snapshot(model), "state": optimizer.state_dict()})
    assert_same_bits(*found)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("cache", [0, slab_bytes(3), "4MiB"])
def test_weights_written_between_steps_reach_the_masters(
    disk: Path, stage: int, cache: Any
) -> None:
    def run(**settings: Any) -> dict[str, Any]:
        model: Any = make_gpt(torch.bfloat16, width=24, layers=1)
        with engine_for(model, **settings) as (engine, optimizer):
            for step in range(5):
                steps(engine, optimizer, model, range(step, step + 1))
                if step in (1, 2):
                    with engine.full_params(writeback=True), torch.no_grad():
                        model.tokens.weight[5:].mul_(0.5)
                        model.blocks[0].up.bias.fill_(0.25)
            with engine.full_params():
                return {"weights": snapshot(model), "state": optimizer.state_dict()}

    expected = run(backend="inline")
    for backend in ("threads", "chaos"):
        settings = on_nvme(disk, stage=stage, nvme_cache_bytes=cache, backend=backend)
        assert_same_bits(run(**settings), expected)


def test_parameters_that_come_later(disk: Path) -> None:
    def run(**settings: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        model = BranchMLP()
        wide = nn.Linear(5, 500)
        model.wide = wide
        wide.requires_grad_(requires_grad=False)
        for parameter in model.experts[2].parameters():
            parameter.requires_grad = False
        with engine_for(model, **settings) as (engine, optimizer):
            for step in range(6):
                if step == 2:
                    for parameter in model.experts[2].parameters():
                        parameter.requires_grad = True
                if step == 4:  # larger than every block before
                    wide.requires_grad_(requires_grad=True)
                engine.backward(mlp_loss(model, step, 0, 2) + wide.weight.square().mean())
                optimizer.step()
                optimizer.zero_grad()
            return {"weights": snapshot(model), "state": optimizer.state_dict()}

    expected = run()
    for cache in (0, slab_bytes(1), "1MiB"):
        settings = on_nvme(disk, nvme_cache_bytes=cache, bucket_bytes=256)
        assert_same_bits(run(**settings), expected, f"{cache}")


# Lifetime ------------------------------------------------------------------------------------------------------------


def test_two_engines_share_a_path_and_nothing_else(disk: Path) -> None:
    recipe = Recipe(steps=4, width=24, layers=1, dtype=torch.bfloat16)
    expected = train(recipe, backend="inline")
    one, two = recipe.model(), recipe.model()
    with (
        engine_for(one, **on_nvme(disk)) as (first, left),
        engine_for(two, **on_nvme(disk)) as (second, right),
    ):
        assert len(list(disk.iterdir())) == 2
        for step in range(4):
            steps(first, left, one, range(step, step + 1))
            steps(second, right, two, range(step, step + 1))
        first.close()
        assert len(list(disk.iterdir())) == 1
        assert_same_bits(right.state_dict(), expected.state)
    assert_same_bits(snapshot(one), expected.weights)
    assert_same_bits(snapshot(two), expected.weights)


def test_an_engine_that_is_dropped_leaves_no_file_and_no_thread(disk: Path) -> None:
    before = threading.active_count()
    model = make_gpt(width=12, layers=1)
    optimizer = adamw(model.parameters())
    engine = ZeroEngine(model, optimizer, config(**on_nvme(disk, backend="threads")))
    steps(engine, optimizer, model, range(2))
    del engine, optimizer, model
    deadline = time.monotonic() + 5
    while (list(disk.iterdir()) or threading.active_count() > before) and (
        time.monotonic() < deadline
    ):
        gc.collect()
        time.sleep(0.02)
    assert list(disk.iterdir()) == []
    assert threading.active_count() == before


def test_training_goes_on_in_plain_torch_after_close(disk: Path) -> None:
    model = make_gpt(width=12, layers=1)
    with engine_for(model, **on_nvme(disk, stage=3)) as (engine, optimizer):
        steps(engine, optimizer, model, range(2))
        expected = engine.full_state_dict()
    assert_same_bits(snapshot(model), expected)
    model(gpt_batch(2)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
