"""Where a rank's update runs and its slabs lie: on described machines, and bound for real on this one."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_plugin.config import ZeroConfig
from zero_plugin.engine import ZeroEngine
from zero_plugin.runtime import memory
from zero_plugin.runtime.memory import allocate_host, map_pages, prefer_node
from zero_plugin.runtime.topology import (
    HostPlace,
    Neighbour,
    allowed_cpus,
    bound,
    choose_place,
    parse_cpus,
    read_cores,
    read_nodes,
)

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processors are bound on Linux only")


def describe(folder: Path, *, nodes: int, cores: int, siblings: int) -> set[int]:
    """A machine as Linux writes it: siblings are numbered after all first processors, as on most PCs."""
    first = nodes * cores
    for core in range(first):
        group = [core + first * way for way in range(siblings)]
        for cpu in group:
            path = folder / "cpu" / f"cpu{cpu}" / "topology"
            path.mkdir(parents=True)
            (path / "thread_siblings_list").write_text(",".join(map(str, group)) + "\n")
    for node in range(nodes):
        path = folder / "node" / f"node{node}"
        path.mkdir(parents=True)
        starts = [node * cores + first * way for way in range(siblings)]
        text = ",".join(f"{start}-{start + cores - 1}" for start in starts)
        (path / "cpulist").write_text(text + "\n")
    (folder / "node" / "possible").write_text("0\n")
    return set(range(first * siblings))


def places(folder: Path, allowed: set[int], ranks: list[Neighbour]) -> list[HostPlace]:
    cores, nodes = read_cores(allowed, folder), read_nodes(allowed, folder)
    return [choose_place(rank, ranks, cores, nodes, allowed) for rank in range(len(ranks))]


def test_lists_of_processors() -> None:
    assert parse_cpus("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_cpus("\n") == []


def test_two_nodes_with_two_threads_a_core(tmp_path: Path) -> None:
    allowed = describe(tmp_path, nodes=2, cores=4, siblings=2)
    assert read_cores(allowed, tmp_path) == list(range(8))
    assert read_nodes(allowed, tmp_path) == {
        0: frozenset({0, 1, 2, 3, 8, 9, 10, 11}),
        1: frozenset({4, 5, 6, 7, 12, 13, 14, 15}),
    }
    here = Neighbour(host=1, allowed=1)
    left, right = (0, 1, 2, 3), (4, 5, 6, 7)
    assert places(tmp_path, allowed, [here]) == [HostPlace(threads=4, cpus=left, node=0)]
    assert places(tmp_path, allowed, [here] * 4) == [
        HostPlace(threads=2, cpus=cpus, node=node)
        for node, cpus in ((0, left), (0, left), (1, right), (1, right))
    ]
    three = places(tmp_path, allowed, [here] * 3)
    assert [(place.node, place.threads) for place in three] == [(0, 2), (0, 2), (1, 4)]


def test_an_accelerators_node_comes_before_an_equal_share(tmp_path: Path) -> None:
    allowed = describe(tmp_path, nodes=2, cores=4, siblings=1)
    ranks = [Neighbour(host=1, allowed=1, node=node) for node in (1, 1, 0)]
    found = places(tmp_path, allowed, ranks)
    assert [(place.node, place.threads) for place in found] == [(1, 2), (1, 2), (0, 4)]


def test_ranks_elsewhere_take_nothing_away(tmp_path: Path) -> None:
    """Of another host, or bound to other processors by the launcher."""
    allowed = describe(tmp_path, nodes=1, cores=8, siblings=2)
    here, bound_apart = Neighbour(host=1, allowed=1), Neighbour(host=1, allowed=2)
    there = Neighbour(host=2, allowed=1)
    found = places(tmp_path, allowed, [here, here, bound_apart, there])
    # One of each core's two threads; one node is no choice.
    assert found[0] == HostPlace(threads=4, cpus=tuple(range(8)), node=None)
    assert found[2].threads == 8


def test_a_plain_machine_leaves_nothing_to_bind(tmp_path: Path) -> None:
    allowed = describe(tmp_path, nodes=1, cores=4, siblings=1)
    here = Neighbour(host=1, allowed=1)
    assert places(tmp_path, allowed, [here]) == [HostPlace(threads=4)]
    assert places(tmp_path, allowed, [here] * 9) == [HostPlace(threads=1)] * 9
    # Nor does one that says nothing of itself, or a process confined to one node.
    nothing = places(tmp_path / "none", allowed, [here])
    assert nothing == [HostPlace(threads=4)]


def test_a_process_confined_to_one_of_two_nodes(tmp_path: Path) -> None:
    describe(tmp_path, nodes=2, cores=4, siblings=1)
    found = places(tmp_path, {4, 5, 6}, [Neighbour(host=1, allowed=1)])
    assert found == [HostPlace(threads=3)]


@LINUX
def test_threads_started_inside_are_bound_and_the_caller_is_not() -> None:
    before = os.sched_getaffinity(0)
    one = {min(before)}
    with bound(one):
        assert os.sched_getaffinity(0) == one
    assert os.sched_getaffinity(0) == before
    with bound({10**4}):
        assert os.sched_getaffinity(0) == before


@LINUX
def test_an_engines_lanes_and_kernels_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    import zero_plugin.resources as module

    one = {min(allowed_cpus())}
    place = HostPlace(threads=2, cpus=tuple(one))
    monkeypatch.setattr(module, "_find_place", lambda *_: place)
    known = {path.name for path in Path("/proc/self/task").iterdir()}
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with ZeroEngine(model, optimizer, ZeroConfig()) as engine:
        engine.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        engine.wait_for_update()
        masks = {
            task: os.sched_getaffinity(int(task))
            for task in {path.name for path in Path("/proc/self/task").iterdir()} - known
        }
        assert len(masks) >= 3
        # torch's own pool may have grown beside ours; it is not ours to bind.
        ours = [task for task, mask in masks.items() if mask == one]
        named = [task for task in masks if name_of(task).startswith("zero-lane")]
        assert set(named) <= set(ours)
        assert len(ours) > len(named) or engine._resources.kernels.threads == 1
    assert os.sched_getaffinity(0) != one or len(allowed_cpus()) == 1


def name_of(task: str) -> str:
    import threading

    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    return names.get(int(task), "")


def test_more_threads_than_cores_are_not_squeezed_onto_them() -> None:
    model = torch.nn.Linear(4, 4)
    with ZeroEngine(model, torch.optim.AdamW(model.parameters()), ZeroConfig(threads=64)) as engine:
        assert engine._resources.kernels.threads == 64
        assert engine._resources.backend._services.cpus == ()


@LINUX
def test_slabs_ask_for_their_node_before_they_are_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def prefer(address: int, nbytes: int, node: int) -> bool:
        asked.append((address, nbytes, node))
        return prefer_node(address, nbytes, node)

    monkeypatch.setattr(memory, "prefer_node", prefer)
    allocate_host(1 << 20)
    assert asked == []
    kept = allocate_host(1 << 20, node=0)
    assert asked == [(kept.data_ptr(), 1 << 20, 0)]
    assert not kept.any()


class Calls:
    """A C library that refuses the call, or takes it down."""

    def __init__(self, result: int) -> None:
        self.result = result
        self.seen: list[Any] = []

    def syscall(self, *values: Any) -> int:
        self.seen.append(values)
        return self.result


@pytest.mark.parametrize("node", [0, 3, 64, 70])
def test_the_system_call_names_one_node(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(0)
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda *_, **__: calls)
    monkeypatch.setattr(memory.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(memory.sys, "platform", "linux")
    assert prefer_node(4096, 8192, node)
    ((number, address, nbytes, policy, mask, bits, flags),) = calls.seen
    assert (number.value, address.value, nbytes.value) == (237, 4096, 8192)
    assert (policy.value, flags.value) == (1, 0)
    words = list(mask)
    assert sum(word << 64 * place for place, word in enumerate(words)) == 1 << node
    assert bits.value == 64 * len(words) + 1


def test_a_system_that_refuses_gives_the_memory_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory.platform, "machine", lambda: "riscv64")
    assert not prefer_node(4096, 8192, 0)
    pages = map_pages(1 << 16, node=999)
    assert ctypes.sizeof(pages) == 1 << 16
