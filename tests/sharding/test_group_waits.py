"""Every wait of a collective matters: a mail that reads the sender's bytes late, and NaN where nothing has arrived.

Both ranks live in this process, one on a thread. A send reads its tensor a while after it was posted, so a sender that
does not wait sends what it has overwritten since; a receive poisons its buffer at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from zero_plugin.errors import CollectiveTimeoutError, ZeroError
from zero_plugin.sharding import peer
from zero_plugin.sharding.channel import Channel, Pending
from zero_plugin.sharding.header import HEADER_BYTES, Call, Header, mismatch_text, unpack
from zero_plugin.sharding.peer import PeerCollectives, Workspace, broadcast
from zero_plugin.sharding.watchdog import Report

TIMEOUT = 4.0
DELAYS = (0.05, 0.01)  # seconds, by rank


class Slot:
    """One message between two ranks."""

    def __init__(self) -> None:
        self.target: Tensor | None = None
        self.posted = threading.Event()
        self.delivered = threading.Event()


@dataclass
class Post:
    """The slots of every direction and tag, in order."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    slots: dict[tuple[int, int, int, int], Slot] = field(default_factory=dict)

    def slot(self, sender: int, receiver: int, tag: int, number: int) -> Slot:
        with self.lock:
            return self.slots.setdefault((sender, receiver, tag, number), Slot())


class LateSend:
    def __init__(self, slot: Slot, tensor: Tensor, delay: float) -> None:
        self.slot, self.tensor = slot, tensor
        threading.Timer(delay, self.deliver).start()

    def deliver(self) -> None:
        if self.slot.posted.wait(TIMEOUT) and self.slot.target is not None:
            self.slot.target.copy_(self.tensor)
            self.slot.delivered.set()

    def wait(self, timeout: timedelta) -> bool:
        if not self.slot.delivered.wait(timeout.total_seconds()):
            raise RuntimeError("Timed out waiting for send")
        return True


class Receive:
    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def wait(self, timeout: timedelta) -> bool:
        if not self.slot.delivered.wait(timeout.total_seconds()):
            raise RuntimeError("Timed out waiting for recv")
        return True


class LateMail:
    def __init__(self, post: Post, rank: int) -> None:
        self.post, self.rank = post, rank
        self.numbers: dict[tuple[bool, int, int], int] = {}

    def next(self, incoming: bool, other: int, tag: int) -> int:
        key = incoming, other, tag
        self.numbers[key] = self.numbers.get(key, -1) + 1
        return self.numbers[key]

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> LateSend:
        slot = self.post.slot(self.rank, peer, tag, self.next(False, peer, tag))
        return LateSend(slot, tensors[0], DELAYS[self.rank])

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Receive:
        slot = self.post.slot(peer, self.rank, tag, self.next(True, peer, tag))
        tensors[0].fill_(float("nan") if tensors[0].is_floating_point() else 0)
        slot.target = tensors[0]
        slot.posted.set()
        return Receive(slot)


class QuietWatchdog:
    failure = None
    standstill = ""

    def post_failure(self, kind: str, text: str) -> None:
        pass

    def report(self, suspects: Iterable[int] = ()) -> Report:
        return Report()


class SkipsSends(Channel):
    def finish(self, messages: Iterable[Pending]) -> None:
        super().finish([message for message in messages if message.incoming])


class SkipsReceives(Channel):
    def finish(self, messages: Iterable[Pending]) -> None:
        super().finish([message for message in messages if not message.incoming])


class SkipsHeaders(Channel):
    def _finish(self, message: Pending, deadline: float) -> None:
        if message.tensor.numel() != HEADER_BYTES or message.incoming:
            super()._finish(message, deadline)


def on_both(kind: type[Channel], action: Callable[[Channel], Any]) -> list[Any]:
    post = Post()

    def rank(number: int) -> Any:
        watchdog: Any = QuietWatchdog()
        channel = kind(
            name="data",
            mail=LateMail(post, number),
            rank=number,
            size=2,
            timeout_seconds=TIMEOUT,
            watchdog=watchdog,
        )
        return action(channel)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


# Two pieces, both posted at once: with a third the ranks would wait for each other anyway.
def reduce_scatter(channel: Channel) -> bool:
    rows = torch.arange(3000.0).view(2, 1500) * (channel.rank + 1)
    output = torch.empty(1500)
    data = PeerCollectives(channel=channel, kernels=None)
    data.reduce_scatter(output, rows, Call(kind="reduce_scatter"))
    rows.fill_(float("nan"))
    return torch.equal(output, torch.arange(3000.0).view(2, 1500)[channel.rank] * 1.5)


def all_gather(channel: Channel) -> bool:
    shard = torch.full((3000,), channel.rank + 1.0)
    output = torch.empty(2, 3000)
    data = PeerCollectives(channel=channel, kernels=None)
    data.all_gather(output, shard, Call(kind="all_gather"))
    shard.fill_(float("nan"))
    return torch.equal(output, torch.tensor([[1.0], [2.0]]).expand(2, 3000))


def all_reduce(channel: Channel) -> bool:
    rows = torch.arange(3000.0).view(2, 1500) * (channel.rank + 1)
    expected = torch.arange(3000.0).view(2, 1500) * 1.5
    data = PeerCollectives(channel=channel, kernels=None)
    data.all_reduce(rows, rows, Call(kind="all_reduce"))
    return torch.equal(rows, expected)


def broadcasts(channel: Channel) -> bool:
    tensors = [torch.full((700,), channel.rank + 1.0), torch.full((3000,), channel.rank + 1.0)]
    broadcast(channel, tensors, source=0, workspace=Workspace())
    result = all(bool((tensor == 1.0).all()) for tensor in tensors)
    for tensor in tensors:
        tensor.fill_(float("nan"))
    return result


def barriers(channel: Channel) -> bool:
    for tag in range(3):
        with channel.collective(Call(kind="barrier", tag=tag)):
            pass
    return True


COLLECTIVES = [reduce_scatter, all_gather, all_reduce, broadcasts]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "PIECE_BYTES", 4096)


@pytest.mark.parametrize("action", [*COLLECTIVES, barriers])
def test_all_bytes_arrive_before_a_collective_ends(action: Callable[[Channel], bool]) -> None:
    assert on_both(Channel, action) == [True, True]


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        *((SkipsSends, action) for action in COLLECTIVES),
        *((SkipsReceives, action) for action in COLLECTIVES),
        (SkipsHeaders, barriers),
    ],
)
def test_a_missing_wait_is_noticed(kind: type[Channel], action: Callable[[Channel], bool]) -> None:
    try:
        results = on_both(kind, action)
    except ZeroError:
        return
    assert results != [True, True]


def test_a_timeout_names_the_wait() -> None:
    def only_one(channel: Channel) -> str:
        if channel.rank == 1:
            return ""
        with (
            pytest.raises(CollectiveTimeoutError) as error,
            channel.collective(Call(kind="barrier")),
        ):
            pass
        return str(error.value)

    text = on_both(Channel, only_one)[0]
    assert "in data #1 barrier (tag 0, 0 bytes) for rank 1:" in text
    assert "has not come to any data collective" in text


def test_a_header_survives_the_trip() -> None:
    buffer = bytearray(HEADER_BYTES)
    assert unpack(buffer) is None
    call = Call(kind="all_reduce", tag=-7, numel=1 << 40, dtypes="float32 to bfloat16", label="h.1")
    call.pack_into(buffer, 12)
    assert unpack(buffer) == Header(sequence=12, call=call)
    long = Call(kind="exchange", dtypes="d" * 100, label="ü" * 100)
    long.pack_into(buffer, 1)
    header = unpack(buffer)
    assert header is not None
    assert header.call.label.startswith("ü" * 32)


def test_a_mismatch_names_every_rank() -> None:
    here = Header(sequence=3, call=Call(kind="all_gather", label="h.1", numel=8, dtypes="float32"))
    text = mismatch_text("data", {1: None, 0: here})
    assert "  rank 0: #3 all_gather 'h.1' (tag 0, 8 elements of float32)\n" in text
    assert "  rank 1: has not come\n" in text
