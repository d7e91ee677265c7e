"""What one engine opens and must close: processes' groups, compiled kernels, lanes, counters and the event log."""

from __future__ import annotations

import socket
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from typing_extensions import Self

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import ConfigError
from zero_plugin.kernels import Kernels
from zero_plugin.runtime.alarms import Alarms, warn_of_disk
from zero_plugin.runtime.backend import Backend
from zero_plugin.runtime.select import create_backend
from zero_plugin.runtime.topology import (
    HostPlace,
    Neighbour,
    allowed_cpus,
    bound,
    choose_place,
    read_cores,
    read_nodes,
)
from zero_plugin.sharding.control import Control
from zero_plugin.sharding.group import ProcessGroup
from zero_plugin.store.store import NvmeStore
from zero_plugin.trace import Ledger, Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """One engine's resources; `close` frees all of them.

    Attributes:
        group: the ranks.
        weight_group: the ranks again, for the gathers of sharded weights; None where weights are not sharded.
        kernels: compiled kernels with their own threads.
        backend: lanes and memory.
        control: the ranks' small messages.
        store: files of the `nvme` tier, or None where nothing lies there.
        ledger: byte counters.
        trace: the event log, or None.
        trace_path: where the log is written at the end, or None.
    """

    group: ProcessGroup
    weight_group: ProcessGroup | None
    kernels: Kernels
    backend: Backend
    control: Control
    store: NvmeStore | None
    ledger: Ledger
    trace: Trace | None
    trace_path: Path | None

    @classmethod
    def open(cls, config: ZeroConfig, device: torch.device) -> Self:
        """Open everything; all ranks call it.

        Args:
            config: threads, instruction set, backend, timeout and trace.
            device: where the model computes.

        Raises:
            ConfigError: the settings do not fit the device or the processor.
        """
        ledger = Ledger()
        trace = None if config.trace is None else Trace()
        with ExitStack() as stack:
            group = _join(config, device, ledger, stack)
            # Gathers are a sequence of their own: a rank may reduce a bucket before or after a gather that another one
            # sees in the other order, since a bucket waits for its last gradient.
            weight_group = (
                _join(config, device, ledger, stack, beside=group)
                if config.shards_parameters
                else None
            )
            store = _open_store(config, group, ledger)
            if store is not None:
                stack.callback(store.close)
            place = _find_place(config, group, device)
            with bound(place.cpus):
                kernels = _make_kernels(config, place)
            for each in (group, weight_group):
                if each is not None:
                    each.use_kernels(kernels)
            backend = create_backend(
                # On a device a step without overlap waits for its updates; there is no other order to keep.
                config.backend if config.overlap or device.type == "cuda" else "inline",
                device=device,
                kernels=kernels,
                trace=trace,
                ledger=ledger,
                seed=config.backend_seed,
                place=place,
            )
            group.watch(backend.at_rest)
            backend.meter.watcher = Alarms()
            stack.pop_all()
        return cls(
            group=group,
            weight_group=weight_group,
            kernels=kernels,
            backend=backend,
            control=Control(group, backend),
            store=store,
            ledger=ledger,
            trace=trace,
            trace_path=_trace_path(config, group),
        )

    def close(self) -> None:
        """Stop threads, leave the groups, and write the log; idempotent."""
        # The group first: a lane may be waiting for a rank that will not come.
        self.group.close()
        if self.weight_group is not None:
            self.weight_group.close()
        self.backend.close()
        if self.store is not None and not self.store.is_kept:
            self.store.close()
        self.kernels.close()
        if self.trace is not None and self.trace_path is not None:
            self.trace.write_chrome(self.trace_path)


def _join(
    config: ZeroConfig,
    device: torch.device,
    ledger: Ledger,
    stack: ExitStack,
    beside: ProcessGroup | None = None,
) -> ProcessGroup:
    group = ProcessGroup.create(
        device=device,
        ledger=ledger,
        timeout_seconds=config.timeout_seconds,
        beside=beside,
        name="" if beside is None else "weights",
    )
    stack.callback(group.close)
    return group


def _make_kernels(config: ZeroConfig, place: HostPlace) -> Kernels:
    try:
        return Kernels(threads=place.threads, isa=config.instruction_set)
    except ValueError as error:
        raise ConfigError(f"instruction_set={config.instruction_set!r}: {error}") from error


def _open_store(config: ZeroConfig, group: ProcessGroup, ledger: Ledger) -> NvmeStore | None:
    """Open this rank's files; all ranks fail if one cannot."""
    if not config.nvme_paths:
        return None
    store: NvmeStore | None = None
    failure: Exception | None = None
    try:
        store = NvmeStore(
            config.nvme_paths,
            rank=group.rank,
            limit=config.limit("nvme"),
            engine=config.nvme_engine,
            checksum=config.nvme_checksum,
            ledger=ledger,
        )
    except Exception as error:  # noqa: BLE001 - told to the other ranks, then raised
        failure = error
    if store is not None and group.rank == 0:
        for path in store.describe().paths:
            warn_of_disk(path.path, path.file_system, path.read_mb)
    opened = torch.tensor([failure is None], dtype=torch.int64, device="cpu")
    rows = group.exchange(opened, label="files of the nvme tier")
    if failure is not None:
        raise failure
    failed = [rank for rank, row in enumerate(rows) if not int(row[0])]
    if failed:
        if store is not None:
            store.close()
        raise ConfigError(
            f"nvme_path={config.nvme_path!r} could not be used on rank {', '.join(map(str, failed))}: see the error there"
        )
    return store


def _find_place(config: ZeroConfig, group: ProcessGroup, device: torch.device) -> HostPlace:
    """This rank's share of its host's cores, and its memory node; all ranks call it."""
    allowed = allowed_cpus()
    own = [
        zlib.crc32(socket.gethostname().encode()),
        zlib.crc32(repr(sorted(allowed)).encode()),
        _node_of(device),
    ]
    rows = group.exchange(
        torch.tensor(own, dtype=torch.int64, device="cpu"), label="hosts and processors"
    )
    ranks = [Neighbour(host=int(a), allowed=int(b), node=int(c)) for a, b, c in rows]
    place = choose_place(group.rank, ranks, read_cores(allowed), read_nodes(allowed), allowed)
    if not config.bind_threads:
        place = HostPlace(threads=place.threads)
    if config.threads is None:
        return place
    # More threads than there are cores to bind them to were asked for: then anywhere on the node.
    fits = config.threads <= max(1, len(place.cpus))
    return replace(place, threads=config.threads, cpus=place.cpus if fits else ())


def _node_of(device: torch.device) -> int:
    """Memory node that an accelerator is attached to, or -1."""
    if device.type != "cuda":
        return -1
    from zero_plugin.runtime.cuda import memory_node

    return memory_node(device)


def _trace_path(config: ZeroConfig, group: ProcessGroup) -> Path | None:
    if config.trace is None:
        return None
    path = Path(config.trace)
    return path if group.size == 1 else path.with_name(f"{path.stem}.rank{group.rank}{path.suffix}")
