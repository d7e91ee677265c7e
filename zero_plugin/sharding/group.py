"""The ranks that share the model states, and the collectives between them.

The only file that imports `torch.distributed`. A `ProcessGroup` makes process groups of its own: one sequence
("data") for the collectives on gradients and weights, issued from one lane, and one ("control") for the small
exchanges of the main thread. The default group carries none of our bytes and is never destroyed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zero_plugin.errors import CollectiveTimeoutError
from zero_plugin.runtime.operations import KernelSet, copy_tensor
from zero_plugin.sharding.channel import Channel
from zero_plugin.sharding.header import Call, Kind
from zero_plugin.sharding.nccl import Event, NcclCollectives
from zero_plugin.sharding.peer import PeerCollectives, Workspace, broadcast
from zero_plugin.sharding.watchdog import AtRest, Watchdog
from zero_plugin.trace import Ledger

INLINE_BYTES = 384
LEDGER_EXTRAS = ("headers", "exchange", "broadcast")


class Collectives(Protocol):
    """How the data collectives run: alone, between peers, or on NCCL."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes kept between calls."""
        ...

    @property
    def header_bytes(self) -> int:
        """Bytes of the header a rank sends to each other one."""
        ...

    def use_kernels(self, kernels: KernelSet) -> None:
        """Sums and copies on the host go through `kernels` from now on."""
        ...

    def reduce_scatter(self, output: Tensor, rows: Tensor, call: Call) -> None:
        """Sets output [n] to the mean over ranks of their rows[rank]."""
        ...

    def all_gather(self, output: Tensor, shard: Tensor, call: Call) -> None:
        """Sets output [size, n] to every rank's shard [n]."""
        ...

    def all_reduce(self, output: Tensor, rows: Tensor, call: Call) -> None:
        """Sets output [size, n] to the mean over ranks of rows [size, n]."""
        ...

    def verify(self) -> None:
        """Checks the headers still on their way."""
        ...

    def close(self) -> None:
        """Frees what is kept."""
        ...


class SoloCollectives:
    """One rank: a mean over it is a copy, and nothing is sent."""

    workspace_bytes = 0
    header_bytes = 0

    def __init__(self, kernels: KernelSet | None) -> None:
        self._kernels = kernels

    def use_kernels(self, kernels: KernelSet) -> None:
        """Copies go through `kernels` from now on."""
        self._kernels = kernels

    def reduce_scatter(self, output: Tensor, rows: Tensor, call: Call) -> None:
        """Copies, rounding to the output's dtype."""
        del call
        self._copy(output, rows[0])

    def all_gather(self, output: Tensor, shard: Tensor, call: Call) -> None:
        """Copies."""
        del call
        self._copy(output[0], shard)

    def all_reduce(self, output: Tensor, rows: Tensor, call: Call) -> None:
        """Copies, rounding to the output's dtype."""
        del call
        self._copy(output, rows)

    def verify(self) -> None:
        """Nothing to check."""

    def close(self) -> None:
        """Nothing to close."""

    def _copy(self, output: Tensor, source: Tensor) -> None:
        if output.data_ptr() == source.data_ptr() and output.dtype == source.dtype:
            return
        if self._kernels is None:
            output.copy_(source)
        else:
            copy_tensor(self._kernels, output, source)


class _Fabric:
    """What `sharding.nccl` needs of a backend that works on the device."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        # torch 2.13 renamed both and deprecates the old names.
        self._gather = _first("all_gather_single", "all_gather_into_tensor")
        self._mean = _first("reduce_scatter_single", "reduce_scatter_tensor")

    def gather(self, output: Tensor, shard: Tensor) -> None:
        """Every rank's shard, on the current stream."""
        self._gather(output, shard, group=self._group)

    def mean(self, output: Tensor, rows: Tensor) -> None:
        """The mean of the ranks' rows for this rank, on the current stream."""
        self._mean(output, rows, op=dist.ReduceOp.AVG, group=self._group)

    def event(self) -> Event:
        """An event of the device."""
        return torch.Event(self._device)


class ProcessGroup:
    """The ranks that share the model states; made by `create`, to be closed with `close`.

    The data collectives (`reduce_scatter`, `all_gather`, `all_reduce`) form one sequence and the control ones
    (`exchange`, `broadcast`, `barrier`) another; every rank has to issue each sequence in the same order. Each sequence
    is for one thread at a time, the two may run at once. Every wait has a deadline. After a failure the group
    is of no further use.

    Attributes:
        rank: this process's number.
        size: number of processes.
    """

    def __init__(
        self,
        *,
        data: Collectives,
        control: Channel | None,
        watchdog: Watchdog | None,
        ledger: Ledger,
        groups: Sequence[dist.ProcessGroup] = (),
        watched: Sequence[Channel] = (),
    ) -> None:
        self.rank = control.rank if control else 0
        self.size = control.size if control else 1
        self._data = data
        self._control = control
        self._watchdog = watchdog
        self._ledger = ledger
        self._groups = list(groups)
        self._watched = tuple(watched)
        self._workspace = Workspace()
        for key in LEDGER_EXTRAS:
            ledger.declare(key)

    @classmethod
    def create(
        cls,
        *,
        device: torch.device,
        ledger: Ledger,
        timeout_seconds: float,
        kernels: KernelSet | None = None,
        beside: ProcessGroup | None = None,
        name: str = "",
    ) -> ProcessGroup:
        """Joins the ranks of the initialised default group; alone when there is none.

        A collective: every rank has to call it. Tensors of a CUDA device travel over NCCL where the default
        group does, else over gloo through host memory.

        Args:
            device: where the tensors of the data collectives live.
            ledger: counts the bytes this rank sends.
            timeout_seconds: longest wait for another rank.
            kernels: does sums and copies on the host; None: plain torch, with the same bits.
            beside: a group of the same ranks; ranks that wait for one another, some in a collective of it and some in one
                of this group, get an error as if it were one group (see `watch`).
            name: of its sequences in messages, where there are several groups.

        Raises:
            CollectiveTimeoutError: a rank did not call it within the timeout.
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            _warn_if_launched()
            return cls(data=SoloCollectives(kernels), control=None, watchdog=None, ledger=ledger)
        rank, size = dist.get_rank(), dist.get_world_size()
        _gather_ranks(rank, size, timeout_seconds)
        timeout = timedelta(seconds=timeout_seconds)
        groups = [_new_group("gloo", timeout)]
        shared = beside._watchdog if beside is not None else None  # noqa: SLF001 - of this class
        watchdog = shared or Watchdog(store=groups[0].get_group_store(), rank=rank, size=size)
        common: dict[str, Any] = {"rank": rank, "size": size, "timeout_seconds": timeout_seconds}
        channel = partial(Channel, watchdog=watchdog, **common)
        label = f"{name} control".lstrip()
        control = channel(name=label, mail=groups[0], inline_bytes=INLINE_BYTES)
        watched = [control]
        data: Collectives
        if _uses_nccl(device):
            groups.append(_new_group("nccl", timeout))
            fabric = _Fabric(groups[1], device)
            data = NcclCollectives(fabric=fabric, device=device, **common)
        else:
            groups.append(_new_group("gloo", timeout))
            watched.append(channel(name=name or "data", mail=groups[1]))
            data = PeerCollectives(channel=watched[1], kernels=kernels)
        watchdog.watch(watched)
        return cls(
            data=data,
            control=control,
            watchdog=watchdog,
            ledger=ledger,
            groups=groups,
            watched=watched,
        )

    @property
    def workspace_bytes(self) -> int:
        """Bytes of buffers kept between calls; they stop growing once the largest call was seen."""
        return self._data.workspace_bytes + self._workspace.nbytes

    def use_kernels(self, kernels: KernelSet) -> None:
        """Sums and copies on the host go through `kernels` from now on."""
        self._data.use_kernels(kernels)

    def watch(self, at_rest: AtRest) -> None:
        """Finds ranks that wait for one another in different sequences, here and in groups beside this one.

        Args:
            at_rest: tells whether anything runs on this rank (`Backend.at_rest`).
        """
        if self._watchdog is not None:
            self._watchdog.look_at(at_rest)

    # ------------------------------------------------------------------ data

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch.distributed's name
        *,
        tag: int,
        label: str = "",
    ) -> None:
        """Averages this rank's shard over all ranks.

        The sum is in fp32 (fp64 for fp64), in rank order, then divided by the number of ranks and rounded once
        to the output's dtype.

        Args:
            output: [n], any floating dtype.
            input: [size, n] in the wire dtype, one row for each rank. May hold `output` as this rank's row.
            tag: number of the bucket or unit; has to agree over ranks.
            label: its name, for messages.
        """
        rows = self._rows(input, output.numel(), "input")
        self._data.reduce_scatter(
            _flat(output, "output"), rows, _call("reduce_scatter", rows, output, tag, label)
        )
        self._count("reduce_scatter", rows[0])

    def all_gather(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        *,
        tag: int,
        label: str = "",
    ) -> None:
        """Gathers every rank's shard.

        Args:
            output: [size, n], one row for each rank. May hold `input` as this rank's row.
            input: [n], same dtype.
            tag: number of the unit; has to agree over ranks.
            label: its name, for messages.
        """
        shard = _flat(input, "input")
        rows = self._rows(output, shard.numel(), "output")
        if rows.dtype != shard.dtype:
            raise ValueError(
                f"all_gather from {shard.dtype} to {rows.dtype}: give tensors of one dtype"
            )
        self._data.all_gather(rows, shard, _call("all_gather", shard, rows, tag, label))
        self._count("all_gather", shard)

    def all_reduce(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        *,
        tag: int,
        label: str = "",
    ) -> None:
        """Averages over all ranks, with the bits of `reduce_scatter` followed by `all_gather`.

        Args:
            output: [n], any floating dtype; may be `input` itself.
            input: [n] in the wire dtype, n padded to a multiple of the number of ranks.
            tag: number of the bucket; has to agree over ranks.
            label: its name, for messages.
        """
        if input.numel() % self.size or input.numel() != output.numel():
            raise ValueError(
                f"all_reduce of {input.numel()} into {output.numel()} elements over {self.size} "
                "ranks: pad both to the same multiple of the number of ranks"
            )
        rows = self._rows(input, input.numel() // self.size, "input")
        results = self._rows(output, rows.shape[1], "output")
        self._data.all_reduce(results, rows, _call("all_reduce", rows, results, tag, label))
        self._count("all_reduce", rows[0], results[0])

    def verify(self) -> None:
        """Waits until the headers of all data collectives issued have been checked.

        On gloo they are checked before bytes move. On NCCL a mismatch shows here at the latest; `exchange` calls it.

        Raises:
            CollectiveMismatchError: a rank issued another collective.
        """
        self._data.verify()

    # ------------------------------------------------------------------ control

    def exchange(self, payload: Tensor, *, label: str = "exchange") -> list[Tensor]:
        """Every rank's payload, in rank order.

        Args:
            payload: small CPU tensor, the same shape and dtype on every rank.
            label: what is exchanged, for messages.

        Returns:
            New tensors of the payload's shape and dtype.
        """
        self.verify()
        control = self._control
        if control is None:
            return [payload.clone()]
        # Every tensor operation costs microseconds here, so small payloads are handled as bytes.
        mine = payload.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        nbytes = len(mine)
        what = f"{_name(payload.dtype)}{tuple(payload.shape)}"
        call = Call(kind="exchange", numel=nbytes, dtypes=what, label=label)
        inline = nbytes <= control.inline_bytes
        rows = bytearray(self.size * nbytes or 1)
        rows[self.rank * nbytes : (self.rank + 1) * nbytes] = mine
        with control.collective(call, mine if inline else b""):
            if inline:
                for peer in control.peers:
                    rows[peer * nbytes : (peer + 1) * nbytes] = control.inline(peer, nbytes)
            else:
                table = torch.frombuffer(rows, dtype=torch.uint8).view(self.size, nbytes)
                control.share(table, table[self.rank])
        self._ledger.add("exchange", len(control.peers) * nbytes)
        self._count_headers(control.message_bytes - (nbytes if inline else 0))
        if nbytes == 0:
            return [payload.clone() for _ in range(self.size)]
        table = torch.frombuffer(rows, dtype=payload.dtype)
        return list(table.view(self.size, *payload.shape).unbind(0))

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrites the tensors on every rank with those of `source`, many in one message.

        Args:
            tensors: the same shapes and dtypes in the same order on every rank; any dtype, device and
                strides. Parameters are written without autograd.
            source: rank whose contents count.
        """
        control = self._control
        if not 0 <= source < self.size:
            raise ValueError(f"broadcast from rank {source}: there are ranks 0 to {self.size - 1}")
        if control is None or not tensors:
            return
        with torch.no_grad():
            sent = broadcast(control, tensors, source=source, workspace=self._workspace)
        self._ledger.add("broadcast", sent)
        self._count_headers(control.message_bytes)

    def barrier(self, *, label: str = "barrier") -> None:
        """Returns when every rank has called it."""
        self.verify()
        if self._control is not None:
            with self._control.collective(Call(kind="barrier", label=label)):
                pass
            self._count_headers(self._control.message_bytes)

    def close(self) -> None:
        """Destroys the groups made by `create` and frees the buffers. Local and idempotent."""
        if self._watchdog is not None:
            self._watchdog.unwatch(self._watched)
        while self._groups:
            group = self._groups.pop()
            # A program that ends torch.distributed before us has destroyed them already.
            with suppress(ValueError, AssertionError):
                dist.destroy_process_group(group)
        self._data.close()
        if self._control is not None:
            self._control.close()
        self._workspace.close()

    # ------------------------------------------------------------------ parts

    def _rows(self, tensor: Tensor, numel: int, what: str) -> Tensor:
        if tensor.numel() != self.size * numel or not tensor.is_contiguous():
            raise ValueError(
                f"{what} of shape {tuple(tensor.shape)} and strides {tensor.stride()}: needed are "
                f"{self.size} contiguous rows of {numel} elements"
            )
        return tensor.view(self.size, numel)

    def _count(self, key: str, *shards: Tensor) -> None:
        nbytes = sum(shard.numel() * shard.element_size() for shard in shards)
        self._ledger.add(key, (self.size - 1) * nbytes)
        self._count_headers(self._data.header_bytes)

    def _count_headers(self, nbytes: int) -> None:
        self._ledger.add("headers", (self.size - 1) * nbytes)


def _warn_if_launched() -> None:
    """Say that ranks which a launcher started train apart, where nobody joined them."""
    if dist.is_available() and not dist.is_initialized() and dist.is_torchelastic_launched():
        warnings.warn(
            "this process was started by torchrun, but torch.distributed is not initialised, so it trains alone: call "
            "torch.distributed.init_process_group() before building the engine",
            RuntimeWarning,
            stacklevel=5,
        )


def _gather_ranks(rank: int, size: int, timeout_seconds: float) -> None:
    """Waits in the store until every rank is here, so that a missing one is named."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("torch.distributed was shut down while the ranks gathered")
    store = world.get_group_store()
    turn = store.add(f"zero_plugin/turn/{rank}", 1)
    keys = [f"zero_plugin/here/{turn}/{other}" for other in range(size)]
    store.set(keys[rank], "1")
    try:
        store.wait(keys, timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise CollectiveTimeoutError(
            f"rank {rank} waited {timeout_seconds:g} s for rank(s) {missing} to set up the process "
            "groups: every rank has to create its engine, as often and in the same order"
        ) from error


def _first(*names: str) -> Callable[..., object]:
    """The first of these functions that this torch has."""
    found = [getattr(dist, name) for name in names if hasattr(dist, name)]
    return found[0]


def _new_group(backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """A group of all ranks of its own."""
    group = dist.new_group(backend=backend, timeout=timeout)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"torch.distributed made {group!r} instead of a {backend} process group")
    return group


def _uses_nccl(device: torch.device) -> bool:
    """Whether the default group serves the device through NCCL."""
    if device.type == "cpu":
        return False
    pairs = dict(part.split(":") for part in dist.get_backend_config().split(","))
    return pairs.get(device.type) == "nccl"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _call(kind: Kind, wire: Tensor, output: Tensor, tag: int, label: str) -> Call:
    dtypes = _name(wire.dtype)
    if output.dtype != wire.dtype:
        dtypes += f" to {_name(output.dtype)}"
    return Call(kind=kind, tag=tag, numel=wire.shape[-1], dtypes=dtypes, label=label)


def _flat(tensor: Tensor, what: str) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"{what} has strides {tensor.stride()}: give a contiguous tensor")
    return tensor.view(-1)
