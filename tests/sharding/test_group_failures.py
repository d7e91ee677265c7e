"""ProcessGroup when ranks disagree, die or never come: an error on every rank, in time, naming the culprit."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from support.ranks import Killed, mark, run_ranks

from zero_plugin.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    EngineStateError,
    ZeroError,
)
from zero_plugin.kernels import Kernels
from zero_plugin.sharding import peer, watchdog
from zero_plugin.sharding.group import ProcessGroup
from zero_plugin.sharding.header import Call
from zero_plugin.trace import Ledger

pytestmark = pytest.mark.dist
CPU = torch.device("cpu")
TIMEOUT = 1.5
PATIENCE = 0.2
# A wait may start late by what the machine's load adds; what matters is that it ends.
SLACK = 6.0


def create(timeout: float) -> ProcessGroup:
    watchdog.PATIENCE_SECONDS = PATIENCE
    return ProcessGroup.create(device=CPU, ledger=Ledger(), timeout_seconds=timeout)


def shorten(group: ProcessGroup) -> None:
    """Sets the short timeout once every rank is here, however loaded the machine is."""
    group.barrier()
    assert group._control is not None
    assert isinstance(group._data, peer.PeerCollectives)
    group._control._timeout_seconds = group._data._channel._timeout_seconds = TIMEOUT


def line_of(text: str, rank: int) -> str:
    """What an error's text says of one rank."""
    return next(line for line in text.splitlines() if line.startswith(f"  rank {rank}: "))


def assert_refused(group: ProcessGroup) -> None:
    """After a failure no data collective runs; what failed in control may still serve data, once."""
    assert group._control is not None
    assert isinstance(group._data, peer.PeerCollectives)
    broken = [channel for channel in (group._control, group._data._channel) if channel._broken]
    assert broken
    for channel in broken:
        with pytest.raises(EngineStateError, match="an earlier collective failed"):
            channel.collective(Call(kind="barrier")).__enter__()


def caught(
    group: ProcessGroup, action: str, *, tag: int = 1, numel: int = 10, label: str = ""
) -> Exception:
    """Runs one collective that has to fail, within the timeout, and leaves the group refusing more."""
    start = time.monotonic()
    output = torch.full((numel * group.size,), 7.0)
    rows = torch.zeros(numel * group.size)
    try:
        if action == "reduce_scatter":
            group.reduce_scatter(output[:numel], rows, tag=tag, label=label)
        elif action == "all_gather":
            group.all_gather(output, rows[:numel], tag=tag, label=label)
        elif action == "all_reduce":
            group.all_reduce(output, rows, tag=tag, label=label)
        elif action == "exchange":
            group.exchange(torch.zeros(numel), label=label)
        elif action == "broadcast":
            group.broadcast([output[:numel]])
        elif action == "barrier":
            group.barrier()
    except ZeroError as error:
        taken = time.monotonic() - start
        assert taken < TIMEOUT + SLACK, f"{action} took {taken:.1f} s"
        assert torch.equal(output, torch.full_like(output, 7.0)), "bytes were used"
        assert_refused(group)
        return error
    raise AssertionError(f"{action} did not fail")


def disagree(rank: int, size: int, actions: list[tuple[str, dict]]) -> str:
    group = create(timeout=15.0)
    group.exchange(torch.tensor([rank]))
    group.all_gather(torch.zeros(size * 3), torch.ones(3), tag=0, label="warm")
    action, details = actions[rank]
    error = caught(group, action, **details)
    start = time.monotonic()
    group.close()
    assert time.monotonic() - start < 2.0
    assert isinstance(error, CollectiveMismatchError), repr(error)
    return str(error)


PAIRS = {
    "other unit": (
        ("all_gather", {"tag": 1, "label": "h.1"}),
        ("all_gather", {"tag": 2, "label": "h.2"}),
    ),
    "other direction": (("all_gather", {"label": "h.1"}), ("reduce_scatter", {"label": "h.1"})),
    "other size": (("all_gather", {"numel": 10}), ("all_gather", {"numel": 4000})),
    "other control": (("exchange", {"label": "norm"}), ("barrier", {})),
    "other payload": (("exchange", {"numel": 10}), ("exchange", {"numel": 4000})),
    "other tensors": (("broadcast", {"numel": 10}), ("broadcast", {"numel": 11})),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_ranks_in_different_collectives_both_raise(name: str) -> None:
    texts = run_ranks(2, disagree, list(PAIRS[name]), deadline=30)
    for text in texts:
        for rank, (action, details) in enumerate(PAIRS[name]):
            line = line_of(text, rank)
            assert action in line
            assert details.get("label", "") in line


@pytest.mark.parametrize("odd", [0, 3])
def test_one_of_four_ranks_out_of_step_is_named_on_all(odd: int) -> None:
    actions = [("all_gather", {"tag": 1, "label": "h.1"})] * 4
    actions[odd] = ("all_gather", {"tag": 2, "label": "h.2"})
    for text in run_ranks(4, disagree, actions, deadline=30):
        named = [line for line in text.splitlines() if "'h.2'" in line]
        assert [f"rank {odd}:" in line for line in named] == [True]


def absent(rank: int, size: int, missing: int, action: str) -> str:
    group = create(timeout=15.0)
    group.exchange(torch.tensor([rank]))
    group.all_gather(torch.zeros(size * 3), torch.ones(3), tag=0, label="warm")
    shorten(group)
    if rank == missing:
        time.sleep(TIMEOUT + 1.0)
        group.close()
        return ""
    error = caught(group, action, label="h.1" if action != "broadcast" else "")
    group.close()
    assert isinstance(error, CollectiveTimeoutError), repr(error)
    return str(error)


@pytest.mark.parametrize("action", ["reduce_scatter", "exchange"])
@pytest.mark.parametrize(("size", "missing"), [(2, 0), (4, 2)])
def test_a_rank_that_never_comes_is_named(size: int, missing: int, action: str) -> None:
    texts = run_ranks(size, absent, missing, action, deadline=30)
    for rank, text in enumerate(texts):
        if rank != missing:
            assert f"for rank {missing}:" in text.splitlines()[0], text
            assert action in text.splitlines()[0]


def dead(rank: int, size: int, where: str) -> str:
    group = create(timeout=20.0)
    group.exchange(torch.tensor([rank]))
    if rank == 1:
        time.sleep(0.3)
        mark("gone")
    start = time.monotonic()
    error = caught(group, where)
    assert time.monotonic() - start < 12.0, "waited for the deadline, not for the closed connection"
    group.close()
    assert isinstance(error, CollectiveTimeoutError), repr(error)
    return str(error)


@pytest.mark.parametrize("where", ["all_gather", "exchange"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_is_named_at_once(size: int, where: str) -> None:
    texts = run_ranks(size, dead, where, deadline=30, kill={1: "gone"})
    assert texts[1] == Killed(1)
    for rank in set(range(size)) - {1}:
        assert texts[rank].splitlines()[0].endswith("for rank 1:")
        assert "closed its connection" in line_of(texts[rank], 1)


def dies_in_the_middle(rank: int, size: int) -> str:
    peer.PIECE_BYTES = 4096

    class Mortal(Kernels):
        def sum_ranks(self, destination, parts, divisor):
            self.pieces = getattr(self, "pieces", 0) + 1
            if self.pieces == 3:
                mark("third piece")
            super().sum_ranks(destination, parts, divisor)

    kernels = Mortal(threads=1)
    group = ProcessGroup.create(device=CPU, ledger=Ledger(), timeout_seconds=20.0, kernels=kernels)
    numel = 5_000_000  # more than the sockets' buffers hold
    with pytest.raises(CollectiveTimeoutError) as error:
        group.reduce_scatter(torch.zeros(numel), torch.zeros(size, numel), tag=1, label="big")
    group.close()
    kernels.close()
    return str(error.value)


def test_a_rank_killed_amid_the_bytes_is_named() -> None:
    texts = run_ranks(3, dies_in_the_middle, kill={1: "third piece"})
    for rank in (0, 2):
        assert texts[rank].splitlines()[0].endswith("for rank 1:")
        assert "came to #1 reduce_scatter 'big'" in line_of(texts[rank], 1)
        assert "closed its connection" in line_of(texts[rank], 1)


def elsewhere(rank: int, size: int) -> str:
    """Ranks 1 and 2 disagree about data while rank 0 waits in a control exchange."""
    group = create(timeout=30.0)
    group.exchange(torch.tensor([rank]))
    start = time.monotonic()
    action, label = ("exchange", "flags") if rank == 0 else ("all_gather", f"h.{rank}")
    error = caught(group, action, tag=rank, label=label)
    assert isinstance(error, CollectiveMismatchError), repr(error)
    assert time.monotonic() - start < 12.0
    # The connections stay open until all have raised: what wakes rank 0 is the news, not the closing.
    time.sleep(2.0)
    group.close()
    return str(error)


def test_a_rank_waiting_elsewhere_hears_of_a_mismatch() -> None:
    for text in run_ranks(3, elsewhere, deadline=40):
        assert "'h.1'" in text
        assert "'h.2'" in text


def crossed(rank: int, size: int) -> str:
    """Each rank waits in the other sequence."""
    group = create(timeout=15.0)
    shorten(group)
    action = "exchange" if rank == 0 else "all_gather"
    error = caught(group, action, label="mine")
    time.sleep(2.0)
    group.close()
    return str(error)


def test_ranks_in_different_sequences_learn_where_the_other_waits() -> None:
    texts = run_ranks(2, crossed, deadline=30)
    assert "waiting in data #1 all_gather 'mine'" in line_of(texts[0], 1)
    assert "waiting in control #2 exchange 'mine'" in line_of(texts[1], 0)


def stopped(rank: int, size: int) -> str:
    group = create(timeout=15.0)
    shorten(group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    error = caught(group, "all_gather", label="h.1")
    group.close()
    return str(error)


def test_a_stopped_process_is_missed_at_the_deadline() -> None:
    texts = run_ranks(2, stopped, deadline=30, kill={1: 5.0})
    assert texts[0].splitlines()[0].endswith("for rank 1:")


def host_dies(rank: int, size: int) -> str:
    """Rank 0 hosts the TCP store, so the others lose both."""
    group = create(timeout=20.0)
    group.exchange(torch.tensor([rank]))
    if rank == 0:
        mark("gone")
    start = time.monotonic()
    error = caught(group, "all_gather", label="h.1")
    assert time.monotonic() - start < 12.0
    start = time.monotonic()
    group.close()
    assert time.monotonic() - start < 5.0
    return str(error)


def test_the_death_of_the_stores_host_is_an_error_too() -> None:
    texts = run_ranks(3, host_dies, deadline=40, store="tcp", kill={0: "gone"})
    for text in texts[1:]:
        assert "closed its connection" in line_of(text, 0)


def never_created(rank: int, size: int) -> str:
    if rank == 1:
        time.sleep(TIMEOUT)
        return ""
    with pytest.raises(CollectiveTimeoutError) as error:
        create(timeout=1.0)
    return str(error.value)


def test_a_rank_that_makes_no_group_is_named() -> None:
    texts = run_ranks(3, never_created)
    assert "rank(s) [1]" in texts[0]
    assert "rank(s) [1]" in texts[2]


def interrupted(rank: int, size: int) -> None:
    group = create(timeout=15.0)

    class Stop(KeyboardInterrupt):
        pass

    def refuse(*_: object) -> None:
        raise Stop

    if rank == 0:
        assert isinstance(group._data, peer.PeerCollectives)
        group._data._average = refuse  # type: ignore[method-assign]
    with pytest.raises(Stop if rank == 0 else CollectiveTimeoutError):
        group.all_reduce(torch.zeros(10), torch.zeros(10), tag=1)
    if rank == 0:
        with pytest.raises(EngineStateError, match="an earlier collective failed"):
            group.all_reduce(torch.zeros(10), torch.zeros(10), tag=1)
    group.close()


def test_an_interrupt_inside_a_collective_leaves_a_group_that_refuses() -> None:
    run_ranks(2, interrupted)


def closed(rank: int, size: int) -> None:
    group = create(timeout=15.0)
    group.close()
    group.close()
    with pytest.raises(EngineStateError, match="closed"):
        group.barrier()
    with pytest.raises(EngineStateError, match="closed"):
        group.all_reduce(torch.zeros(10), torch.zeros(10), tag=1)


def test_a_closed_group_refuses() -> None:
    run_ranks(2, closed)
