"""The collectives of a device's own fabric, on a fabric made of gloo and events that end late.

NCCL needs a GPU a rank. What is ours is tested here: headers ahead of every collective, checked behind it, in order, with
a deadline, at the latest by `verify`.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from zero_plugin.errors import CollectiveMismatchError, CollectiveTimeoutError
from zero_plugin.sharding.header import HEADER_BYTES, Call
from zero_plugin.sharding.nccl import RING, NcclCollectives

pytestmark = pytest.mark.dist
CPU = torch.device("cpu")


class LateEvent:
    """Says yes from the `patience`-th question on."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        assert self.recorded
        self.patience -= 1
        return self.patience < 0


class GlooFabric:
    """Collectives on the default group; counts them."""

    def __init__(self, patience: int = 0) -> None:
        self.patience = patience
        self.calls: list[tuple[str, int]] = []

    def gather(self, output: torch.Tensor, shard: torch.Tensor) -> None:
        self.calls.append(("gather", shard.numel()))
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard.clone())
        output.copy_(torch.stack(parts).view_as(output))

    def mean(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        self.calls.append(("mean", output.numel()))
        total = rows.clone()
        dist.all_reduce(total)
        output.copy_(total.view(rows.shape)[dist.get_rank()] / dist.get_world_size())

    def event(self) -> LateEvent:
        return LateEvent(self.patience)


def create(rank: int, size: int, fabric: GlooFabric, timeout: float = 10.0) -> NcclCollectives:
    return NcclCollectives(fabric=fabric, rank=rank, size=size, device=CPU, timeout_seconds=timeout)


def call(tag: int, label: str = "") -> Call:
    return Call(kind="all_gather", tag=tag, numel=8, dtypes="float32", label=label)


def values(rank: int, size: int) -> None:
    fabric = GlooFabric(patience=3)
    data = create(rank, size, fabric)
    rows = torch.arange(size * 8.0).view(size, 8) + rank
    mean = torch.arange(size * 8.0).view(size, 8) + (size - 1) / 2
    output = torch.empty(8)
    data.reduce_scatter(output, rows, call(1))
    assert torch.equal(output, mean[rank])
    assert fabric.calls == [("gather", HEADER_BYTES), ("mean", 8)]
    low = torch.empty(8, dtype=torch.bfloat16)
    data.reduce_scatter(low, rows, call(2))
    assert torch.equal(low, mean[rank].bfloat16())
    assert data.workspace_bytes == 8 * 4
    gathered = torch.empty(size, 8)
    data.all_gather(gathered, output, call(3))
    assert torch.equal(gathered, mean)
    reduced = torch.empty(size, 8)
    data.all_reduce(reduced, rows, call(4))
    assert torch.equal(reduced, mean)
    for tag in range(3 * RING):
        data.all_gather(gathered, output, call(tag))
    data.verify()
    assert not data._expected
    data.close()
    assert data.workspace_bytes == 0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_values_and_a_header_ahead_of_each(size: int) -> None:
    run_ranks(size, values)


def disagree(rank: int, size: int) -> str:
    data = create(rank, size, GlooFabric(patience=5))
    output, shard = torch.empty(size, 8), torch.zeros(8)
    data.all_gather(output, shard, call(1, "h.1"))
    # Nothing waits for the device, so the collective itself returns.
    data.all_gather(output, shard, call(2 + (rank == 1), "h.3" if rank == 1 else "h.2"))
    with pytest.raises(CollectiveMismatchError) as error:
        data.verify()
    return str(error.value)


def test_a_mismatch_shows_at_the_latest_when_verified() -> None:
    for text in run_ranks(3, disagree):
        assert text.count("#2 all_gather 'h.2'") == 2
        assert "rank 1: #2 all_gather 'h.3'" in text


def arrives(rank: int, size: int) -> None:
    """A header that has arrived is looked at by the next collective."""
    data = create(rank, size, GlooFabric())
    output, shard = torch.empty(size, 8), torch.zeros(8)
    data.all_gather(output, shard, call(rank))
    with pytest.raises(CollectiveMismatchError):
        data.all_gather(output, shard, call(9))


def test_a_mismatch_that_has_arrived_stops_the_next_collective() -> None:
    run_ranks(2, arrives)


def stuck(rank: int, size: int) -> None:
    data = create(rank, size, GlooFabric(patience=1 << 30), timeout=0.3)
    output, shard = torch.empty(size, 8), torch.zeros(8)
    data.all_gather(output, shard, call(1, "h.1"))
    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=r"#1 all_gather 'h.1'.*timeout_seconds"):
        data.verify()
    assert time.monotonic() - start < 5.0


def test_headers_that_never_arrive_end_at_the_deadline() -> None:
    run_ranks(2, stuck)
