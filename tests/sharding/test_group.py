"""ProcessGroup: values, bits, bytes and workspace at 1 to 4 ranks."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn

from zero_plugin.kernels import Kernels
from zero_plugin.sharding import peer
from zero_plugin.sharding.group import ProcessGroup
from zero_plugin.trace import Ledger

pytestmark = pytest.mark.dist
CPU = torch.device("cpu")
SIZES = [1, 2, 3, 4]
PIECE = 4096
# Around the borders of pieces of each item size, and several pieces long.
NUMELS = [0, 1, 7, 1023, 1024, 1025, 2047, 2049, 3 * 1024 + 5]


DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.uint8,
    torch.int64,
    torch.bool,
)


def create(ledger: Ledger | None = None, kernels: Kernels | None = None) -> ProcessGroup:
    return ProcessGroup.create(
        device=CPU, ledger=ledger or Ledger(), timeout_seconds=30.0, kernels=kernels
    )


def filled(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(numel) * (rank + 1) % 100).to(dtype)


def rows_of(rank: int, size: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randn(size, numel, generator=generator).mul_(3.0).to(dtype)


def mean_of(size: int, row: int, numel: int, wire: torch.dtype) -> torch.Tensor:
    """The rule itself: rank order, fp32, one true division."""
    total = rows_of(0, size, numel, wire)[row].float()
    for rank in range(1, size):
        total = total + rows_of(rank, size, numel, wire)[row].float()
    return total / torch.tensor(float(size))


def values(rank: int, size: int) -> None:
    peer.PIECE_BYTES = PIECE
    group = create()
    assert (group.rank, group.size) == (rank, size)
    for tag, numel in enumerate(NUMELS):
        for wire in (torch.float32, torch.bfloat16, torch.float16):
            rows = rows_of(rank, size, numel, wire)
            for result in (torch.float32, torch.bfloat16, torch.float16):
                output = torch.full((numel,), float("nan"), dtype=result)
                group.reduce_scatter(output, rows, tag=tag, label=f"bucket {tag}")
                expected = mean_of(size, rank, numel, wire).to(result)
                assert torch.equal(output, expected), (numel, wire, result)
                whole = torch.full((size * numel,), float("nan"), dtype=result)
                group.all_reduce(whole, rows.view(-1), tag=tag)
                for row in range(size):
                    expected = mean_of(size, row, numel, wire).to(result)
                    assert torch.equal(whole.view(size, numel)[row], expected)
    group.close()


@pytest.mark.parametrize("size", SIZES)
def test_means_follow_the_rule_bit_for_bit(size: int) -> None:
    run_ranks(size, values)


def gathers(rank: int, size: int) -> None:
    group = create()
    for tag, dtype in enumerate(DTYPES):
        for numel in (0, 1, 5, 3000):
            shards = [filled(r, numel, dtype) for r in range(size)]
            output = torch.zeros(size, numel, dtype=dtype)
            group.all_gather(output, shards[rank], tag=tag)
            assert torch.equal(output, torch.stack(shards)), dtype
            rows = torch.zeros(size * numel, dtype=dtype)
            own = rows[rank * numel : (rank + 1) * numel]
            own.copy_(shards[rank])
            group.all_gather(rows, own, tag=tag)
            assert torch.equal(rows, torch.cat(shards)), dtype
    group.close()


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_keeps_every_byte_also_in_place(size: int) -> None:
    run_ranks(size, gathers)


def in_place(rank: int, size: int) -> None:
    peer.PIECE_BYTES = PIECE
    group = create()
    numel = 2500
    rows = rows_of(rank, size, numel, torch.float32)
    sent = rows.clone()
    group.reduce_scatter(rows[rank], rows, tag=1)
    assert torch.equal(rows[rank], mean_of(size, rank, numel, torch.float32))
    others = [row for row in range(size) if row != rank]
    assert torch.equal(rows[others], sent[others]), "a row of another rank was touched"
    flat = sent.view(-1).clone()
    group.all_reduce(flat, flat, tag=2)
    means = [mean_of(size, row, numel, torch.float32) for row in range(size)]
    assert torch.equal(flat, torch.cat(means))
    group.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reductions_work_in_place(size: int) -> None:
    run_ranks(size, in_place)


def cut(rank: int, size: int, kernel_threads: int | None) -> list[torch.Tensor]:
    """One gradient reduced whole, in buckets of several sizes, and by all_reduce."""
    peer.PIECE_BYTES = PIECE
    kernels = Kernels(threads=kernel_threads) if kernel_threads else None
    group = create(kernels=kernels)
    numel = 5000
    rows = rows_of(rank, size, numel, torch.float32)
    results: list[torch.Tensor] = []
    for bucket in (numel, 1000, 137, 4999):
        parts: list[torch.Tensor] = []
        for begin in range(0, numel, bucket):
            piece = rows[:, begin : begin + bucket].contiguous()
            parts.append(torch.empty(piece.shape[1]))
            group.reduce_scatter(parts[-1], piece, tag=begin)
        results.append(torch.cat(parts))
    whole = torch.empty(size * numel)
    group.all_reduce(whole, rows.view(-1), tag=-1)
    results.append(whole.view(size, numel)[rank].clone())
    group.close()
    if kernels is not None:
        kernels.close()
    return results


def test_bits_do_not_depend_on_the_bucket_the_call_or_the_kernels() -> None:
    plain = run_ranks(3, cut, None)
    compiled = run_ranks(3, cut, 2)
    for rank in range(3):
        for result in (*plain[rank], *compiled[rank]):
            assert torch.equal(result, plain[rank][0])


def staged(rank: int, size: int) -> None:
    """Every tensor is treated like one of another device."""
    peer._CPU = torch.device("meta")
    group = create()
    rows = rows_of(rank, size, 1000, torch.bfloat16)
    output = torch.empty(1000, dtype=torch.bfloat16)
    group.reduce_scatter(output, rows, tag=1)
    expected = mean_of(size, rank, 1000, torch.bfloat16).bfloat16()
    assert torch.equal(output, expected)
    gathered = torch.empty(size, 1000, dtype=torch.bfloat16)
    group.all_gather(gathered, output, tag=2)
    means = [mean_of(size, row, 1000, torch.bfloat16).bfloat16() for row in range(size)]
    assert torch.equal(gathered, torch.stack(means))
    flat = torch.empty(size * 1000, dtype=torch.bfloat16)
    group.all_reduce(flat, rows.view(-1), tag=3)
    assert torch.equal(flat, torch.cat(means))
    tensors = [torch.full((3,), float(rank)), torch.full((9,), rank)]
    group.broadcast(tensors, source=1)
    assert [t.tolist() for t in tensors] == [[1.0] * 3, [1] * 9]
    group.close()


def test_tensors_of_another_device_go_through_host_memory() -> None:
    run_ranks(2, staged)


def model_state(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    wide = torch.randn(40, 60)
    return [
        nn.Parameter(torch.randn(10_000)),
        nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16)),
        nn.Parameter(wide.t()),  # not contiguous
        wide.clone()[:, ::7],
        torch.tensor(rank),
        torch.tensor([True, False, rank == 0]),
        torch.zeros(0, 4),
        torch.randn(4, dtype=torch.complex64),
        torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last),
        torch.arange(rank, rank + 9, dtype=torch.int8),
        torch.randn(7).to(torch.float8_e4m3fn),
        nn.Parameter(torch.randn(1, 1)),
    ]


def broadcasts(rank: int, size: int, source: int) -> int:
    peer.PIECE_BYTES = PIECE  # the first parameter alone takes ten pieces
    ledger = Ledger()
    group = create(ledger)
    state = model_state(rank)
    strides = [tensor.stride() for tensor in state]
    group.broadcast(state, source=source)
    for tensor, expected, stride in zip(state, model_state(source), strides, strict=True):
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        assert torch.equal(tensor.to(wide), expected.to(wide))
        assert tensor.stride() == stride
    group.broadcast([], source=source)
    with pytest.raises(ValueError, match="there are ranks 0 to"):
        group.broadcast(state, source=size)
    group.close()
    return ledger.snapshot()["broadcast"]


@pytest.mark.parametrize(("size", "source"), [(1, 0), (2, 1), (3, 0)])
def test_broadcast_takes_any_tensors(size: int, source: int) -> None:
    sent = run_ranks(size, broadcasts, source)
    total = sum(tensor.numel() * tensor.element_size() for tensor in model_state(0))
    expected = [0] * size
    expected[source] = (size - 1) * total
    assert sent == expected


def exchanges(rank: int, size: int) -> None:
    group = create()
    for dtype in (torch.uint8, torch.int64, torch.float64, torch.bool, torch.bfloat16):
        for shape in ((), (1,), (0,), (48,), (7, 9), (500, 3)):
            payloads = [torch.full(shape, r + 1).to(dtype) for r in range(size)]
            rows = group.exchange(payloads[rank])
            assert len(rows) == size
            for row, payload in zip(rows, payloads, strict=True):
                assert row.dtype == dtype
                assert torch.equal(row, payload)
    first = group.exchange(torch.tensor([rank]))
    group.exchange(torch.tensor([100]))
    assert [int(row) for row in first] == list(range(size)), "a later exchange changed a result"
    group.barrier()
    group.close()


@pytest.mark.parametrize("size", SIZES)
def test_exchange_returns_every_ranks_payload_in_order(size: int) -> None:
    run_ranks(size, exchanges)


def counted(rank: int, size: int) -> tuple[dict[str, int], int]:
    ledger = Ledger()
    group = create(ledger)
    group.barrier()
    group.all_gather(torch.zeros(size), torch.zeros(1), tag=0)
    before, start = ledger.snapshot(), bytes_sent()
    numel = 700_000
    rows = rows_of(rank, size, numel, torch.float32)
    output = torch.empty(numel)
    group.reduce_scatter(output, rows, tag=1)
    group.reduce_scatter(output, rows.bfloat16(), tag=2)
    group.all_gather(rows, output, tag=3)
    group.all_reduce(rows.view(-1), rows.view(-1), tag=4)
    for _ in range(20):
        group.exchange(torch.tensor([rank]))
    group.exchange(torch.zeros(5000))
    group.broadcast([output], source=0)
    # What a rank sent last may still be on its way: a barrier orders it before the reading.
    group.barrier()
    time.sleep(0.2)
    sent = bytes_sent() - start
    after = ledger.snapshot()
    group.barrier()  # a connection closed by its other end has no counters
    group.close()
    return {key: after[key] - before[key] for key in after}, sent


def bytes_sent() -> int:
    """What the kernel counts as sent on this process's TCP connections (`tcpi_bytes_acked`)."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        number = int(link.name)
        try:
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family == socket.AF_INET:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += int.from_bytes(info[120:128], sys.byteorder)
        except OSError:
            continue
    return total


@pytest.mark.parametrize("size", [2, 3])
def test_the_ledger_agrees_with_the_formulas_and_the_kernels_counters(size: int) -> None:
    numel = 700_000
    for rank, (counts, sent) in enumerate(run_ranks(size, counted)):
        others = size - 1
        assert counts["reduce_scatter"] == others * numel * (4 + 2)
        assert counts["all_gather"] == others * numel * 4
        assert counts["all_reduce"] == others * numel * (4 + 4)
        assert counts["exchange"] == others * (20 * 8 + 5000 * 4)
        assert counts["broadcast"] == (others * numel * 4 if rank == 0 else 0)
        total = sum(counts.values())
        assert total <= sent <= 1.05 * total + 20_000, (total, sent)


def loud(rank: int, size: int) -> tuple[int, int]:
    """Bytes by the ledger, all ranks, and how much the loopback device carried meanwhile."""
    ledger = Ledger()
    group = create(ledger)
    rows = torch.zeros(size, 4_000_000)
    group.barrier()
    best = 0, 1 << 62
    for _ in range(6):
        group.barrier()
        before, start = sum(ledger.snapshot().values()), loopback_bytes()
        group.reduce_scatter(rows[rank], rows, tag=1)
        group.all_gather(rows, rows[rank], tag=2)
        group.barrier()
        mine = sum(ledger.snapshot().values()) - before
        carried = loopback_bytes() - start
        total = sum(int(row) for row in group.exchange(torch.tensor([mine])))
        best = min(best, (total, carried), key=lambda pair: pair[1])
    group.close()
    return best


def loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.strip().partition(":")
        if name == "lo":
            return int(counts.split()[8])
    raise AssertionError("/proc/net/dev has no line for lo: this check needs a loopback device")


@pytest.mark.serial
def test_the_loopback_device_carries_what_the_ledger_says() -> None:
    # Others may use the device too, so the quietest of a few rounds counts.
    total, carried = run_ranks(2, loud)[0]
    assert 64_000_000 <= total <= 64_010_000
    assert total <= carried <= 1.05 * total + 50_000


def steady(rank: int, size: int) -> None:
    group = create()
    sizes = (500, 3_000_000, 40, 1_500_000)
    tensors = {n: (torch.zeros(n), torch.zeros(size, n)) for n in sizes}
    held: list[int] = []
    for _ in range(4):
        for numel, (output, rows) in tensors.items():
            group.reduce_scatter(output, rows, tag=numel)
            group.all_gather(rows, output, tag=numel)
        group.broadcast([torch.zeros(10), torch.zeros(20, dtype=torch.int64)])
        held.append(group.workspace_bytes)
    assert held == [held[0]] * 4
    assert held[0] <= 2 * (size - 1) * peer.PIECE_BYTES + 1000
    group.close()
    assert group.workspace_bytes == 0


def test_the_workspace_has_one_size_whatever_the_bucket() -> None:
    run_ranks(2, steady)


def together(rank: int, size: int) -> None:
    """A lane's thread and the main thread at once, for a while, at their own pace."""
    group = create()

    def lane() -> None:
        generator = torch.Generator().manual_seed(rank)
        for step in range(150):
            if torch.rand(1, generator=generator) < 0.1:
                time.sleep(0.002)
            rows = torch.full((size, 3000), float(rank + step))
            output = torch.empty(3000)
            group.reduce_scatter(output, rows, tag=step)
            assert output[7] == step + (size - 1) / 2
            group.all_gather(rows, output, tag=step)
            assert bool((rows == output[0]).all())

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lane)
        for step in range(150):
            rows = group.exchange(torch.tensor([rank, step]))
            assert [row.tolist() for row in rows] == [[r, step] for r in range(size)]
        running.result(40.0)
    group.close()


@pytest.mark.parametrize("size", [2, 3])
def test_a_lane_and_the_main_thread_may_use_it_at_once(size: int) -> None:
    run_ranks(size, together)


def neighbours(rank: int, size: int) -> None:
    """Two groups beside the default one, closed in any order, leave it and the process as they were."""

    def counts() -> tuple[int, int, int]:
        pairs = (
            len(list(Path("/proc/self/task").iterdir())),
            len(list(Path("/proc/self/fd").iterdir())),
        )
        return (*pairs, len(dist.distributed_c10d._world.pg_map))

    dist.barrier()
    before = counts()
    first, second = create(), create()
    assert dist.get_world_size() == size
    for turn in range(3):
        first.exchange(torch.tensor([turn]))
        total = torch.tensor([1.0])
        dist.all_reduce(total)
        assert total.item() == size
        second.exchange(torch.tensor([turn]))
    first.close()
    second.barrier()
    second.close()
    gc.collect()
    limit = time.monotonic() + 5.0
    while counts() != before and time.monotonic() < limit:
        time.sleep(0.05)
    assert counts() == before
    dist.barrier()


def test_the_default_group_is_neither_used_nor_destroyed() -> None:
    run_ranks(2, neighbours)


def destroyed_first(rank: int, size: int) -> None:
    group = create()
    group.barrier()
    dist.destroy_process_group()
    group.close()


def test_close_after_torch_distributed_was_shut_down() -> None:
    run_ranks(2, destroyed_first)


def test_one_process_without_torch_distributed_communicates_nothing() -> None:
    assert not dist.is_initialized()
    ledger = Ledger()
    group = create(ledger)
    assert (group.rank, group.size) == (0, 1)
    rows = rows_of(0, 1, 100, torch.float32)
    output = torch.empty(100, dtype=torch.bfloat16)
    group.reduce_scatter(output, rows, tag=1)
    assert torch.equal(output, rows[0].bfloat16())
    group.all_gather(rows, torch.ones(100), tag=1)
    assert bool((rows == 1).all())
    group.all_reduce(output, rows[0], tag=1)
    assert bool((output == 1).all())
    assert [row.tolist() for row in group.exchange(torch.tensor([4, 5]))] == [[4, 5]]
    group.broadcast([rows])
    group.barrier()
    group.verify()
    assert group.workspace_bytes == 0
    group.close()
    assert set(ledger.snapshot().values()) == {0}
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("output", "rows", "match"),
    [
        (torch.zeros(4), torch.zeros(5), "1 contiguous rows of 4 elements"),
        (torch.zeros(4), torch.zeros(4, 2)[:, 0], "strides"),
        (torch.zeros(8)[::2], torch.zeros(4), "give a contiguous tensor"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    output: torch.Tensor, rows: torch.Tensor, match: str
) -> None:
    group = create()
    with pytest.raises(ValueError, match=match):
        group.reduce_scatter(output, rows, tag=1)


def test_dtypes_and_padding_that_do_not_fit_are_refused() -> None:
    group = create()
    with pytest.raises(ValueError, match="tensors of one dtype"):
        group.all_gather(torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), tag=1)
    with pytest.raises(ValueError, match="pad both"):
        group.all_reduce(torch.zeros(4), torch.zeros(5), tag=1)
