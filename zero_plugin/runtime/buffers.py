"""Budgeted pools of equal slabs, and the leases by which they are used.

A pool is allocated once, at construction, and never grows. A lease owns one slab until it is
released; while an operation still works on the slab the lease refuses access, and a released slab
goes back to the pool when its last operation has ended.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from zero_plugin.errors import BudgetError, LeaseError
from zero_plugin.runtime.memory import PAGE, page_aligned, round_to_pages

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from zero_plugin.runtime.backend import Backend, Memory, Ticket


class LeaseState(Enum):
    """Who owns the slab; `LEASE_MOVES` lists which state may follow which."""

    HELD = "held"
    """The holder: it may read and write."""
    IN_FLIGHT = "in flight"
    """Operations that were submitted with the lease and have not ended."""
    RETURNING = "returning"
    """Released; operations have not ended, then the pool takes the slab."""
    RELEASED = "released"
    """The pool."""


LEASE_MOVES: Mapping[LeaseState, frozenset[LeaseState]] = {
    LeaseState.HELD: frozenset({LeaseState.IN_FLIGHT, LeaseState.RETURNING, LeaseState.RELEASED}),
    LeaseState.IN_FLIGHT: frozenset({LeaseState.HELD, LeaseState.RETURNING, LeaseState.RELEASED}),
    LeaseState.RETURNING: frozenset({LeaseState.RELEASED}),
    LeaseState.RELEASED: frozenset(),
}


class Lease:
    """One slab of a pool, for as long as its holder needs it.

    Attributes:
        holder: Who acquired it, for messages.
    """

    __slots__ = ("_buffer", "_lock", "_pool", "_state", "_tickets", "holder")

    def __init__(self, *, holder: str, pool: SlabPool, buffer: Tensor) -> None:
        self.holder = holder
        self._pool = pool
        self._lock = threading.Lock()
        self._buffer: Tensor | None = buffer
        self._tickets: list[Ticket[Any]] = []
        self._state = LeaseState.HELD

    def __repr__(self) -> str:
        return f"<Lease of pool {self._pool.name!r} held by {self.holder!r}, {self.state.value}>"

    @property
    def state(self) -> LeaseState:
        """The state now; asks the tickets."""
        with self._lock:
            return self._refresh()

    def tensor(self, dtype: torch.dtype, numel: int | None = None) -> Tensor:
        """The start of the slab as a one-dimensional tensor.

        Args:
            dtype: Element type of the view.
            numel: Number of elements; as many as fit when None.

        Raises:
            LeaseError: Operations still own the slab, the lease was released, or the slab is too
                small.
        """
        with self._lock:
            state = self._refresh()
            buffer = self._buffer
            if state is not LeaseState.HELD or buffer is None:
                raise LeaseError(self._refusal(state))
        size = dtype.itemsize
        if numel is None:
            numel = buffer.numel() // size
        if numel < 0 or numel * size > buffer.numel():
            raise LeaseError(
                f"{numel} elements of {dtype} ({numel * size} bytes) do not fit a slab of pool "
                f"{self._pool.name!r} ({buffer.numel()} bytes); raise {self._pool.setting!r}"
            )
        return buffer[: numel * size].view(dtype)

    def release(self, after: Ticket[Any] | Sequence[Ticket[Any]] | None = None) -> None:
        """Gives the slab back, at once or when operations have ended.

        The slab returns when `after` and every operation submitted with this lease have ended,
        well or not; the caller does not wait.

        Raises:
            LeaseError: The lease was already released.
        """
        tickets = _as_tickets(after)
        with self._lock:
            self._check_open()
            self._tickets.extend(tickets)
            self._move(LeaseState.RETURNING if self._unended() else LeaseState.RELEASED)
        self._pool.collect()

    def check_open(self) -> None:
        """Raises `LeaseError` when the lease was released."""
        with self._lock:
            self._check_open()

    def lend(self, ticket: Ticket[Any]) -> None:
        """An operation takes the slab until `ticket` ends. For lanes; see `Lane.submit`."""
        with self._lock:
            self._check_open()
            self._unended()
            self._tickets.append(ticket)
            if self._state is LeaseState.HELD:
                self._move(LeaseState.IN_FLIGHT)

    def _check_open(self) -> None:
        if self._refresh() in (LeaseState.RETURNING, LeaseState.RELEASED):
            raise LeaseError(self._refusal(self._state))

    def _refresh(self) -> LeaseState:
        if self._state is LeaseState.IN_FLIGHT and not self._unended():
            self._move(LeaseState.HELD)
        elif self._state is LeaseState.RETURNING and not self._unended():
            self._move(LeaseState.RELEASED)
        return self._state

    def _unended(self) -> bool:
        self._tickets = [ticket for ticket in self._tickets if not ticket.done]
        return bool(self._tickets)

    def _move(self, state: LeaseState) -> None:
        if state not in LEASE_MOVES[self._state]:
            raise LeaseError(
                f"lease of pool {self._pool.name!r} held by {self.holder!r} cannot go from "
                f"{self._state.value} to {state.value}"
            )
        self._state = state

    def _refusal(self, state: LeaseState) -> str:
        who = f"the lease of pool {self._pool.name!r} held by {self.holder!r}"
        if state is LeaseState.IN_FLIGHT:
            work = ", ".join(repr(ticket.label) for ticket in self._tickets)
            return f"{who} is in flight: {work} has not ended; wait for its ticket first"
        return f"{who} was already released; acquire a new one"

    # For the pool.

    def pending(self) -> list[Ticket[Any]]:
        """The tickets the slab still waits for."""
        with self._lock:
            self._unended()
            return list(self._tickets)

    def reclaim(self) -> Tensor | None:
        """The slab, when the lease has let go of it; once."""
        with self._lock:
            if self._refresh() is not LeaseState.RELEASED:
                return None
            buffer, self._buffer = self._buffer, None
            return buffer

    @property
    def last_sequence(self) -> int:
        """Place in program order of the last operation that the slab waits for; -1 for none."""
        return max((ticket.sequence for ticket in self.pending()), default=-1)

    def pass_on(self) -> tuple[Tensor, tuple[Ticket[Any], ...]] | None:
        """The slab and the operations that still use it, when the holder has let go of it; once."""
        with self._lock:
            if self._refresh() is not LeaseState.RETURNING or self._buffer is None:
                return None
            buffer, self._buffer = self._buffer, None
            tickets, self._tickets = tuple(self._tickets), []
            self._move(LeaseState.RELEASED)
            return buffer, tickets

    def revoke(self) -> None:
        """Takes the slab away whatever the state; the pool is closing."""
        with self._lock:
            self._buffer = None
            self._tickets = []
            self._state = LeaseState.RELEASED


class SlabPool:
    """A fixed number of slabs of one size, allocated here and never again.

    Args:
        name: Names the pool in errors.
        backend: Allocates the memory.
        slab_bytes: Usable bytes of a slab.
        slabs: How many.
        memory: "host" or "device".
        setting: The setting that bounds this pool, named in `BudgetError`.

    Attributes:
        nbytes: Bytes of memory the pool takes, page rounding included.
        whole: All slabs as one uint8 tensor, for whoever registers memory; empty once the pool is closed.
    """

    def __init__(
        self,
        *,
        name: str,
        backend: Backend,
        slab_bytes: int,
        slabs: int,
        memory: Memory,
        setting: str,
    ) -> None:
        if slab_bytes < 1 or slabs < 1:
            raise BudgetError(
                f"pool {name!r} was given {slabs} slabs of {slab_bytes} bytes; it needs at least "
                f"one of one byte; raise {setting!r}"
            )
        self.name = name
        self.setting = setting
        self.slab_bytes = slab_bytes
        self.slabs = slabs
        self.memory: Memory = memory
        self._backend = backend
        self._lock = threading.Lock()
        self._closed = False
        self._leases: list[Lease] = []
        self.whole = self._allocate()
        self._free = self._cut()
        for buffer in self._free:
            backend.retire(buffer)
        self.nbytes = round_to_pages(slab_bytes) * slabs

    def __repr__(self) -> str:
        return f"<SlabPool {self.name!r}, {self.slabs} x {self.slab_bytes} bytes of {self.memory}>"

    @property
    def free(self) -> int:
        """How many slabs can be acquired without waiting."""
        self.collect()
        with self._lock:
            return len(self._free)

    @property
    def next_free(self) -> float:
        """Place in program order of the operation that the next slab to come free waits for; infinity where all are held."""
        with self._lock:
            places = [
                lease.last_sequence
                for lease in self._leases
                if lease.state in (LeaseState.RETURNING, LeaseState.RELEASED)
            ]
        return min(places, default=math.inf)

    def acquire(self, holder: str) -> Lease:
        """A slab for `holder`; waits while a released one is still in use by an operation.

        The slab's content is undefined.

        Raises:
            BudgetError: Every slab is held and none of them has been released.
            LeaseError: The pool is closed.
        """
        while True:
            self.collect()
            with self._lock:
                if self._closed:
                    raise LeaseError(
                        f"{holder!r} asked a slab of pool {self.name!r}, which is closed"
                    )
                if self._free:
                    lease = Lease(holder=holder, pool=self, buffer=self._free.pop())
                    self._leases.append(lease)
                    return lease
                returning = [lease for lease in self._leases if lease.state is LeaseState.RETURNING]
                if not returning and not any(
                    lease.state is LeaseState.RELEASED for lease in self._leases
                ):
                    raise BudgetError(self._exhausted(holder))
            self._wait_for_one(returning)

    def acquire_after(self, holder: str) -> tuple[Lease, tuple[Ticket[Any], ...]]:
        """A slab for `holder` without waiting, and what must have ended before it is written to.

        Where no slab is free, the released one that is the first to come free in program order is handed on with the
        operations that still use it. For slabs that only lanes write to.

        Raises:
            BudgetError: Every slab is held and none of them has been released.
            LeaseError: The pool is closed.
        """
        while True:
            self.collect()
            with self._lock:
                returning = [lease for lease in self._leases if lease.state is LeaseState.RETURNING]
                if self._closed or self._free or not returning:
                    break
                oldest = min(returning, key=lambda lease: lease.last_sequence)
                found = oldest.pass_on()
                if found is None:
                    continue  # It has come back meanwhile.
                buffer, tickets = found
                self._leases.remove(oldest)
                lease = Lease(holder=holder, pool=self, buffer=buffer)
                self._leases.append(lease)
                return lease, tickets
        return self.acquire(holder), ()

    def collect(self) -> None:
        """Takes back the slabs of released leases whose operations have ended."""
        with self._lock:
            kept: list[Lease] = []
            for lease in self._leases:
                buffer = lease.reclaim()
                if buffer is None:
                    kept.append(lease)
                else:
                    self._backend.retire(buffer)
                    self._free.append(buffer)
            self._leases = kept

    def take_back(self) -> None:
        """Takes back what was never released, after an interrupt that came between a holder's getting a slab and noting it.

        For pools whose holders let go within a step, when that step is given up and nothing runs any more.
        """
        with self._lock:
            leases = list(self._leases)
        for lease in leases:
            if lease.state in (LeaseState.HELD, LeaseState.IN_FLIGHT):
                lease.release()

    def close(self) -> None:
        """Waits for operations on the slabs, frees the memory and refuses what comes later.

        May be called again.

        Raises:
            LeaseError: Some leases were not released; they are named, and revoked.
        """
        with self._lock:
            leases = list(self._leases)
        for lease in leases:
            for ticket in lease.pending():
                ticket.settle()
        self.collect()
        with self._lock:
            self._closed = True
            unreturned, self._leases = self._leases, []
            self._free = []
            self.whole = self.whole[:0].clone()
        for lease in unreturned:
            lease.revoke()
        if unreturned:
            raise LeaseError(
                f"pool {self.name!r} was closed while {_holders(unreturned)} had not released "
                "their leases; release every lease first"
            )

    def _allocate(self) -> Tensor:
        stride = round_to_pages(self.slab_bytes)
        memory = self._backend.allocate(stride * self.slabs, self.memory)
        if memory.is_cpu and memory.data_ptr() % PAGE:
            memory = page_aligned(self._backend.allocate(stride * self.slabs + PAGE, self.memory))
            memory = memory[: stride * self.slabs]
        return memory

    def _cut(self) -> list[Tensor]:
        stride = round_to_pages(self.slab_bytes)
        return [
            self.whole[place * stride : place * stride + self.slab_bytes]
            for place in reversed(range(self.slabs))
        ]

    def _exhausted(self, holder: str) -> str:
        return (
            f"{holder!r} asked a slab of pool {self.name!r}, but all {self.slabs} of "
            f"{self.slab_bytes} bytes are held, by {_holders(self._leases)}, and none was released; "
            f"raise {self.setting!r} or release one first"
        )

    @staticmethod
    def _wait_for_one(returning: list[Lease]) -> None:
        """Blocks until the lease that can return first, in program order, has."""
        pending = [tickets for lease in returning if (tickets := lease.pending())]
        if len(pending) < len(returning) or not pending:
            return  # One has returned meanwhile.
        for ticket in min(pending, key=lambda tickets: max(t.sequence for t in tickets)):
            ticket.settle()


def _holders(leases: Sequence[Lease]) -> str:
    counts = Counter(lease.holder for lease in leases)
    return ", ".join(
        repr(holder) if count == 1 else f"{holder!r} ({count})" for holder, count in counts.items()
    )


def _as_tickets(after: Ticket[Any] | Sequence[Ticket[Any]] | None) -> Sequence[Ticket[Any]]:
    if after is None:
        return ()
    return after if isinstance(after, Sequence) else (after,)
