"""The ranks that share the model states, and the collectives between them.

The only file that imports `torch.distributed`. A `ProcessGroup` makes process groups of its own: one sequence
("data") for the collectives on gradients and weights, issued from one lane, and one ("control") for the small
exchanges of the main thread. The default group carries none of our bytes and is never destroyed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zero_plugin.errors import CollectiveMismatchError, CollectiveTimeoutError
from zero_plugin.runtime.operations import KernelSet, copy_tensor
from zero_plugin.sharding.channel import Channel
from zero_plugin.sharding.header import COMPARED_BYTES, HEADER_BYTES, Call, Kind, mismatch_text, unpack
from zero_plugin.sharding.peer import PeerCollectives, Workspace, broadcast
from zero_plugin.sharding.watchdog import Watchdog
from zero_plugin.trace import Ledger

INLINE_BYTES = 384
LEDGER_EXTRAS = ("headers", "exchange", "broadcast")
_RING = 64


class Collectives(Protocol):
    """How the data collectives run: alone, between peers, or on NCCL."""

    @property
    def workspace_bytes(self) -> int: ...
    @property
    def header_bytes(self) -> int: ...
    def use_kernels(self, kernels: KernelSet) -> None: ...
    def reduce_scatter(self, output: Tensor, rows: Tensor, call: Call) -> None: ...
    def all_gather(self, output: Tensor, shard: Tensor, call: Call) -> None: ...
    def all_reduce(self, output: Tensor, rows: Tensor, call: Call) -> None: ...
    def verify(self) -> None: ...
    def close(self) -> None: ...


class SoloCollectives:
    """One rank: a mean over it is a copy, and nothing is sent."""

    workspace_bytes = 0
    header_bytes = 0

    def __init__(self, kernels: KernelSet | None) -> None:
        self._kernels = kernels

    def use_kernels(self, kernels: KernelSet) -> None:
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


class Event(Protocol):
    """A place in a device's stream of work."""

    def record(self) -> None: ...
    def query(self) -> bool: ...


class _Expected(NamedTuple):
    """A header exchange whose result has not been looked at yet."""

    call: Call
    sequence: int
    slot: int
    event: Event


class NcclCollectives:
    """Collectives on a device's own fabric, enqueued on the current stream.

    Headers are gathered ahead of each collective on the same communicator and copied to host memory; the host looks
    at them when they have arrived, at the latest in `verify`, which runs before an exchange of flags and
    so before any weight changes. Sums are the backend's: their order depends on its algorithm, and a 16-bit wire
    is summed in 16 bits.

    Args:
        group: the one communicator of all data collectives.
        device: where the tensors are.
        timeout_seconds: longest wait for headers.
        event: makes an event of the device.
        average: the backend's mean.
    """

    header_bytes = HEADER_BYTES

    def __init__(
        self,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout_seconds: float,
        event: Callable[[], Event],
        average: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG,
    ) -> None:
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        self._timeout_seconds = timeout_seconds
        self._event = event
        self._average = average
        self._sequence = 0
        self._expected: deque[_Expected] = deque()
        self._scratch: dict[torch.dtype, Tensor] = {}
        pinned = device.type != "cpu"
        shape = (_RING, self._size, HEADER_BYTES)
        self._sent = torch.zeros(_RING, HEADER_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self._received = torch.zeros(shape, dtype=torch.uint8, pin_memory=pinned)
        self._device_sent = torch.zeros(_RING, HEADER_BYTES, dtype=torch.uint8, device=device)
        self._device_received = torch.zeros(shape, dtype=torch.uint8, device=device)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory kept for shards whose wire and output dtypes differ."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._scratch.values())

    def use_kernels(self, kernels: KernelSet) -> None:
        del kernels  # Everything runs on the device.

    def reduce_scatter(self, output: Tensor, rows: Tensor, call: Call) -> None:
        """output [n] = mean over ranks of their rows[rank]."""
        self._announce(call)
        self._reduce(output, rows)

    def all_gather(self, output: Tensor, shard: Tensor, call: Call) -> None:
        """output [size, n] = every rank's shard [n]."""
        self._announce(call)
        dist.all_gather_into_tensor(output, shard, group=self._group)

    def all_reduce(self, output: Tensor, rows: Tensor, call: Call) -> None:
        """output [size, n] = mean over ranks of rows, by the two halves and so with their bits."""
        self._announce(call)
        self._reduce(output[self._rank], rows)
        dist.all_gather_into_tensor(output, output[self._rank], group=self._group)

    def verify(self) -> None:
        """Waits for every header on its way and checks it.

        Raises:
            CollectiveMismatchError: a rank issued another collective.
            CollectiveTimeoutError: headers have not arrived within the timeout.
        """
        self._check(until=time.monotonic() + self._timeout_seconds)

    def close(self) -> None:
        """Forgets the headers on their way and frees the scratch."""
        self._expected.clear()
        self._scratch.clear()

    def _reduce(self, output: Tensor, rows: Tensor) -> None:
        target = output if output.dtype == rows.dtype else self._take(rows.dtype, output)
        dist.reduce_scatter_tensor(target, rows, op=self._average, group=self._group)
        if target is not output:
            output.copy_(target)

    def _take(self, dtype: torch.dtype, like: Tensor) -> Tensor:
        buffer = self._scratch.get(dtype)
        if buffer is None or buffer.numel() < like.numel():
            buffer = self._scratch[dtype] = torch.empty(
                like.numel(), dtype=dtype, device=like.device
            )
        return buffer[: like.numel()]

    def _announce(self, call: Call) -> None:
        """Enqueues the exchange of headers, and looks at those that have arrived."""
        limit = time.monotonic() + self._timeout_seconds
        self._check(until=limit if len(self._expected) == _RING else None)
        slot = self._sequence % _RING
        self._sequence += 1
        packed = bytearray(HEADER_BYTES)
        call.pack_into(packed, self._sequence)
        self._sent[slot].copy_(torch.frombuffer(packed, dtype=torch.uint8))
        self._device_sent[slot].copy_(self._sent[slot], non_blocking=True)
        received = self._device_received[slot]
        dist.all_gather_into_tensor(received, self._device_sent[slot], group=self._group)
        self._received[slot].copy_(received, non_blocking=True)
        event = self._event()
        event.record()
        self._expected.append(_Expected(call, self._sequence, slot, event))

    def _check(self, *, until: float | None) -> None:
        """Looks at headers in order; waits for those still on their way if `until` is given."""
        while self._expected:
            expected = self._expected[0]
            if not expected.event.query():
                if until is None:
                    return
                if time.monotonic() > until:
                    raise CollectiveTimeoutError(
                        f"rank {self._rank} waited {self._timeout_seconds:g} s for the headers of "
                        f"data #{expected.sequence} {expected.call.text}; look for the first error "
                        "in the other ranks' output, or raise ZeroConfig(timeout_seconds=...)"
                    )
                time.sleep(0.0005)
                continue
            self._expected.popleft()
            rows = [bytearray(row.numpy()) for row in self._received[expected.slot]]
            if any(row[:COMPARED_BYTES] != rows[0][:COMPARED_BYTES] for row in rows):
                headers = {rank: unpack(row) for rank, row in enumerate(rows)}
                raise CollectiveMismatchError(mismatch_text("data", headers))


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
    ) -> None:
        self.rank = control.rank if control else 0
        self.size = control.size if control else 1
        self._data = data
        self._control = control
        self._watchdog = watchdog
        self._ledger = ledger
        self._groups = list(groups)
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
    ) -> ProcessGroup:
        """Joins the ranks of the initialised default group; alone when there is none.

        A collective: every rank has to call it. Tensors of a CUDA device travel over NCCL where the default
        group does, else over gloo through host memory.

        Args:
            device: where the tensors of the data collectives live.
            ledger: counts the bytes this rank sends.
            timeout_seconds: longest wait for another rank.
            kernels: does sums and copies on the host; None: plain torch, with the same bits.

        Raises:
            CollectiveTimeoutError: a rank did not call it within the timeout.
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            solo = SoloCollectives(kernels)
            return cls(data=solo, control=None, watchdog=None, ledger=ledger)
        rank, size = dist.get_rank(), dist.get_world_size()
        _gather_ranks(rank, size, timeout_seconds)
        timeout = timedelta(seconds=timeout_seconds)
        groups = [dist.new_group(backend="gloo", timeout=timeout)]
        watchdog = Watchdog(store=groups[0].get_group_store(), rank=rank, size=size)

        def channel(name: str, group: dist.ProcessGroup, inline_bytes: int) -> Channel:
            return Channel(
                name=name,
                mail=group,
                rank=rank,
                size=size,
                timeout_seconds=timeout_seconds,
                watchdog=watchdog,
                inline_bytes=inline_bytes,
            )

        control = channel("control", groups[0], INLINE_BYTES)
        watched = [control]
        data: Collectives
        if _uses_nccl(device):
            groups.append(dist.new_group(backend="nccl", timeout=timeout))
            data = NcclCollectives(
                group=groups[1],
                device=device,
                timeout_seconds=timeout_seconds,
                event=lambda: torch.Event(device),
            )
        else:
            groups.append(dist.new_group(backend="gloo", timeout=timeout))
            watched.append(channel("data", groups[1], 0))
            data = PeerCollectives(channel=watched[1], kernels=kernels)
        watchdog.start(watched)
        return cls(data=data, control=control, watchdog=watchdog, ledger=ledger, groups=groups)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of buffers kept between calls; they stop growing once the largest call was seen."""
        return self._data.workspace_bytes + self._workspace.nbytes

    def use_kernels(self, kernels: KernelSet) -> None:
        """Sums and copies on the host go through `kernels` from now on."""
        self._data.use_kernels(kernels)

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
        mine = payload.contiguous().view(-1).view(torch.uint8)
        nbytes = mine.numel()
        what = f"{_name(payload.dtype)}{tuple(payload.shape)}"
        call = Call(kind="exchange", numel=nbytes, dtypes=what, label=label)
        result = torch.empty((self.size, nbytes), dtype=torch.uint8)
        result[self.rank].copy_(mine)
        if nbytes <= control.inline_bytes:
            with control.collective(call, memoryview(mine.numpy())):
                for peer in control.peers:
                    memoryview(result[peer].numpy())[:] = control.inline(peer, nbytes)
        else:
            with control.collective(call):
                receives = [control.receive(peer, result[peer]) for peer in control.peers]
                sends = [control.send(peer, mine) for peer in control.peers]
                control.finish([*receives, *sends])
        self._ledger.add("exchange", len(control.peers) * nbytes)
        self._count_headers(control.message_bytes - min(nbytes, control.inline_bytes))
        return [row.view(payload.dtype).view(payload.shape) for row in result]

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
            self._watchdog.close()
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
