"""Real rank processes for tests: `run_ranks(size, function, *args)`.

Every rank is a process of its own with one torch thread and, unless asked otherwise, torch's default
process group initialised with gloo. The function is called as `function(rank, size, *args)`; it is
found in the child by file and name, so a module-level function of a test module will do. A rank that
raises, crashes, hangs, or leaves threads or process groups behind fails the call, and the
message names the rank, the place of every thread and the end of its output.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from support.zygote import STACK_SIGNAL, STATE, Job, Outcome, Payload, read_message, write_message

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import BinaryIO

START_SECONDS = 120.0
STACK_SECONDS = 0.5
KILL_SECONDS = 0.05
OUTPUT_TAIL = 4000


class RanksError(AssertionError):
    """One or more ranks failed; the message says which, where and how.

    Attributes:
        errors: per rank the exception it raised, or None.
    """

    def __init__(self, message: str, errors: Sequence[BaseException | None] = ()) -> None:
        super().__init__(message)
        self.errors = list(errors)


@dataclass(frozen=True)
class Killed:
    """Takes the place of the result of a rank that the test killed."""

    rank: int


def mark(name: str) -> None:
    """Called in a rank: notes the place, and dies here when `run_ranks(kill=...)` says so.

    Args:
        name: the place's name, as in `run_ranks(..., kill={1: name})`.
    """
    if STATE.place is None:
        return
    STATE.seen.append(name)
    STATE.place.write_text(name)
    if STATE.kill_at == name:
        os.kill(os.getpid(), signal.SIGKILL)


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    deadline: float = 45.0,
    errors: Literal["raise", "return"] = "raise",
    kill: Mapping[int, float | str] | None = None,
    store: Literal["file", "tcp", "none"] = "file",
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
    threads: int = 1,
) -> list[Any]:
    """Runs `function(rank, size, *args)` in `size` processes and returns the results by rank.

    Args:
        size: number of ranks.
        function: a module-level function.
        args: pickled into every rank.
        deadline: seconds until ranks still running are dumped, killed and reported.
        errors: "raise" fails on the first exception of a rank; "return" puts exceptions into the
            list instead. A crash, a hang or a leak fails in both.
        kill: for some ranks, seconds after their function was entered or the name of a `mark` at which they die by
            SIGKILL; their result is `Killed`.
        store: where the default group meets: a file, a TCP server in rank 0 (as under most
            launchers), or "none": no default group is made.
        env: environment variables set in every rank (RANK, WORLD_SIZE, MASTER_PORT... are set too).
        preload: modules to import once before forking, when they are slow to import.
        threads: `torch.set_num_threads` of every rank.

    Raises:
        RanksError: a rank failed.
    """
    module = sys.modules[function.__module__]
    if "<" in function.__qualname__ or module.__file__ is None:
        message = f"{function.__qualname__} is not a module-level function"
        raise ValueError(message)
    payload = Payload(
        module=module.__name__,
        path=module.__file__,
        name=function.__qualname__,
        arguments=pickle.dumps(args),
    )
    kill = dict(kill or {})
    directory = tempfile.mkdtemp(prefix="ranks-")
    try:
        (Path(directory) / "payload").write_bytes(pickle.dumps(payload))
        job = Job(
            size=size,
            directory=directory,
            search_path=tuple(sys.path),
            working_directory=str(Path.cwd()),
            environment=dict(env or {}),
            preload=tuple(preload),
            store=store,
            port=free_port(),
            deadline_seconds=deadline,
            kill_at={rank: when for rank, when in kill.items() if isinstance(when, str)},
            threads=threads,
            switch_seconds=sys.getswitchinterval(),
        )
        delays = {rank: when for rank, when in kill.items() if not isinstance(when, str)}
        run = Run(job=job, client=client(), delays=delays, stop_on_error=errors == "raise")
        run.watch()
        return run.results(killed=set(kill), keep_errors=errors == "return")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return cast("int", probe.getsockname()[1])


class Client:
    """The caller's end of a zygote."""

    def __init__(self) -> None:
        environment = dict(os.environ)
        # One thread only: a fork of a process with threads copies locks nobody will release.
        environment.update(
            OMP_NUM_THREADS="1",
            OPENBLAS_NUM_THREADS="1",
            MKL_NUM_THREADS="1",
            PYTHONUNBUFFERED="1",
            # pyarrow, where transformers finds it, starts one for its allocator
            JE_ARROW_MALLOC_CONF="background_thread:false",
        )
        script = Path(__file__).with_name("zygote.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        self.owner = os.getpid()
        kind, *_ = self.receive(START_SECONDS)
        if kind != "ready":
            message = f"the zygote said {kind!r} instead of 'ready'"
            raise RanksError(message)

    def send(self, *message: object) -> None:
        """Sends one request."""
        write_message(cast("BinaryIO", self.process.stdin), message)

    def receive(self, seconds: float) -> tuple[Any, ...]:
        """The next reply, or `("silent",)` when none came in time."""
        stream = cast("BinaryIO", self.process.stdout)
        if not select.select([stream], [], [], max(seconds, 0.0))[0]:
            return ("silent",)
        try:
            return cast("tuple[Any, ...]", read_message(stream))
        except EOFError:
            message = f"the zygote ended with code {self.process.wait()}"
            raise RanksError(message) from None

    def close(self) -> None:
        """Ends the zygote, and with it every rank left."""
        if self.owner != os.getpid():
            return
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_CLIENTS: list[Client] = []


def client() -> Client:
    """The zygote of this process, started at the first use."""
    alive = [one for one in _CLIENTS if one.process.poll() is None]
    if not alive:
        alive = [Client()]
        _CLIENTS[:] = alive
    return alive[0]


def zygote_pids() -> set[int]:
    """Process ids of what `run_ranks` keeps between calls."""
    return {one.process.pid for one in _CLIENTS}


@atexit.register
def close_client() -> None:
    """Ends this process's zygote, if any; conftest calls it at the end of the session."""
    while _CLIENTS:
        _CLIENTS.pop().close()


class Run:
    """One job on its way: who has ended, what was killed, what to say about the rest."""

    def __init__(
        self, *, job: Job, client: Client, delays: Mapping[int, float], stop_on_error: bool
    ) -> None:
        self._job = job
        self._client = client
        self._delays = dict(delays)
        self._stop_on_error = stop_on_error
        self._directory = Path(job.directory)
        self._codes: dict[int, int] = {}
        self._late: set[int] = set()
        self._entered: dict[int, float] = {}

    def watch(self) -> None:
        """Follows the ranks until all have ended, by themselves or at the deadline."""
        self._client.send("start", self._job)
        try:
            self._follow()
        except BaseException:
            self._stop()
            raise

    def _follow(self) -> None:
        limit = time.monotonic() + self._job.deadline_seconds
        while len(self._codes) < self._job.size:
            now = time.monotonic()
            if now >= limit:
                self._late = set(range(self._job.size)) - set(self._codes)
                self._stop()
                return
            self._kill(now)
            self._take(min(limit - now, KILL_SECONDS if self._delays else 1.0))
            if self._stop_on_error and self._failed():
                limit = min(limit, time.monotonic() + 10.0)

    def _kill(self, now: float) -> None:
        """Kills the ranks whose time in their function is up."""
        for rank, delay in list(self._delays.items()):
            if rank not in self._entered and (self._directory / f"entered.{rank}").exists():
                self._entered[rank] = now
            if now - self._entered.get(rank, now) >= delay:
                del self._delays[rank]
                self._client.send("signal", rank, signal.SIGKILL)

    def _take(self, seconds: float) -> None:
        kind, *details = self._client.receive(seconds)
        if kind == "ended":
            rank, code = details
            self._codes[rank] = code
        elif kind == "refused":
            raise RanksError(details[0])

    def _failed(self) -> bool:
        for rank, code in self._codes.items():
            outcome = self._outcome(rank)
            if code != 0 or outcome is None or outcome.error is not None:
                return True
        return False

    def _stop(self) -> None:
        """Asks every rank left for its stacks, then kills it."""
        left = set(range(self._job.size)) - set(self._codes)
        for rank in left:
            self._client.send("signal", rank, STACK_SIGNAL)
        time.sleep(STACK_SECONDS)
        for rank in left:
            self._client.send("signal", rank, signal.SIGKILL)
        limit = time.monotonic() + 10.0
        while len(self._codes) < self._job.size and time.monotonic() < limit:
            self._take(1.0)

    def _outcome(self, rank: int) -> Outcome | None:
        path = self._directory / f"result.{rank}"
        return cast("Outcome", pickle.loads(path.read_bytes())) if path.exists() else None

    def results(self, *, killed: set[int], keep_errors: bool) -> list[Any]:
        """The ranks' results, or a `RanksError` with everything known."""
        values: list[Any] = []
        errors: list[BaseException | None] = []
        complaints: list[str] = []
        for rank in range(self._job.size):
            outcome = self._outcome(rank)
            errors.append(outcome.error if outcome else None)
            if rank in self._late:
                complaints.append(self._report(rank, "did not end within the deadline"))
            elif outcome is None and rank in killed:
                values.append(Killed(rank))
            elif outcome is None:
                complaints.append(self._report(rank, f"ended with code {self._codes.get(rank)}"))
            elif outcome.error is None:
                values.append(outcome.value)
            elif keep_errors:
                values.append(outcome.error)
            else:
                complaints.append(self._report(rank, f"raised\n{outcome.trace}"))
        if complaints:
            raise RanksError("\n".join(complaints), errors)
        return values

    def _report(self, rank: int, what: str) -> str:
        place = self._read(f"place.{rank}")
        where = f" (last mark: {place})" if place else ""
        lines = [f"rank {rank} of {self._job.size}{where} {what}"]
        for title, name in (("its stacks", "stack"), ("the end of its output", "output")):
            text = self._read(f"{name}.{rank}")[-OUTPUT_TAIL:].strip()
            if text:
                lines.append(f"-- {title}:\n{text}")
        return "\n".join(lines)

    def _read(self, name: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self._directory / name).read_text(errors="replace")
        return ""
