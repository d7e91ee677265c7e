"""Measures what placement depends on: memory, update, links, disks, collectives and computation, each for a second or two."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zero_plugin.errors import BudgetError, StoreError
from zero_plugin.kernels import Kernels
from zero_plugin.optim.rule import ADAMW
from zero_plugin.runtime.backend import Backend
from zero_plugin.runtime.memory import allocate_host, available_host_bytes
from zero_plugin.runtime.operations import Copy
from zero_plugin.runtime.select import create_backend
from zero_plugin.store.store import NvmeStore
from zero_plugin.trace import Ledger

if TYPE_CHECKING:
    from torch import Tensor

    from zero_plugin.sharding.group import ProcessGroup

Progress = Callable[[int, int, str], None]
"""Called with the parts done, their number, and the name of the next."""

_STATE_BYTES = 192 << 20
"""Of the states that are updated: well above what processors cache."""

_FILE_BYTES = 64 << 20
_BLOCKS = (256 << 10, 1 << 20, 4 << 20)
_DEPTHS = (4, 32)
_COLLECTIVE_BYTES = 16 << 20
_LINK_BYTES = 256 << 20
_KEPT_BYTES = 31 << 20
_WEIGHT_BYTES, _WEIGHTS = 4 << 20, 4
"""Of a layer's matrix, and how many a gather brings; host allocators keep such memory mapped, larger pieces come with fresh pages."""


class Clock:
    """How long each part may take.

    Args:
        seconds: of one part.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def rate(self, work: Callable[[], object], amount: float) -> float:
        """`amount` over the median time of `work`, run as often as there is time, at least three times."""
        work()
        taken: list[float] = []
        end = time.perf_counter() + self._seconds
        while len(taken) < 3 or (time.perf_counter() < end and len(taken) < 200):
            begin = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begin)
            if sum(taken) > 4 * self._seconds:
                break
        return amount / statistics.median(taken)


def measure(
    paths: Sequence[Path] = (),
    *,
    seconds: float = 1.0,
    progress: Progress | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    """Measure this machine, in one process.

    Args:
        paths: folders of the `nvme` tier.
        seconds: for each part, roughly.
        progress: told what is measured.
        threads: of the compiled kernels; None: all cores'.

    Returns:
        `Hardware` fields, bytes and operations a second, and "disks": for each path its rates, best block and depth.
    """
    clock = Clock(seconds)
    device = torch.accelerator.current_accelerator()
    parts: list[tuple[str, Callable[[], Mapping[str, Any]]]] = [
        ("host memory and update", lambda: _host(clock, threads)),
        ("computation", lambda: _compute(clock, device)),
        ("links", lambda: _links(clock, device, threads)),
        *((f"disk {path}", lambda path=path: _disk(clock, path)) for path in paths),
    ]
    found: dict[str, Any] = {"disks": {}}
    for number, (name, part) in enumerate(parts):
        if progress is not None:
            progress(number, len(parts), name)
        values = dict(part())
        found["disks"] |= values.pop("disks", {})
        found |= values
    if progress is not None:
        progress(len(parts), len(parts), "")
    return found


def _host(clock: Clock, threads: int | None) -> dict[str, float]:
    """The compiled AdamW on bf16 gradients and weights, the same bytes moved with hardly any arithmetic, and the norm."""
    room = available_host_bytes()
    numel = (_STATE_BYTES if room is None else min(_STATE_BYTES, room // 4)) // 16 // 16 * 16
    states = [allocate_host(4 * numel).view(torch.float32) for _ in range(3)]
    halves = [allocate_host(2 * numel).view(torch.bfloat16) for _ in range(2)]
    addresses = [item.data_ptr() for item in (*states, *halves)]
    segments = torch.tensor([[*addresses, numel, 0]], dtype=torch.int64, device="cpu")
    group = {"betas": (0.9, 0.999), "lr": 1e-3, "weight_decay": 0.01, "eps": 1e-8}
    hyper = torch.tensor([ADAMW.hyper(group, 1)], dtype=torch.float64, device="cpu")
    with Kernels(threads=threads) as kernels:
        moved = clock.rate(lambda: kernels.stream(segments), 28 * numel)
        halves[0].zero_()
        update = clock.rate(
            lambda: kernels.update(
                ADAMW.native_id,
                segments,
                hyper,
                gradient_dtype=torch.bfloat16,
                output_dtype=torch.bfloat16,
                scale=1.0,
                clip_value=None,
            ),
            28 * numel,
        )
        halves[0].fill_(1.0)
        norm = clock.rate(lambda: kernels.norm_partial(halves[0]), 2 * numel)
    return {"update": update, "host_bandwidth": moved, "norm": norm}


def _compute(clock: Clock, device: torch.device | None) -> dict[str, float]:
    """Matrices of a transformer's size, in the dtype the device is best at."""
    width = 4096 if device is not None else 768
    dtype = torch.bfloat16 if device is not None else torch.float32
    where = device or torch.device("cpu")
    left = torch.randn(width, width, dtype=dtype, device=where)

    def work() -> None:
        product = left
        for _ in range(4):
            product = product @ left
        if device is not None:
            torch.accelerator.synchronize()

    return {"flops": clock.rate(work, 4 * 2 * width**3)}


@contextmanager
def _backend(device: torch.device, threads: int | None) -> Generator[Backend]:
    with Kernels(threads=threads) as kernels:
        backend = create_backend(
            "auto", device=device, kernels=kernels, trace=None, ledger=Ledger()
        )
        try:
            yield backend
        finally:
            backend.close()


def _links(clock: Clock, device: torch.device | None, threads: int | None) -> dict[str, float]:
    """Both directions at once, on the lanes that carry them in training; in turn where the same cores copy both ways."""
    where = device or torch.device("cpu")
    nbytes = _LINK_BYTES if device is not None else _LINK_BYTES // 4
    with _backend(where, threads) as backend:
        here = [backend.allocate(nbytes, "host") for _ in range(2)]
        there = [backend.allocate(nbytes, "device") for _ in range(2)]
        ways = (
            ("up", Copy(destinations=(there[0],), sources=(here[0],), direction="host_to_device")),
            (
                "down",
                Copy(destinations=(here[1],), sources=(there[1],), direction="device_to_host"),
            ),
        )
        taken: dict[str, list[float]] = {"up": [], "down": []}

        def work() -> None:
            for together in (ways,) if device is not None else ((way,) for way in ways):
                begin = time.perf_counter()
                tickets = [
                    (name, backend.lane(f"bench {name}", "device").submit(op))
                    for name, op in together
                ]
                for name, ticket in tickets:
                    ticket.wait()
                    taken[name].append(time.perf_counter() - begin)

        clock.rate(work, 1)
        found = {name: nbytes / statistics.median(values) for name, values in taken.items()}
        copied = Copy(destinations=(there[0],), sources=(there[1],))
        lane = backend.lane("bench device", "device")
        # Each byte is read and written.
        found["device_bandwidth"] = clock.rate(lambda: lane.submit(copied).wait(), 2 * nbytes)
        one = min(_WEIGHT_BYTES, nbytes // _WEIGHTS)
        # glibc maps pieces anew until one of their size was freed; a training process has freed activations by then.
        del [torch.empty(_KEPT_BYTES, dtype=torch.uint8, device=where)][:]
        fresh = tuple(torch.empty(one, dtype=torch.uint8, device=where) for _ in range(_WEIGHTS))
        source = here[0][: _WEIGHTS * one].split(one)
        gathered = Copy(destinations=fresh, sources=source, direction="host_to_device")

        def gather() -> None:
            for size in (0, one):
                for item in fresh:
                    item.untyped_storage().resize_(size)
            lane.submit(gathered).wait()

        found["gather"] = clock.rate(gather, _WEIGHTS * one)
    return found


def _disk(clock: Clock, path: Path) -> dict[str, Any]:
    """One path: the best block size and depth for both ways at once, then each way alone."""
    best: tuple[float, int, int] = (0.0, _BLOCKS[1], _DEPTHS[1])
    memory = allocate_host(_FILE_BYTES)
    memory.view(torch.int64).random_()
    brief = Clock(clock._seconds / 8)  # noqa: SLF001 - its own class's
    try:
        for block in _BLOCKS:
            for depth in _DEPTHS:
                with _store(path, block, depth) as (store, extent):
                    store.write(extent, 0, memory)
                    rate = brief.rate(lambda: _both(store, extent, memory), _FILE_BYTES)
                best = max(best, (rate, block, depth))
        with _store(path, best[1], best[2]) as (store, extent):
            store.write(extent, 0, memory)
            mixed = clock.rate(lambda: _both(store, extent, memory), _FILE_BYTES / 2)
            read = clock.rate(lambda: store.read(extent, 0, memory), _FILE_BYTES)
            write = clock.rate(lambda: store.write(extent, 0, memory), _FILE_BYTES)
            description = store.describe()
    except (BudgetError, StoreError) as error:
        return {"disks": {str(path.resolve()): {"error": str(error)}}}
    return {
        "disks": {
            str(path.resolve()): {
                "read": read,
                "write": write,
                "mixed_read": mixed,
                "mixed_write": mixed,
                "block_bytes": best[1],
                "queue_depth": best[2],
                "engine": description.engine,
                "direct": description.paths[0].direct,
                "file_system": description.paths[0].file_system,
            }
        }
    }


@contextmanager
def _store(path: Path, block: int, depth: int) -> Generator[tuple[NvmeStore, Any]]:
    store = NvmeStore([path], queue_depth=depth, block_bytes=block)
    try:
        yield store, store.reserve(_FILE_BYTES, "benchmark")
    finally:
        store.close()


def _both(store: NvmeStore, extent: Any, memory: Tensor) -> None:
    """Half of the bytes are read while the other half is written."""
    half = memory.numel() // 2
    reader = threading.Thread(target=store.read, args=(extent, 0, memory[:half]))
    reader.start()
    store.write(extent, half, memory[half:])
    reader.join()


def measure_collectives(group: ProcessGroup, threads: int | None = None) -> dict[str, float]:
    """All-gather and reduce-scatter of the size of a bucket: bytes that a rank sends a second. All ranks call it."""
    device = torch.accelerator.current_accelerator()
    where = device or torch.device("cpu")
    numel = _COLLECTIVE_BYTES // 4 // group.size
    shard = torch.ones(numel, dtype=torch.float32, device=where)
    rows = torch.empty(group.size, numel, dtype=torch.float32, device=where)
    taken: dict[str, list[float]] = {"collective": [], "reduce": []}
    with Kernels(threads=threads) as kernels:
        group.use_kernels(kernels)
        # As often on every rank, however fast it is.
        for number in range(16):
            name = ("collective", "reduce")[number % 2]
            begin = time.perf_counter()
            if name == "collective":
                group.all_gather(rows, shard, tag=0, label="benchmark")
            else:
                group.reduce_scatter(shard, rows, tag=0, label="benchmark")
            if device is not None:
                torch.accelerator.synchronize()
            taken[name].append(time.perf_counter() - begin)
    sent = (group.size - 1) * numel * 4
    return {name: sent / statistics.median(times[2:]) for name, times in taken.items()}
