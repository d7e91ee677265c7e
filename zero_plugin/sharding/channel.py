"""One sequence of collectives over point-to-point messages, with a header before the bytes.

A channel knows nothing of torch.distributed: it is given something that sends and receives tensors
(`sharding.group` gives it a gloo group of its own). A gloo receive of the wrong size ends the whole process, so
headers have a fixed size and travel under a tag of their own, and nothing else is received before they agree.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from zero_plugin.errors import CollectiveMismatchError, CollectiveTimeoutError, EngineStateError
from zero_plugin.sharding.header import (
    COMPARED_BYTES,
    HEADER_BYTES,
    Call,
    Header,
    mismatch_text,
    unpack,
)
from zero_plugin.sharding.watchdog import Failure, Place, Report, Watchdog

_HEADER_TAG = 1
_BYTES_TAG = 2
_INTERRUPT_TAG = 3
# After the first header that disagrees: how long the other headers are waited for, to name all.
_GRACE_SECONDS = 1.0
_MOMENT = timedelta(milliseconds=1)
# gloo's words for a wait of this process that ended, or was ended by `interrupt`; any other error is the peer's.
_OWN_TIMEOUTS = ("Timed out", "Application timeout")


class Work(Protocol):
    """A message on its way."""

    def wait(self, timeout: timedelta) -> bool:
        """Blocks until done; raises `RuntimeError` when the time is over or the peer is gone."""
        ...


class Mail(Protocol):
    """Point-to-point messages between ranks."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work:
        """Starts to send one tensor."""
        ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work:
        """Starts to fill one tensor."""
        ...


class Pending(NamedTuple):
    """A message under way, with the tensor it reads or fills kept alive."""

    work: Work
    peer: int
    incoming: bool
    tensor: Tensor


class _Waiting(NamedTuple):
    """The collective this rank is in."""

    call: Call
    since: float
    thread: int


class Channel:
    """A sequence of collectives in which every rank takes part; one thread at a time.

    Args:
        name: for messages ("data", "control").
        mail: carries the messages; used by this channel alone.
        rank: this rank.
        size: number of ranks, at least 2.
        timeout_seconds: longest wait for a peer.
        watchdog: tells and asks the other ranks when something goes wrong.
        inline_bytes: room in the header's message for bytes that travel with it.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        name: str,
        mail: Mail,
        rank: int,
        size: int,
        timeout_seconds: float,
        watchdog: Watchdog,
        inline_bytes: int = 0,
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.peers = tuple(peer for peer in range(size) if peer != rank)
        self.inline_bytes = inline_bytes
        self.message_bytes = HEADER_BYTES + inline_bytes
        self._mail: Mail | None = mail
        self._timeout_seconds = timeout_seconds
        self._watchdog = watchdog
        self._lock = threading.Lock()
        self._sequence = 0
        self._waiting: _Waiting | None = None
        self._broken = ""
        self._pending: list[Pending] = []
        self._outgoing = bytearray(self.message_bytes)
        self._incoming = {peer: bytearray(self.message_bytes) for peer in self.peers}
        self._outgoing_tensor = torch.frombuffer(self._outgoing, dtype=torch.uint8)
        self._incoming_tensors = {
            peer: torch.frombuffer(buffer, dtype=torch.uint8)
            for peer, buffer in self._incoming.items()
        }

    # ------------------------------------------------------------------ the sequence

    @contextmanager
    def collective(self, call: Call, inline: bytes = b"") -> Generator[None]:
        """Enters the next collective of the sequence: on entry all ranks' headers agree.

        Args:
            call: what this rank does.
            inline: bytes that travel with the header, at most `inline_bytes`.

        Raises:
            CollectiveMismatchError: a rank does something else.
            CollectiveTimeoutError: a rank has not come within the timeout, or is gone.
            EngineStateError: the channel is closed, or an earlier collective failed.
        """
        with self._lock:
            if self._broken:
                raise EngineStateError(
                    f"{call.text} cannot run: {self._broken}; close this engine and start the "
                    "processes again"
                )
            self._sequence += 1
            self._waiting = _Waiting(call, time.monotonic(), threading.get_ident())
            try:
                self._meet(call, inline)
                yield
            except BaseException as error:
                self._broken = f"an earlier collective failed ({type(error).__name__}: {error})"
                raise
            finally:
                self._waiting = None
            self._pending.clear()

    def inline(self, peer: int, nbytes: int) -> bytearray:
        """The bytes that came with a peer's header."""
        return self._incoming[peer][HEADER_BYTES : HEADER_BYTES + nbytes]

    def share(self, rows: Tensor, shard: Tensor) -> None:
        """Fills every other rank's row of `rows` with its shard; this rank's row is the caller's."""
        receives = [self.receive(peer, rows[peer]) for peer in self.peers]
        sends = [self.send(peer, shard) for peer in self.peers]
        self.finish(receives)
        self.finish(sends)

    def send(self, peer: int, tensor: Tensor) -> Pending:
        """Starts to send a contiguous CPU tensor, which must not change until it is finished."""
        return self._post(peer, tensor, _BYTES_TAG, incoming=False)

    def receive(self, peer: int, tensor: Tensor) -> Pending:
        """Starts to fill a contiguous CPU tensor."""
        return self._post(peer, tensor, _BYTES_TAG, incoming=True)

    def finish(self, messages: Iterable[Pending]) -> None:
        """Waits for every message, each at most the timeout.

        Raises:
            CollectiveTimeoutError: a peer stopped in the middle.
        """
        for message in messages:
            self._finish(message, time.monotonic() + self._timeout_seconds)

    def close(self) -> None:
        """Lets go of the messages' carrier. Idempotent."""
        self._broken = self._broken or "the group is closed"
        self._mail = None
        self._pending.clear()

    # ------------------------------------------------------------------ for the watchdog

    @property
    def come(self) -> int:
        """How many collectives this rank has come to."""
        return self._sequence

    def waiting(self) -> Place | None:
        """What this rank is in, or None."""
        waiting = self._waiting
        if waiting is None:
            return None
        return Place(f"#{self._sequence} {waiting.call.text}", waiting.since, waiting.thread)

    def absent(self) -> tuple[int, ...]:
        """Peers that have not come to the collective this rank waits in; none where it waits in none."""
        if self._waiting is None:
            return ()
        return tuple(peer for peer in self.peers if self._header(peer) is None)

    def disagreeing(self) -> tuple[int, ...]:
        """Peers that have come to another collective than the one this rank waits in.

        May be read while a header arrives, so an answer counts only when it is given twice.
        """
        if self._waiting is None:
            return ()
        return tuple(
            peer for peer in self.peers if self._header(peer) is not None and not self._agrees(peer)
        )

    def interrupt(self) -> None:
        """Ends the wait in progress with an error.

        gloo offers no way to cancel a wait, but a wait that times out closes the whole context.
        """
        mail = self._mail
        if mail is not None:
            with suppress(RuntimeError):
                mail.recv(
                    [torch.empty(1, dtype=torch.uint8, device="cpu")], self.peers[0], _INTERRUPT_TAG
                ).wait(_MOMENT)

    # ------------------------------------------------------------------ headers

    def _meet(self, call: Call, inline: bytes) -> None:
        call.pack_into(self._outgoing, self._sequence)
        self._outgoing[HEADER_BYTES : HEADER_BYTES + len(inline)] = inline
        receives = [
            self._post(peer, self._incoming_tensors[peer], _HEADER_TAG, incoming=True)
            for peer in self.peers
        ]
        sends = [
            self._post(peer, self._outgoing_tensor, _HEADER_TAG, incoming=False)
            for peer in self.peers
        ]
        deadline = time.monotonic() + self._timeout_seconds
        for message in receives:
            self._finish(message, deadline)
            if not self._agrees(message.peer):
                self._collect([*receives, *sends])
                self._refuse(call)
        for message in sends:
            self._finish(message, deadline)

    def _agrees(self, peer: int) -> bool:
        return self._incoming[peer][:COMPARED_BYTES] == self._outgoing[:COMPARED_BYTES]

    def _collect(self, messages: Sequence[Pending]) -> None:
        """Gives the other headers a little time, so that the message can name all."""
        deadline = time.monotonic() + _GRACE_SECONDS
        for message in messages:
            with suppress(RuntimeError):
                message.work.wait(_until(deadline))

    def _refuse(self, call: Call) -> NoReturn:
        """Tells the others what every rank is in, and raises."""
        headers: dict[int, Header | None] = {peer: self._header(peer) for peer in self.peers}
        headers[self.rank] = Header(sequence=self._sequence, call=call)
        text = mismatch_text(self.name, headers)
        self._watchdog.post_failure("mismatch", text)
        raise CollectiveMismatchError(text)

    def _header(self, peer: int) -> Header | None:
        """The peer's header of this collective, None when it has not come."""
        header = unpack(self._incoming[peer])
        return header if header and header.sequence >= self._sequence else None

    # ------------------------------------------------------------------ messages and their failures

    def _post(self, peer: int, tensor: Tensor, tag: int, *, incoming: bool) -> Pending:
        mail = self._mail
        if mail is None:
            raise EngineStateError(
                f"the {self.name} group was closed in the middle of a collective"
            )
        try:
            work = (mail.recv if incoming else mail.send)([tensor], peer, tag)
        except RuntimeError as error:
            self._lost(peer, error)
        message = Pending(work, peer, incoming, tensor)
        # Kept until the collective has ended well: after a failure gloo may still write here.
        self._pending.append(message)
        return message

    def _finish(self, message: Pending, deadline: float) -> None:
        try:
            message.work.wait(_until(deadline))
        except RuntimeError as error:
            self._lost(message.peer, error)

    def _lost(self, peer: int, error: RuntimeError) -> NoReturn:
        """Finds out which ranks are missing and why, tells the others, and raises."""
        if self._waiting is not None and self.disagreeing():
            self._refuse(self._waiting.call)
        standstill = self._watchdog.standstill
        if standstill:
            self._watchdog.post_failure("mismatch", standstill)
            raise CollectiveMismatchError(standstill) from error
        gave_up = any(words in str(error) for words in _OWN_TIMEOUTS)
        closed = set[int]() if gave_up else {peer}
        foreign = self._watchdog.failure
        report = self._watchdog.report(suspects=sorted(closed))
        failures = dict(report.failures)
        if foreign is not None:
            failures.setdefault(foreign.rank, foreign)
        text = self._missing_text(peer, closed, failures, report)
        disagreed = [failure for failure in failures.values() if failure.kind == "mismatch"]
        if disagreed:
            text = f"rank {disagreed[0].rank} found that {disagreed[0].text}\n{text}"
        self._watchdog.post_failure("mismatch" if disagreed else "timeout", text.splitlines()[0])
        raise (CollectiveMismatchError if disagreed else CollectiveTimeoutError)(text) from error

    def _missing_text(
        self, peer: int, closed: set[int], failures: dict[int, Failure], report: Report
    ) -> str:
        waiting = self._waiting
        what, since = (waiting.call.text, waiting.since) if waiting else ("a collective", 0.0)
        absent = [other for other in self.peers if self._header(other) is None] or [peer]
        names = ", ".join(f"rank {other}" for other in absent)
        lines = [
            f"rank {self.rank} waited {time.monotonic() - since:.1f} s in {self.name} "
            f"#{self._sequence} {what} for {names}:"
        ]
        for other in self.peers:
            parts = [self._progress(other)]
            if other in failures:
                parts.append(f"gave up: {failures[other].text.splitlines()[0].rstrip(':')}")
            elif other in closed:
                parts.append("closed its connection: its process ended or was killed")
            place = report.places.get(other)
            if place is not None and self._header_text(other) not in place:
                parts.append(place)
            lines.append(f"  rank {other}: {'; '.join(parts)}")
        lines.append(
            f"Look for the first error in the output of {names}. If it is only slow, raise "
            f"ZeroConfig(timeout_seconds=...), now {self._timeout_seconds:g}."
        )
        return "\n".join(lines)

    def _header_text(self, peer: int) -> str:
        header = unpack(self._incoming[peer])
        return header.text if header else "nothing"

    def _progress(self, peer: int) -> str:
        header = unpack(self._incoming[peer])
        if header is None:
            return f"has not come to any {self.name} collective"
        if header.sequence >= self._sequence:
            return f"came to {header.text}"
        return f"last came to {header.text}"


def _until(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))
