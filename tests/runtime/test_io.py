"""Read and Write on every backend's lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from runtime.probes import Gate
from torch import Tensor

from zero_plugin.errors import LaneError, StoreError
from zero_plugin.runtime.backend import Backend
from zero_plugin.runtime.buffers import SlabPool
from zero_plugin.runtime.io import Read, Write
from zero_plugin.store.store import NvmeStore
from zero_plugin.trace import Ledger, Trace

PAGE = 4096


@pytest.fixture
def store(tmp_path: Path, ledger: Ledger) -> Iterator[NvmeStore]:
    made = NvmeStore([tmp_path], ledger=ledger)
    yield made
    made.close()


@dataclass
class BrokenStore:
    """Fails."""

    asked: list[str] = field(default_factory=list)

    def read(self, extent: object, offset: int, destination: Tensor) -> None:
        self.asked.append("read")
        raise StoreError("the disk is on fire")

    def write(self, extent: object, offset: int, source: Tensor) -> None:
        self.asked.append("write")
        raise StoreError("the disk is on fire")


def test_blocks_go_out_and_come_back(backend: Backend, store: NvmeStore, ledger: Ledger) -> None:
    """The shape of a step on NVMe: read(i+1), change(i), write(i-1), on two lanes and a pool."""
    blocks, numel = 6, 3 * PAGE // 4
    extent = store.reserve(blocks * 3 * PAGE, "states")
    reads, writes = backend.lane("nvme_read", "host"), backend.lane("nvme_write", "host")
    pool = SlabPool(
        name="blocks",
        backend=backend,
        slab_bytes=3 * PAGE,
        slabs=3,
        memory="host",
        setting="pinned_limit",
    )
    start = torch.arange(blocks * numel, dtype=torch.float32)
    store.write(extent, 0, start)

    def fetch(block: int):
        lease = pool.acquire(f"block {block}")
        tensor = lease.tensor(torch.float32, numel)
        return (
            lease,
            tensor,
            reads.submit(
                Read(
                    store=store,
                    extent=extent,
                    offset=block * 3 * PAGE,
                    destination=tensor,
                    label=f"read {block}",
                )
            ),
        )

    for _ in range(2):
        ahead = fetch(0)
        for block in range(blocks):
            lease, tensor, ticket = ahead
            if block + 1 < blocks:
                ahead = fetch(block + 1)
            ticket.wait()
            tensor.mul_(2)
            lease.release(
                writes.submit(
                    Write(
                        store=store,
                        extent=extent,
                        offset=block * 3 * PAGE,
                        source=tensor,
                        label=f"write {block}",
                    )
                )
            )
        backend.drain()
    back = torch.zeros_like(start)
    store.read(extent, 0, back)
    assert torch.equal(back, 4 * start)
    moved = blocks * 3 * PAGE
    found = ledger.snapshot()
    assert (found["nvme_write"], found["nvme_read"]) == (3 * moved, 3 * moved)


def test_a_read_follows_the_write_it_waits_for(backend: Backend, store: NvmeStore) -> None:
    extent = store.reserve(PAGE, "states")
    source, back = torch.full((PAGE,), 5, dtype=torch.uint8), torch.zeros(PAGE, dtype=torch.uint8)
    written = backend.lane("nvme_write", "host").submit(
        Write(store=store, extent=extent, offset=0, source=source)
    )
    backend.lane("nvme_read", "host").submit(
        Read(store=store, extent=extent, offset=0, destination=back), after=[written]
    ).wait()
    assert back.eq(5).all()


def test_chaos_poisons_what_a_read_will_fill(
    make_backend: Callable[..., Backend], store: NvmeStore
) -> None:
    backend = make_backend("chaos", seed=1)
    extent = store.reserve(PAGE, "states")
    back = torch.zeros(PAGE // 4)
    gate, lane = Gate(), backend.lane("nvme_read", "host")
    lane.submit(gate)
    ticket = lane.submit(Read(store=store, extent=extent, offset=0, destination=back))
    assert back.isnan().all()
    gate.opened.set()
    ticket.wait()
    assert back.eq(0).all()


def test_a_read_beside_a_write_is_not_held_up(deferred: Backend, store: NvmeStore) -> None:
    extent, gate = store.reserve(PAGE, "states"), Gate()
    held = deferred.lane("nvme_write", "host").submit(gate)
    back = torch.ones(PAGE // 4)
    deferred.lane("nvme_read", "host").submit(
        Read(store=store, extent=extent, offset=0, destination=back)
    ).wait()
    assert not held.done
    assert back.eq(0).all()
    gate.opened.set()
    held.wait()


@pytest.mark.parametrize("act", ["read", "write"])
def test_a_failing_disk_is_raised_where_it_is_awaited(backend: Backend, act: str) -> None:
    broken, tensor = BrokenStore(), torch.zeros(4)
    operation = (
        Read(
            store=broken, extent=None, offset=0, destination=tensor, label="read states of block 3"
        )
        if act == "read"
        else Write(
            store=broken, extent=None, offset=0, source=tensor, label="write states of block 3"
        )
    )
    ticket = backend.lane(f"nvme_{act}", "host").submit(operation)
    with pytest.raises(
        LaneError, match=f"'{act} states of block 3' .* StoreError: the disk is on fire"
    ) as caught:
        ticket.wait()
    assert isinstance(caught.value.__cause__, StoreError)
    assert broken.asked == [act]


def test_what_they_touch(store: NvmeStore) -> None:
    extent, tensor = store.reserve(PAGE, "states"), torch.zeros(PAGE // 4)
    read = Read(store=store, extent=extent, offset=0, destination=tensor)
    write = Write(store=store, extent=extent, offset=0, source=tensor)
    assert (len(read.reads), len(read.writes), len(read.overwrites), read.nbytes) == (0, 1, 1, PAGE)
    assert (len(write.reads), len(write.writes), len(write.overwrites), write.nbytes) == (
        1,
        0,
        0,
        PAGE,
    )
    # The store counts, so that what is moved outside of lanes is counted too.
    assert read.traffic is None
    assert write.traffic is None


def test_trace_shows_the_bytes(make_backend: Callable[..., Backend], store: NvmeStore) -> None:
    trace = Trace()
    backend = make_backend("threads", trace=trace)
    extent, tensor = store.reserve(PAGE, "states"), torch.zeros(PAGE // 4)
    backend.lane("nvme_write", "host").submit(
        Write(store=store, extent=extent, offset=0, source=tensor)
    ).wait()
    begin = next(event for event in trace.events() if event.phase == "begin")
    assert (begin.lane, begin.label, begin.nbytes) == ("nvme_write", "write", PAGE)
