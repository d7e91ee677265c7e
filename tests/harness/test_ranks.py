"""The harness itself: results, exceptions, crashes, hangs and leaks of rank processes, and that it leaves none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import pytest
import torch
import torch.distributed as dist
from support.ranks import Killed, RanksError, close_client, mark, run_ranks, zygote_pids

pytestmark = pytest.mark.dist


@dataclass
class Place:
    """Of a class of this test module, to come back as one."""

    rank: int
    pid: int


class OddError(Exception):
    """Takes two arguments and so cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def sums(rank: int, size: int, start: float) -> tuple[torch.Tensor, Place]:
    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return total, Place(rank, os.getpid())


def switch_interval(rank: int, size: int) -> float:
    return sys.getswitchinterval()


def test_ranks_change_threads_as_often_as_their_caller() -> None:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        assert run_ranks(1, switch_interval) == [pytest.approx(1e-4, rel=0.05)]
    finally:
        sys.setswitchinterval(usual)
    assert run_ranks(1, switch_interval) == [pytest.approx(usual)]


@pytest.mark.parametrize("store", ["file", "tcp"])
@pytest.mark.parametrize("size", [1, 4])
def test_results_come_back_in_rank_order(size: int, store: Literal["file", "tcp"]) -> None:
    results = run_ranks(size, sums, 10.0, store=store)
    assert [place.rank for _, place in results] == list(range(size))
    assert len({place.pid for _, place in results}) == size
    for total, place in results:
        assert type(place) is Place
        assert total.item() == 10.0 * size + sum(range(size))


def environment(rank: int, size: int) -> dict[str, object]:
    return {
        "variables": {
            name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "EXTRA")
        },
        "threads": torch.get_num_threads(),
        "initialised": dist.is_initialized(),
        "main": threading.current_thread() is threading.main_thread(),
        "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    }


def test_ranks_look_like_launched_processes() -> None:
    for rank, found in enumerate(run_ranks(2, environment, store="none", env={"EXTRA": "x"})):
        assert found == {
            "variables": {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "EXTRA": "x",
            },
            "threads": 1,
            "initialised": False,
            "main": True,
            "interrupts": True,
        }
    assert "EXTRA" not in os.environ


def raises(rank: int, size: int) -> int:
    if rank == 1:
        raise OddError("a", "b")
    if rank == 2:
        raise KeyError("plain")
    return rank


def test_an_exception_names_rank_and_place() -> None:
    with pytest.raises(RanksError, match=r"rank 1 of 3 raised") as caught:
        run_ranks(3, raises)
    assert "raises" in str(caught.value)
    assert "OddError: a b" in str(caught.value)
    assert "rank 0" not in str(caught.value)
    assert isinstance(caught.value.errors[2], KeyError)


def test_exceptions_can_be_results() -> None:
    zero, odd, plain = run_ranks(3, raises, errors="return")
    assert zero == 0
    assert "OddError: a b" in str(odd)
    assert isinstance(plain, KeyError)


def hangs(rank: int, size: int) -> None:
    print(f"rank {rank} was here")
    mark("before the sleep")
    if rank == 0:
        sleep_for_long()


def sleep_for_long() -> None:
    time.sleep(600)


def test_a_hang_is_reported_with_its_place() -> None:
    start = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(2, hangs, deadline=2.0)
    assert time.monotonic() - start < 20.0
    text = str(caught.value)
    assert "rank 0 of 2 (last mark: before the sleep) did not end within the deadline" in text
    assert "in sleep_for_long" in text
    assert "rank 0 was here" in text
    assert "rank 1 of 2" not in text


def crashes(rank: int, size: int) -> None:
    if rank == 1:
        os.abort()


def test_a_crash_is_reported_with_its_stack() -> None:
    with pytest.raises(RanksError, match="rank 1 of 2 ended with code -6") as caught:
        run_ranks(2, crashes)
    assert "in crashes" in str(caught.value)


def waits(rank: int, size: int) -> str:
    if rank == 1:
        mark("first")
        mark("second")
        time.sleep(600)
    return "done"


@pytest.mark.parametrize("when", ["second", 0.3])
def test_a_rank_can_be_killed(when: str | float) -> None:
    assert run_ranks(2, waits, kill={1: when}, deadline=30.0) == ["done", Killed(1)]


def test_a_mark_that_is_never_reached_is_not_a_kill() -> None:
    with pytest.raises(RanksError, match="last mark: second"):
        run_ranks(2, waits, kill={1: "third"}, deadline=2.0)


def leaves_thread(rank: int, size: int) -> None:
    threading.Thread(target=sleep_for_long, name="stray", daemon=True).start()


def leaves_group(rank: int, size: int) -> None:
    dist.new_group(backend="gloo")


def test_a_rank_that_leaves_a_thread_fails() -> None:
    with pytest.raises(RanksError, match=r"left threads running.*stray"):
        run_ranks(1, leaves_thread)


def test_a_rank_that_leaves_a_group_fails() -> None:
    with pytest.raises(RanksError, match=r"left 1 process group\(s\)"):
        run_ranks(2, leaves_group)


def unpicklable(rank: int, size: int) -> object:
    return threading.Lock()


def test_a_result_that_cannot_be_pickled_is_reported() -> None:
    with pytest.raises(RanksError, match="cannot pickle"):
        run_ranks(1, unpicklable)


def test_a_local_function_is_refused() -> None:
    with pytest.raises(ValueError, match="not a module-level function"):
        run_ranks(1, lambda rank, size: None)


def preloaded(rank: int, size: int) -> bool:
    return "colorsys" in sys.modules


def test_modules_can_be_loaded_before_the_fork() -> None:
    assert run_ranks(1, preloaded, preload=["colorsys"]) == [True]


def test_closing_leaves_no_process() -> None:
    run_ranks(2, environment, store="none", env={"EXTRA": "x"})
    (pid,) = zygote_pids()
    close_client()
    assert not psutil.pid_exists(pid)
    assert zygote_pids() == set()


ORPHANS = """
import sys, time
sys.path[:0] = {path!r}
from support.ranks import run_ranks, zygote_pids
import support.sleeper as sleeper
import threading
threading.Thread(target=run_ranks, args=(2, sleeper.sleep), daemon=True).start()
while not zygote_pids():
    time.sleep(0.01)
print(*zygote_pids(), flush=True)
time.sleep(600)
"""


def test_ranks_end_when_their_caller_is_killed(tmp_path: Path) -> None:
    support = Path(sys.modules["support.ranks"].__file__ or "").parent
    folder = tmp_path / "support"
    folder.mkdir()
    for source in support.glob("*.py"):
        (folder / source.name).write_text(source.read_text())
    (folder / "sleeper.py").write_text("import time\ndef sleep(rank, size):\n    time.sleep(600)\n")
    script = tmp_path / "caller.py"
    script.write_text(ORPHANS.format(path=[str(tmp_path)]))
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdout is not None
        zygote = psutil.Process(int(caller.stdout.readline()))
        limit = time.monotonic() + 60.0
        while len(ranks := zygote.children()) < 2 and time.monotonic() < limit:
            time.sleep(0.05)
        caller.kill()
    assert len(ranks) == 2
    _, alive = psutil.wait_procs([zygote, *ranks], timeout=10.0)
    assert alive == []
