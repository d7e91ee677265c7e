"""What holds for every test: nothing may be left behind, and a hang shows where it hangs.

The checks are for threads, process groups, child processes, environment variables and shared memory. What a test
leaves is undone where that is possible, so that one leak fails one test.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
from support.ranks import close_client, zygote_pids

SHARED_MEMORY = Path("/dev/shm")
GRACE_SECONDS = 3.0

# Set by frameworks when they are used, for good and on purpose.
FOREIGN_VARIABLES = {
    "PYTEST_CURRENT_TEST",  # pytest
    "PL_GLOBAL_SEED",  # Lightning's seed_everything
    "PL_SEED_WORKERS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "KMP_INIT_AT_FORK",  # torch
    "KMP_DUPLICATE_LIB_OK",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "CUDA_MODULE_LOADING",
}
# One a process, started at first use and kept: tqdm's monitor of progress bars.
FOREIGN_THREADS = {"TMonitor"}
# Python's tracker of shared memory and torch's manager of shared tensors live as long as their process.
FOREIGN_CHILDREN = ("resource_tracker", "torch_shm_manager")

hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many seeds the tests of many schedules try, how many placements each model meets, how often threads change places."""
    parser.addoption(
        "--schedules",
        type=int,
        default=200,
        help="seeded chaos schedules of each test that tries many",
    )
    parser.addoption(
        "--placements",
        choices=("drawn", "all"),
        default="drawn",
        help="placements that each shape of the integration matrix meets: a share drawn with a fixed seed, or all",
    )
    parser.addoption(
        "--switch-interval",
        type=float,
        metavar="SECONDS",
        default=sys.getswitchinterval(),
        help="time after which a thread gives way to another, here and in ranks; 1e-5 shows races that are met once in a million operations",
    )


@pytest.fixture
def schedules(request: pytest.FixtureRequest) -> int:
    """How many seeds a test of many schedules tries, in all its cases together."""
    return int(str(request.config.getoption("--schedules")))


@pytest.fixture
def every_placement(request: pytest.FixtureRequest) -> bool:
    """Whether each shape meets every placement, in place of a share of them."""
    return request.config.getoption("--placements") == "all"


def pytest_configure(config: pytest.Config) -> None:
    """Lets `kill -USR1` show the stacks of a test run that seems to hang."""
    sys.setswitchinterval(float(str(config.getoption("--switch-interval"))))
    if sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the process that forked the ranks."""
    del config
    close_client()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a CUDA device where there is none, with that reason."""
    if not any(item.get_closest_marker("cuda") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves threads, groups, processes, variables or shared memory."""
    threads = set(threading.enumerate())
    children = child_pids()
    variables = dict(os.environ)
    files = shared_files()
    had_group = default_group_exists()
    yield
    forget_compiled_code()
    leaks = [
        *leaked_groups(had_group=had_group),
        *leaked_threads(threads),
        *leaked_children(children),
        *leaked_variables(variables),
        *leaked_files(files),
    ]
    if leaks:
        pytest.fail("left behind: " + "; ".join(leaks), pytrace=False)


def forget_compiled_code() -> None:
    """Drop what torch keeps for the process once something was compiled: a step then waits for its update, in later tests too."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if any(backend is not None for backend in getattr(frames, "cached_backends", {}).values()):
        sys.modules["torch._dynamo"].reset()


def default_group_exists() -> bool:
    """Whether torch.distributed is initialised; torch is not imported to find out."""
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def leaked_groups(*, had_group: bool) -> list[str]:
    """A default group that was not there before; destroyed."""
    if had_group or not default_group_exists():
        return []
    sys.modules["torch.distributed"].destroy_process_group()
    return ["the default process group (destroyed now)"]


def leaked_threads(before: set[threading.Thread]) -> list[str]:
    """Threads that were not there before and do not end within a grace period."""
    new = [
        thread
        for thread in threading.enumerate()
        if thread not in before and type(thread).__name__ not in FOREIGN_THREADS
    ]
    limit = time.monotonic() + GRACE_SECONDS
    for thread in new:
        thread.join(max(limit - time.monotonic(), 0.0))
    return [f"thread {thread.name!r}" for thread in new if thread.is_alive()]


def child_pids() -> set[int]:
    """Direct children that run."""
    return {child.pid for child in psutil.Process().children()}


def leaked_children(before: set[int]) -> list[str]:
    """Children that were not there before and do not end within a grace period; killed."""
    known = before | zygote_pids()
    new = [child for child in psutil.Process().children() if child.pid not in known]
    if not new:
        return []
    _, alive = psutil.wait_procs(new, timeout=GRACE_SECONDS)
    found: list[str] = []
    for child in alive:
        try:
            command = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if not command or any(name in command for name in FOREIGN_CHILDREN):
            continue
        found.append(f"process {child.pid} ({command[:80]}; killed now)")
        child.kill()
    return found


def leaked_variables(before: dict[str, str]) -> list[str]:
    """Environment variables that differ; put back."""
    names = {
        name
        for name in before.keys() | os.environ.keys()
        if before.get(name) != os.environ.get(name)
    }
    for name in names:
        if name == "PYTEST_CURRENT_TEST":
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"environment variable {name}" for name in sorted(names - FOREIGN_VARIABLES)]


def shared_files() -> set[str]:
    """Names in /dev/shm."""
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def leaked_files(before: set[str]) -> list[str]:
    """Shared memory that is new, stays for a while and belongs to no other running process."""
    new = shared_files() - before
    if not new:
        return []
    limit = time.monotonic() + GRACE_SECONDS
    while new and time.monotonic() < limit:
        time.sleep(0.05)
        new &= shared_files()
    new -= mapped_elsewhere(new)
    for name in new:
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    return [f"shared memory {SHARED_MEMORY / name} (removed now)" for name in sorted(new)]


def mapped_elsewhere(names: set[str]) -> set[str]:
    """Those of `names` that a process other than this one has mapped or open."""
    found: set[str] = set()
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            opened = {link.readlink().name for link in Path(f"/proc/{process.pid}/fd").iterdir()}
        except OSError:
            continue
        found |= {name for name in names if f"{SHARED_MEMORY}/{name}" in maps or name in opened}
    return found
