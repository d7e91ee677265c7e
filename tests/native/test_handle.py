"""The handle and its threads: several callers, fork, closing, floating-point mode."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from support.native import ISAS, Problem

from zero_plugin.errors import EngineStateError
from zero_plugin.kernels import Kernels

LARGE = 1 << 20


def num_threads() -> int:
    """Threads of this process, those of the extension included."""
    return len(list(Path("/proc/self/task").iterdir()))


def wait_for_threads(expected: int) -> None:
    # A joined thread may stay listed for a moment.
    deadline = time.monotonic() + 5.0
    while num_threads() != expected and time.monotonic() < deadline:
        time.sleep(0.001)
    assert num_threads() == expected


def doubled(handle: Kernels, value: float) -> bool:
    total = torch.full((LARGE,), value)
    handle.accumulate(total, torch.full((LARGE,), value, dtype=torch.bfloat16))
    return bool((total == 2 * value).all())


def test_threads_are_started_and_joined():
    torch.ones(LARGE).sum()  # torch's own threads exist from here on
    before = num_threads()
    handle = Kernels(threads=4)
    assert handle.threads == 4
    assert num_threads() == before + 3  # the caller is the fourth
    assert doubled(handle, 2.0)
    handle.close()
    wait_for_threads(before)
    handle.close()  # again is fine
    with pytest.raises(EngineStateError, match="handle is closed; make a new one"):
        handle.copy(torch.zeros(1), torch.zeros(1))


def test_a_dropped_handle_joins_its_threads():
    before = num_threads()
    handle = Kernels(threads=3)
    assert num_threads() == before + 2
    del handle
    gc.collect()
    wait_for_threads(before)


def test_one_thread_starts_none():
    before = num_threads()
    with Kernels(threads=1) as handle:
        assert num_threads() == before
        assert doubled(handle, 1.0)


def test_default_is_every_processor_and_the_best_instruction_set():
    with Kernels() as handle:
        assert handle.threads == len(os.sched_getaffinity(0))
        assert handle.isa == ISAS[-1]


def test_every_instruction_set_can_be_asked_for():
    for isa in ISAS:
        with Kernels(threads=1, isa=isa) as handle:
            assert handle.isa == isa
    with pytest.raises(
        ValueError,
        match="instruction set 'mmx' is not available on this machine; use auto or one of",
    ):
        Kernels(isa="mmx")
    with pytest.raises(ValueError, match="threads is 0; it must be at least 1"):
        Kernels(threads=0)


def test_several_python_threads_share_a_handle():
    failures: list[str] = []
    with Kernels(threads=3) as handle:

        def work(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            source = torch.randn(50_000 + seed, generator=generator)
            narrow = torch.empty_like(source, dtype=torch.bfloat16)
            partial = handle.norm_partial(source)
            for _ in range(30):
                handle.copy(narrow, source)
                if not torch.equal(narrow, source.bfloat16()):
                    failures.append(f"copy of thread {seed}")
                if handle.norm_partial(source) != partial:
                    failures.append(f"norm of thread {seed}")

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert not failures


def test_the_gil_is_released():
    # A big job on one thread; meanwhile this thread must be able to run Python code.
    source = torch.ones(1 << 25)
    destination = torch.empty(1 << 25, dtype=torch.bfloat16)
    with Kernels(threads=1, isa="scalar") as handle:
        done = threading.Event()

        def work() -> None:
            handle.copy(destination, source)
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        turns = 0
        while not done.is_set():
            turns += 1
            time.sleep(0)
        thread.join()
    # Held, the GIL would allow a handful of turns, before the job and after it.
    assert turns > 100


def test_closing_waits_for_the_job_in_hand():
    source = torch.ones(1 << 24)
    destination = torch.empty(1 << 24, dtype=torch.float16)
    for _ in range(3):
        destination.zero_()
        handle = Kernels(threads=2, isa="scalar")
        started = threading.Event()

        def work(handle: Kernels = handle, started: threading.Event = started) -> None:
            started.set()
            try:
                handle.copy(destination, source)
            except (EngineStateError, RuntimeError) as error:
                assert "closed" in str(error)  # noqa: PT017
                destination.fill_(1.0)

        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        handle.close()
        thread.join(60)
        assert not thread.is_alive()
        assert (destination == 1.0).all()


def run_in_fork(body) -> int:
    """Exit status of a forked child that runs `body`; a hang is killed after 20 seconds."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(20)
            status = 0 if body() else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    return status


def test_a_forked_child_gets_threads_of_its_own():
    # The child touches no torch operation that would want torch's own threads: those do not survive a fork.
    total, one = torch.full((LARGE,), 2.0), torch.ones(LARGE)
    with Kernels(threads=3) as handle:
        assert doubled(handle, 1.0)

        def child() -> bool:
            before = num_threads()
            handle.accumulate(total, one)
            good = total[0].item() == total[-1].item() == 3.0 and num_threads() == before + 2
            handle.close()
            return good

        assert run_in_fork(child) == 0
        assert doubled(handle, 2.0)  # the parent's threads still work


def test_a_fork_during_a_job_does_not_hang():
    source = torch.ones(1 << 24)
    destination = torch.empty(1 << 24, dtype=torch.bfloat16)
    total, one = torch.full((LARGE,), 2.0), torch.ones(LARGE)
    handle = Kernels(threads=2, isa="scalar")
    thread = threading.Thread(target=handle.copy, args=(destination, source))
    thread.start()

    def child() -> bool:
        handle.accumulate(total, one)
        handle.close()
        return total[0].item() == total[-1].item() == 3.0

    def child_that_only_closes() -> bool:
        handle.close()
        return True

    assert run_in_fork(child) == 0
    assert run_in_fork(child_that_only_closes) == 0
    thread.join(60)
    assert not thread.is_alive()
    handle.close()
    assert (destination == 1.0).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_denormals_are_kept_whatever_torch_was_told(threads):
    tiny = torch.full((100_000,), 1e-40)
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush denormals on this processor")
    try:
        assert (tiny * 1.0)[0].item() == 0.0  # torch flushes in this thread
        with Kernels(threads=threads) as handle:  # its threads are made under that mode
            total = torch.zeros(100_000)
            handle.accumulate(total, tiny)
            partial = handle.norm_partial(tiny)
            problem = Problem.create(torch.optim.SGD, {"lr": 1.0}, torch.zeros(100_000))
            problem.native(handle, tiny)
        assert (tiny * 1.0)[0].item() == 0.0  # and the caller's mode is as before
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(total, tiny)
    assert torch.equal(problem.master, -tiny)
    assert partial.absmax == tiny[0].item()
    assert partial.sum_squares > 0
