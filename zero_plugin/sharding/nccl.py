"""Collectives enqueued on a device's own fabric, with headers checked behind them.

Nothing here waits for the device: headers are gathered ahead of each collective on the same communicator and copied to
host memory, and the host looks at them when they have arrived. A rank that disagrees may therefore have mixed
bytes on the device; `verify` runs before every exchange of flags, and so before any weight is published.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zero_plugin.errors import CollectiveMismatchError, CollectiveTimeoutError
from zero_plugin.runtime.operations import KernelSet
from zero_plugin.sharding.header import COMPARED_BYTES, HEADER_BYTES, Call, mismatch_text, unpack

RING = 64
"""Headers that may be on their way at once; the next one waits."""
_POLL_SECONDS = 0.0005


class Event(Protocol):
    """A place in a device's stream of work."""

    def record(self) -> None:
        """Marks the current place."""
        ...

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...


class Fabric(Protocol):
    """Collectives on the current stream, every rank in the same order."""

    def gather(self, output: Tensor, shard: Tensor) -> None:
        """Sets output [size, n] to every rank's shard [n]."""
        ...

    def mean(self, output: Tensor, rows: Tensor) -> None:
        """Sets output [n] to the mean over ranks of their rows[rank]."""
        ...

    def event(self) -> Event:
        """A new event of the device."""
        ...


class _Expected(NamedTuple):
    """A header exchange whose result has not been looked at yet."""

    call: Call
    sequence: int
    slot: int
    event: Event


class NcclCollectives:
    """Collectives of the tensors of one device; see the module's docstring.

    Sums are the backend's: their order depends on its algorithm, and a 16-bit wire is summed in 16 bits.

    Args:
        fabric: carries all data collectives, on one communicator.
        rank: this rank.
        size: number of ranks.
        device: where the tensors are.
        timeout_seconds: longest wait for headers.
    """

    header_bytes = HEADER_BYTES

    def __init__(
        self,
        *,
        fabric: Fabric,
        rank: int,
        size: int,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        self._fabric = fabric
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._sequence = 0
        self._expected: deque[_Expected] = deque()
        self._scratch: dict[torch.dtype, Tensor] = {}
        pinned = device.type != "cpu"
        shape = (RING, size, HEADER_BYTES)
        self._sent = torch.zeros(RING, HEADER_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self._received = torch.zeros(shape, dtype=torch.uint8, pin_memory=pinned)
        self._device_sent = torch.zeros(RING, HEADER_BYTES, dtype=torch.uint8, device=device)
        self._device_received = torch.zeros(shape, dtype=torch.uint8, device=device)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory kept for shards whose wire and output dtypes differ."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._scratch.values())

    def use_kernels(self, kernels: KernelSet) -> None:
        """Changes nothing: everything runs on the device."""
        del kernels

    def reduce_scatter(self, output: Tensor, rows: Tensor, call: Call) -> None:
        """Sets output [n] to mean over ranks of their rows[rank]."""
        self._announce(call)
        self._reduce(output, rows)

    def all_gather(self, output: Tensor, shard: Tensor, call: Call) -> None:
        """Sets output [size, n] to every rank's shard [n]."""
        self._announce(call)
        self._fabric.gather(output, shard)

    def all_reduce(self, output: Tensor, rows: Tensor, call: Call) -> None:
        """Sets output [size, n] to mean over ranks of rows, by the two halves and so with their bits."""
        self._announce(call)
        self._reduce(output[self._rank], rows)
        self._fabric.gather(output, output[self._rank])

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
        self._fabric.mean(target, rows)
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
        self._check(until=limit if len(self._expected) == RING else None)
        slot = self._sequence % RING
        self._sequence += 1
        packed = bytearray(HEADER_BYTES)
        call.pack_into(packed, self._sequence)
        self._sent[slot].copy_(torch.frombuffer(packed, dtype=torch.uint8))
        self._device_sent[slot].copy_(self._sent[slot], non_blocking=True)
        received = self._device_received[slot]
        self._fabric.gather(received, self._device_sent[slot])
        self._received[slot].copy_(received, non_blocking=True)
        event = self._fabric.event()
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
                time.sleep(_POLL_SECONDS)
                continue
            self._expected.popleft()
            rows = [bytearray(row.numpy().tobytes()) for row in self._received[expected.slot]]
            if any(row[:COMPARED_BYTES] != rows[0][:COMPARED_BYTES] for row in rows):
                headers = {rank: unpack(row) for rank, row in enumerate(rows)}
                raise CollectiveMismatchError(mismatch_text("data", headers))
