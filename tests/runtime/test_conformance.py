"""What every backend does alike."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from runtime.probes import Fail, Gate, Holder, Modes, Note

from zero_plugin.errors import LaneError
from zero_plugin.runtime.backend import Backend, LaneKind
from zero_plugin.runtime.buffers import Lease, SlabPool
from zero_plugin.runtime.execution import Services
from zero_plugin.runtime.operations import (
    Accumulate,
    Collective,
    CollectiveKind,
    Copy,
    NormPartials,
    SumRanks,
    Update,
    Zero,
)
from zero_plugin.runtime.threads import ThreadsBackend
from zero_plugin.runtime.ticket import TICKET_MOVES, Ticket, TicketState
from zero_plugin.trace import Ledger, Trace

KINDS: tuple[LaneKind, LaneKind] = ("device", "host")


# ------------------------------------------------------------------ order


@pytest.mark.parametrize("kind", KINDS)
def test_lane_is_first_in_first_out(backend: Backend, kind: LaneKind) -> None:
    lane, log = backend.lane("lane", kind), []
    names = [f"op{place}" for place in range(20)]
    for place, name in enumerate(names):
        lane.submit(Note(log, name, pause=0.002 if place % 3 == 0 else 0.0))
    lane.drain()
    assert log == names


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_after_orders_lanes(backend: Backend, first: LaneKind, second: LaneKind) -> None:
    one, two, log = backend.lane("one", first), backend.lane("two", second), []
    ticket = one.submit(Note(log, "a", pause=0.02))
    two.submit(Note(log, "b"), after=[ticket]).wait()
    assert log == ["a", "b"]


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_on_orders_everything_submitted_later(
    backend: Backend, first: LaneKind, second: LaneKind
) -> None:
    one, two, log = backend.lane("one", first), backend.lane("two", second), []
    ticket = one.submit(Note(log, "a", pause=0.02))
    ticket.on(two)
    two.submit(Note(log, "b"))
    two.submit(Note(log, "c")).wait()
    assert log == ["a", "b", "c"]


def test_host_lanes_are_not_ordered_without_a_ticket(deferred: Backend) -> None:
    gate, log = Gate(), []
    held = deferred.lane("one", "host").submit(gate)
    deferred.lane("two", "host").submit(Note(log, "free")).wait()
    assert log == ["free"]
    assert not held.done
    gate.opened.set()
    held.wait()


def test_host_is_free_while_a_lane_waits(deferred: Backend) -> None:
    gate, log = Gate(), []
    one, two = deferred.lane("one", "host"), deferred.lane("two", "host")
    one.submit(gate).on(two)
    ticket = two.submit(Note(log, "later"))
    log.append("host")
    assert not ticket.done
    gate.opened.set()
    ticket.wait()
    assert log == ["host", "later"]


def test_chain_over_many_lanes(backend: Backend) -> None:
    log: list[str] = []
    lanes = [backend.lane(f"lane{place}", KINDS[place % 2]) for place in range(6)]
    ticket = backend.mark("start")
    for place in range(60):
        ticket = lanes[place % 6].submit(Note(log, str(place)), after=[ticket])
    ticket.wait()
    assert log == [str(place) for place in range(60)]


def test_compute_follows(backend: Backend) -> None:
    log: list[str] = []
    backend.lane("host", "host").submit(Note(log, "a", pause=0.02)).on(backend.compute)
    assert log == ["a"]


def test_mark_ends(backend: Backend) -> None:
    mark = backend.mark("forward")
    log: list[str] = []
    backend.lane("lane", "device").submit(Note(log, "a"), after=[mark]).wait()
    assert mark.wait() is None
    assert mark.done


def test_sequence_grows_in_program_order(backend: Backend) -> None:
    lanes = [backend.lane("one", "host"), backend.lane("two", "device")]
    tickets = [lanes[place % 2].submit(Note([], "x")) for place in range(6)]
    assert [ticket.sequence for ticket in tickets] == list(range(6))


def test_lane_is_made_once(backend: Backend) -> None:
    lane = backend.lane("lane", "host")
    assert backend.lane("lane", "host") is lane
    with pytest.raises(LaneError, match=r"'lane' is a host lane .* another name"):
        backend.lane("lane", "device")


# ------------------------------------------------------------------ refusals


def test_refuses_a_ticket_issued_later(backend: Backend) -> None:
    lane, log = backend.lane("lane", "host"), []
    real = lane.submit(Note(log, "a"))
    later = Ticket(label="later", lane="lane", sequence=real.sequence + 100, order=real.order)
    with pytest.raises(LaneError, match=r"cannot come after 'later', number 100"):
        lane.submit(Note(log, "b"), after=[later])
    with pytest.raises(LaneError, match="cannot come after 'later'"):
        later.on(lane)
    with pytest.raises(LaneError, match="cannot come after 'later'"):
        later.on(backend.compute)
    lane.submit(Note(log, "c")).wait()
    assert log == ["a", "c"]


def test_refuses_a_ticket_of_another_backend(
    backend: Backend, make_backend: Callable[..., Backend]
) -> None:
    other = make_backend("inline")
    foreign = other.lane("lane", "host").submit(Note([], "foreign"))
    lane = backend.lane("lane", "host")
    with pytest.raises(LaneError, match="'foreign', a ticket of another backend"):
        lane.submit(Note([], "a"), after=[foreign])
    with pytest.raises(LaneError, match="'foreign', a ticket of another backend"):
        foreign.on(lane)
    other.close()
    with pytest.raises(LaneError, match="'foreign', a ticket of a closed backend"):
        lane.submit(Note([], "a"), after=[foreign])


def test_closed_backend_refuses(backend: Backend) -> None:
    lane = backend.lane("lane", "device")
    ticket = lane.submit(Note([], "a"))
    backend.close()
    with pytest.raises(LaneError, match=r"'late' was submitted .* closed; create a new backend"):
        lane.submit(Note([], "late"))
    with pytest.raises(LaneError, match="asked of a closed"):
        backend.lane("new", "host")
    with pytest.raises(LaneError, match="closed"):
        backend.mark("late")
    assert ticket.wait() == "a"


# ------------------------------------------------------------------ failures


@pytest.mark.parametrize("kind", KINDS)
def test_error_is_raised_where_it_is_awaited(backend: Backend, kind: LaneKind) -> None:
    lane = backend.lane("lane", kind)
    ticket = lane.submit(Fail(label="reduce unit 3"))
    for _ in range(2):
        with pytest.raises(
            LaneError, match="'reduce unit 3' on lane 'lane' failed: ValueError: broken on purpose"
        ) as caught:
            ticket.wait()
        assert isinstance(caught.value.__cause__, ValueError)
    assert ticket.done
    assert ticket.state is TicketState.FAILED
    lane.drain()


@pytest.mark.parametrize("kind", KINDS)
def test_failure_poisons_dependants_over_lanes(backend: Backend, kind: LaneKind) -> None:
    one, two, three = (backend.lane(name, kind) for name in ("one", "two", "three"))
    log: list[str] = []
    root = one.submit(Fail(label="root"))
    middle = two.submit(Note(log, "middle"), after=[root])
    leaf = three.submit(Note(log, "leaf"), after=[middle])
    with pytest.raises(
        LaneError, match=r"'leaf' .* did not run, because 'root' .* failed"
    ) as caught:
        leaf.wait()
    assert isinstance(caught.value.__cause__, ValueError)
    assert [ticket.state for ticket in (root, middle, leaf)] == [
        TicketState.FAILED,
        TicketState.POISONED,
        TicketState.POISONED,
    ]
    assert log == []
    two.submit(Note(log, "free")).wait()
    assert log == ["free"]


def test_followed_failure_poisons_until_settled(backend: Backend) -> None:
    one, two, log = backend.lane("one", "host"), backend.lane("two", "device"), []
    one.submit(Fail(label="root")).on(two)
    tickets = [two.submit(Note(log, name)) for name in "ab"]
    for ticket in tickets:
        with pytest.raises(LaneError, match="'root'"):
            ticket.wait()
    two.settle()
    two.submit(Note(log, "c")).wait()
    assert log == ["c"]


def test_compute_refuses_to_follow_a_failure(backend: Backend) -> None:
    ticket = backend.lane("lane", "host").submit(Fail(label="update"))
    with pytest.raises(LaneError, match="'update'"):
        ticket.on(backend.compute)


@pytest.mark.parametrize("kind", KINDS)
def test_lane_goes_on_after_an_error(backend: Backend, kind: LaneKind) -> None:
    lane, log = backend.lane("lane", kind), []
    lane.submit(Fail())
    lane.submit(Note(log, "a"))
    lane.settle()
    lane.submit(Note(log, "b")).wait()
    assert log == ["a", "b"]


def test_drain_raises_what_nobody_awaited_once(backend: Backend) -> None:
    lane = backend.lane("lane", "host")
    lane.submit(Fail(label="first"))
    lane.submit(Fail(label="second"))
    with pytest.raises(LaneError, match="'first'"):
        backend.drain()
    backend.drain()
    lane.submit(Fail(label="third"))
    backend.settle()
    backend.drain()


def test_close_after_an_error_raises_nothing(backend: Backend) -> None:
    backend.lane("lane", "device").submit(Fail())
    backend.close()
    backend.close()


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit("x")], ids=repr)
def test_any_exception_is_kept(deferred: Backend, error: BaseException) -> None:
    ticket = deferred.lane("lane", "host").submit(Fail(error=error))
    with pytest.raises(LaneError) as caught:
        ticket.wait()
    assert caught.value.__cause__ is error


# ------------------------------------------------------------------ waiting


def test_several_threads_wait_for_one_ticket(deferred: Backend) -> None:
    gate = Gate()
    ticket = deferred.lane("lane", "host").submit(gate)
    answers: list[object] = []
    waiters = [threading.Thread(target=lambda: answers.append(ticket.wait())) for _ in range(8)]
    for waiter in waiters:
        waiter.start()
    assert not ticket.done
    gate.opened.set()
    for waiter in waiters:
        waiter.join(20)
    assert answers == [None] * 8


def test_several_threads_submit(backend: Backend) -> None:
    lane, log = backend.lane("lane", "host"), []
    results: list[Ticket] = []

    def submit(name: str) -> None:
        results.extend([lane.submit(Note(log, f"{name}{place}")) for place in range(50)])

    threads = [threading.Thread(target=submit, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    lane.drain()
    assert len(log) == 200
    assert sorted(ticket.sequence for ticket in results) == list(range(200))
    for name in "abcd":
        mine = [entry for entry in log if entry.startswith(name)]
        assert mine == [f"{name}{place}" for place in range(50)]


def interrupt_main() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_keyboard_interrupt_in_wait_leaves_all_usable(deferred: Backend) -> None:
    gate, log = Gate(), []
    lane = deferred.lane("lane", "host")
    ticket = lane.submit(gate)
    assert gate.started.wait(20)
    interrupter = threading.Timer(0.05, interrupt_main)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    interrupter.join()
    gate.opened.set()
    ticket.wait()
    lane.submit(Note(log, "a")).wait()
    assert log == ["a"]


def test_keyboard_interrupt_in_close_can_be_closed_again(deferred: Backend) -> None:
    gate = Gate()
    deferred.lane("lane", "host").submit(gate)
    interrupter = threading.Timer(0.05, interrupt_main)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        deferred.close()
    interrupter.join()
    gate.opened.set()
    deferred.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("zero-lane")]


class _InterruptedLease(Lease):
    def lend(self, ticket: Ticket) -> None:
        raise KeyboardInterrupt


def test_interrupt_inside_submit_leaves_no_unending_ticket(deferred: Backend) -> None:
    lane, log = deferred.lane("lane", "host"), []
    pool = SlabPool(
        name="p", backend=deferred, slab_bytes=64, slabs=1, memory="host", setting="host_limit"
    )
    lease = _InterruptedLease(holder="x", pool=pool, buffer=torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(KeyboardInterrupt):
        lane.submit(Note(log, "a"), leases=[lease])
    lane.submit(Note(log, "b")).wait()
    deferred.drain()
    pool.close()
    assert log == ["b"]


@pytest.mark.parametrize("name", ["inline", "cuda"])
def test_interrupt_inside_an_operation_on_the_main_thread(
    make_backend: Callable[..., Backend], name: str
) -> None:
    """It surfaces at once where `submit` runs the operation, and the lane stays usable."""
    backend, log = make_backend(name), []
    lane = backend.lane("lane", "device")
    with pytest.raises(KeyboardInterrupt):
        lane.submit(Fail(error=KeyboardInterrupt(), label="interrupted"))
    lane.submit(Note(log, "a")).wait()
    with pytest.raises(LaneError, match="'interrupted'"):
        lane.drain()
    lane.drain()
    assert log == ["a"]


def test_close_runs_what_is_queued(deferred: Backend) -> None:
    lane, log = deferred.lane("lane", "host"), []
    for name in "abc":
        lane.submit(Note(log, name, pause=0.01))
    deferred.close()
    assert log == ["a", "b", "c"]
    assert not [t for t in threading.enumerate() if t.name.startswith("zero-lane")]


def test_dropped_backend_ends_its_threads(make_backend: Callable[..., Backend]) -> None:
    services = Services(kernels=make_backend("inline").kernels, ledger=Ledger(), trace=None)
    dropped = ThreadsBackend(services=services)
    dropped.lane("lane", "host").submit(Note([], "a")).wait()
    threads = [t for t in threading.enumerate() if t.name.startswith("zero-lane")]
    assert len(threads) == 1
    del dropped
    gc.collect()
    threads[0].join(20)
    assert not threads[0].is_alive()


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_ended_ticket_keeps_no_buffer(backend: Backend, kind: LaneKind, fails: bool) -> None:
    tensor = torch.zeros(1000)
    watch = weakref.ref(tensor)
    lane = backend.lane("lane", kind)
    ticket = lane.submit(Holder(tensor, fails=fails))
    poisoned = lane.submit(Holder(tensor), after=[ticket])
    del tensor
    ticket.settle()
    poisoned.settle()
    lane.settle()
    gc.collect()
    assert watch() is None
    assert (ticket.failure is not None) is fails


def test_ended_ticket_keeps_no_earlier_ticket(backend: Backend) -> None:
    lane = backend.lane("lane", "host")
    first = lane.submit(Note([], "a"))
    watch = weakref.ref(first)
    last = lane.submit(Note([], "b"), after=[first])
    first.on(lane)
    del first
    last.wait()
    lane.submit(Note([], "c")).wait()
    gc.collect()
    assert watch() is None


# ------------------------------------------------------------------ modes


@pytest.mark.parametrize("kind", KINDS)
def test_operations_run_without_grad_or_inference_mode(backend: Backend, kind: LaneKind) -> None:
    lane = backend.lane("lane", kind)
    with torch.inference_mode():
        assert lane.submit(Modes()).wait() == (False, False)
    with torch.enable_grad():
        assert lane.submit(Modes()).wait() == (False, False)
        assert torch.is_grad_enabled()


def test_operation_writes_a_leaf_that_requires_grad(backend: Backend) -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    source = torch.ones(4, dtype=torch.bfloat16)
    backend.lane("lane", "device").submit(Copy(destinations=(weight,), sources=(source,))).wait()
    assert torch.equal(weight.detach(), torch.ones(4))


# ------------------------------------------------------------------ operations


def test_copy_casts_and_counts(backend: Backend, ledger: Ledger) -> None:
    source = torch.randn(33)
    half, whole, numbers = (
        torch.empty(33, dtype=torch.bfloat16),
        torch.empty(3, 11),
        torch.arange(5),
    )
    kept = torch.empty(5, dtype=torch.int64)
    lane = backend.lane("down", "device")
    lane.submit(
        Copy(
            destinations=(half, whole, kept),
            sources=(source, source, numbers),
            direction="device_to_host",
        )
    ).wait()
    assert torch.equal(half, source.bfloat16())
    assert torch.equal(whole, source.view(3, 11))
    assert torch.equal(kept, numbers)
    assert ledger.snapshot()["device_to_host"] == 33 * 2 + 33 * 4 + 5 * 8
    lane.submit(Copy(destinations=(half,), sources=(source,))).wait()
    assert ledger.snapshot()["device_to_host"] == 33 * 2 + 33 * 4 + 5 * 8


def test_copy_of_strided_tensors(backend: Backend) -> None:
    source = torch.arange(12.0).view(3, 4).t()
    destination = torch.empty(4, 3)
    backend.lane("lane", "host").submit(Copy(destinations=(destination,), sources=(source,))).wait()
    assert torch.equal(destination, source)


def test_copy_refuses_what_does_not_match() -> None:
    a, b = torch.zeros(3), torch.zeros(4)
    with pytest.raises(ValueError, match="'c' has 2 destinations and 1 sources"):
        Copy(destinations=(a, a), sources=(a,), label="c")
    with pytest.raises(ValueError, match="'c' number 0 goes from 4 elements to 3"):
        Copy(destinations=(a,), sources=(b,), label="c")


def test_zero_accumulate_sum_and_norm(backend: Backend) -> None:
    total = torch.full((5,), 9.0)
    strided = torch.full((4, 4), 9.0)[:, 1]
    part = torch.arange(5.0).bfloat16()
    mean = torch.empty(5, dtype=torch.bfloat16)
    lane = backend.lane("lane", "host")
    lane.submit(Zero(destinations=(total, strided)))
    lane.submit(Accumulate(destination=total, source=part))
    lane.submit(Accumulate(destination=total, source=part))
    lane.submit(SumRanks(destination=mean, parts=(total, part), divisor=2))
    norms = lane.submit(NormPartials(sources=(total, part))).wait()
    assert strided.eq(0).all()
    assert torch.equal(total, 2 * torch.arange(5.0))
    assert torch.equal(mean, (1.5 * torch.arange(5.0)).bfloat16())
    assert norms == [120.0, 30.0]


class _Group:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        *,
        tag: int,
        label: str = "",
    ) -> None:
        self.calls.append(("reduce_scatter", tag))
        assert label == "reduce_scatter"
        output.copy_(input[0])

    def all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        *,
        tag: int,
        label: str = "",
    ) -> None:
        self.calls.append(("all_gather", tag))
        assert label == "all_gather"
        output[0].copy_(input)

    def all_reduce(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        *,
        tag: int,
        label: str = "",
    ) -> None:
        self.calls.append(("all_reduce", tag))
        assert label == "all_reduce"
        output.copy_(input)


def test_collectives_call_the_group_in_order(backend: Backend) -> None:
    group, lane = _Group(), backend.lane("group", "device")
    full, shard = torch.arange(4.0).view(1, 4), torch.empty(4)
    back, again = torch.empty(1, 4), torch.empty(4)
    calls: list[tuple[CollectiveKind, torch.Tensor, torch.Tensor]] = [
        ("reduce_scatter", shard, full),
        ("all_gather", back, shard),
        ("all_reduce", again, shard),
    ]
    for tag, (kind, output, source) in enumerate(calls):
        lane.submit(
            Collective(kind=kind, group=group, output=output, input=source, tag=tag, label=kind)
        )
    lane.drain()
    assert group.calls == [("reduce_scatter", 0), ("all_gather", 1), ("all_reduce", 2)]
    assert torch.equal(back, full)
    assert torch.equal(again, shard)


class _Updater:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.reads = (weight,)
        self.writes = (weight,)

    def apply(self, kernels: object) -> None:
        self.weight.sub_(1.0)


def test_update_applies_its_updater(backend: Backend) -> None:
    weight = torch.ones(3)
    backend.lane("host", "host").submit(Update(updater=_Updater(weight))).wait()
    assert torch.equal(weight, torch.zeros(3))


# ------------------------------------------------------------------ trace


def test_trace_shows_issue_begin_and_end(
    make_backend: Callable[..., Backend], backend: Backend
) -> None:
    trace = Trace()
    traced = make_backend(backend.name, trace=trace)
    one, two = traced.lane("one", "host"), traced.lane("two", "host")
    x, y = torch.zeros(8), torch.zeros(8)
    first = one.submit(Copy(destinations=(y,), sources=(x,), label="down"))
    two.submit(Copy(destinations=(x,), sources=(y,), label="up"), after=[first]).wait()
    order = [(event.label, event.phase) for event in trace.events() if event.phase != "issued"]
    assert order == [("down", "begin"), ("down", "end"), ("up", "begin"), ("up", "end")]
    begin = next(event for event in trace.events() if event.phase == "begin")
    assert (begin.lane, begin.nbytes, begin.sequence) == ("one", 32, 0)
    issued = [event.label for event in trace.events() if event.phase == "issued"]
    assert issued == ["down", "up"]


@pytest.mark.filterwarnings(
    "ignore:.*Profiler clears events"
)  # torch 2.11 warns of its own default
def test_profiler_sees_the_lane(make_backend: Callable[..., Backend]) -> None:
    for trace in (Trace(), None):
        lane = make_backend("inline", trace=trace).lane("lane", "host")
        with torch.profiler.profile() as profile:
            lane.submit(Note([], "copy down")).wait()
        assert "lane: copy down" in {row.key for row in profile.key_averages()}


# ------------------------------------------------------------------ tickets


def test_every_legal_ticket_move_is_made_and_every_other_refused(backend: Backend) -> None:
    order = backend.mark("x").order
    for state in TicketState:
        for target in TicketState:
            ticket: Ticket[None] = Ticket(label="t", lane="l", sequence=0, order=order)
            ticket._state = state
            if target in TICKET_MOVES[state]:
                ticket.move(target)
                assert ticket.state is target
            else:
                with pytest.raises(RuntimeError, match=f"from {state.value} to {target.value}"):
                    ticket.move(target)


# ------------------------------------------------------------------ fork and exit

FORK = """
import os, sys, torch
from zero_plugin.runtime import create_backend, Zero
from zero_plugin.trace import Ledger
backend = create_backend(
    {name!r}, device=torch.device("cpu"), kernels=None, trace=None, ledger=Ledger()
)
lane = backend.lane("lane", "host")
lane.submit(Zero(destinations=(torch.ones(3),))).wait()
child = os.fork()
if child == 0:
    try:
        lane.submit(Zero(destinations=(torch.ones(3),)))
    except Exception as error:
        os.write(1, str(error).encode())
    backend.close()
    os.write(1, b" child closed")
    os._exit(0)
os.waitpid(child, 0)
backend.close()
"""


@pytest.mark.parametrize("name", ["inline", "threads", "chaos"])
def test_forked_child_is_told(name: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK.format(name=name)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "do not survive a fork; create the backend after forking" in answer.stdout
    assert "child closed" in answer.stdout


EXIT = """
import torch, time
from zero_plugin.runtime import create_backend, Zero
from zero_plugin.trace import Ledger
backend = create_backend(
    {name!r}, device=torch.device("cpu"), kernels=None, trace=None, ledger=Ledger()
)
backend.lane("lane", "host").submit(Zero(destinations=(torch.ones(3),)))
"""


@pytest.mark.parametrize("name", ["threads", "chaos"])
def test_interpreter_exits_without_close(name: str) -> None:
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", EXIT.format(name=name)], timeout=60, check=True)
    assert time.monotonic() - begun < 50


def test_process_is_this_one(backend: Backend) -> None:
    assert backend.mark("x").order.process == os.getpid()
