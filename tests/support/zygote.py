"""The process that forks the ranks of `support.ranks.run_ranks`.

Importing torch takes seconds, so one zygote a pytest process imports it once and forks every rank.
It keeps to one thread, which is what makes the fork safe. It talks over its standard input and
output in length-prefixed pickles, knows which of its children still live (so that no signal ever
reaches a foreign process), and ends with its children when its input closes.

Run as a script by `support.ranks`; nothing else imports it, except for the rank-side helpers.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import selectors
import signal
import struct
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from types import ModuleType

PR_SET_PDEATHSIG = 1
STACK_SIGNAL = signal.SIGUSR1
GRACE_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of `run_ranks`, as the zygote sees it.

    Attributes:
        size: number of ranks.
        directory: folder of the job's files: payload, store, outputs, stacks, results.
        search_path: `sys.path` of the caller.
        working_directory: current directory of the caller.
        environment: variables set in every rank.
        preload: modules imported by the zygote before it forks (kept for later jobs).
        store: "file", "tcp" (rank 0 hosts it) or "none" (no process group is initialised).
        deadline_seconds: timeout of the default process group.
        kill_at: for some ranks, the name of the `mark` at which they kill themselves.
        threads: `torch.set_num_threads` of every rank.
        switch_seconds: time after which a thread of a rank gives way to another, as in the caller.
    """

    size: int
    directory: str
    search_path: tuple[str, ...]
    working_directory: str
    environment: dict[str, str]
    preload: tuple[str, ...]
    store: str
    port: int
    deadline_seconds: float
    kill_at: dict[int, str]
    threads: int
    switch_seconds: float


@dataclass(frozen=True, kw_only=True)
class Payload:
    """What a rank runs: a function found by module file and name, and its pickled arguments."""

    module: str
    path: str
    name: str
    arguments: bytes


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rank hands back."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


@dataclass(kw_only=True)
class RankState:
    """What a rank process knows of itself; empty outside one."""

    rank: int | None = None
    kill_at: str | None = None
    place: Path | None = None
    seen: list[str] = field(default_factory=list)


STATE = RankState()


class RemoteError(Exception):
    """Stands for an exception of a rank that could not be pickled."""


def write_message(stream: BinaryIO, message: object) -> None:
    """Writes one length-prefixed pickle."""
    blob = pickle.dumps(message)
    stream.write(struct.pack("<Q", len(blob)) + blob)
    stream.flush()


def read_message(stream: BinaryIO) -> Any:
    """Reads one length-prefixed pickle; raises `EOFError` when the other end is gone."""
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    (length,) = struct.unpack("<Q", head)
    blob = stream.read(length)
    if len(blob) < length:
        raise EOFError
    return pickle.loads(blob)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def load_module(name: str, path: str) -> ModuleType:
    """Imports `name` as usual where that finds `path`, else loads the file under that name."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is not None and Path(spec.origin).samefile(path):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        message = f"cannot load {name} from {path}"
        raise ImportError(message)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickles look themselves up
    spec.loader.exec_module(module)
    return module


def portable(error: BaseException, trace: str) -> BaseException:
    """The exception itself where it survives pickling, else a `RemoteError` with its text."""
    try:
        clone = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever a foreign __reduce__ raises
        return RemoteError(f"{type(error).__name__}: {error}\n{trace}")
    return error if type(clone) is type(error) else RemoteError(trace)


def join_default_group(job: Job, rank: int) -> None:
    """Initialises torch's default group with gloo over the job's store."""
    from datetime import timedelta

    import torch.distributed as dist

    timeout = timedelta(seconds=job.deadline_seconds)
    if job.store == "file":
        store: dist.Store = dist.FileStore(str(Path(job.directory) / "store"), job.size)
    else:
        store = dist.TCPStore("127.0.0.1", job.port, job.size, is_master=rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.size, timeout=timeout)


def leave_default_group() -> None:
    """Destroys the default group; says which other groups the function left behind."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    groups = len(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    if groups > 1:
        message = f"the rank left {groups - 1} process group(s) of its own"
        raise RuntimeError(message)


def leftover_threads() -> list[str]:
    """Names of the Python threads that the rank's function left running."""
    main = threading.main_thread()
    left = [thread for thread in threading.enumerate() if thread is not main]
    if left:
        # Those of a pool of the standard library end once nobody refers to it; a cycle of another library's may.
        gc.collect()
        limit = time.monotonic() + GRACE_SECONDS
        for thread in left:
            thread.join(max(limit - time.monotonic(), 0.0))
    return [thread.name for thread in left if thread.is_alive()]


def perform(job: Job, rank: int) -> Outcome:
    """Runs the job's function as `rank` and catches whatever comes out of it."""
    try:
        import torch

        torch.set_num_threads(job.threads)
        sys.setswitchinterval(job.switch_seconds)
        payload: Payload = pickle.loads((Path(job.directory) / "payload").read_bytes())
        function: Any = load_module(payload.module, payload.path)
        for part in payload.name.split("."):
            function = getattr(function, part)
        arguments = pickle.loads(payload.arguments)
        if job.store != "none":
            join_default_group(job, rank)
        (Path(job.directory) / f"entered.{rank}").touch()
        value = function(rank, job.size, *arguments)
        leave_default_group()
        threads = leftover_threads()
        if threads:
            message = f"the rank left threads running: {threads}"
            raise RuntimeError(message)
        return Outcome(value=value)
    except BaseException as error:  # noqa: BLE001 - a rank reports everything, SystemExit included
        trace = traceback.format_exc()
        return Outcome(error=portable(error, trace), trace=trace)


def redirect(directory: Path, rank: int) -> None:
    """Sends the rank's output to files and its stacks, on request, to another."""
    output = os.open(directory / f"output.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    os.close(output)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    stacks = (directory / f"stack.{rank}").open("w")
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)


def run_rank(job: Job, rank: int) -> None:
    """The life of a rank after the fork; does not return."""
    directory = Path(job.directory)
    code = 1
    try:
        die_with_parent()
        redirect(directory, rank)
        sys.path[:] = job.search_path
        os.chdir(job.working_directory)
        os.environ.update(job.environment)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(job.size),
            LOCAL_WORLD_SIZE=str(job.size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(job.port),
        )
        STATE.rank = rank
        STATE.kill_at = job.kill_at.get(rank)
        STATE.place = directory / f"place.{rank}"
        outcome = perform(job, rank)
        try:
            blob = pickle.dumps(outcome)
        except Exception:  # noqa: BLE001 - a result that cannot be pickled is the test's error
            trace = traceback.format_exc()
            blob = pickle.dumps(Outcome(error=RemoteError(trace), trace=trace))
        partial = directory / f"partial.{rank}"
        partial.write_bytes(blob)
        partial.rename(directory / f"result.{rank}")
        code = 0
    except BaseException:  # noqa: BLE001 - never unwind into the zygote's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Zygote:
    """The loop: takes one job at a time, forks its ranks, reports their ends."""

    def __init__(self, requests: BinaryIO, replies: BinaryIO) -> None:
        self._requests = requests
        self._replies = replies
        self._children: dict[int, int] = {}  # pid -> rank, as long as not reaped
        self._wakeup, self._wakeup_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Runs until the requests end; kills what still lives."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_end, warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            try:
                while True:
                    ready = [key.fileobj for key, _ in selector.select()]
                    if self._wakeup in ready:
                        os.read(self._wakeup, 4096)
                        self._reap()
                    if self._requests in ready:
                        self._handle(read_message(self._requests))
            except EOFError:
                pass
            finally:
                for pid in self._children:
                    os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        for pid in list(self._children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = self._children.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                write_message(self._replies, ("ended", rank, code))

    def _handle(self, message: tuple[Any, ...]) -> None:
        kind, *details = message
        if kind == "start":
            self._start(details[0])
        else:
            rank, number = details
            for pid, child in self._children.items():
                if child == rank:
                    os.kill(pid, number)

    def _start(self, job: Job) -> None:
        sys.path[:] = job.search_path
        for name in job.preload:
            importlib.import_module(name)
        gc.freeze()  # so that no collection in a rank walks through what the libraries made when they were imported
        tasks = Path("/proc/self/task")
        count = len(list(tasks.iterdir())) if tasks.is_dir() else 1
        if count != 1:
            write_message(self._replies, ("refused", f"the zygote has {count} threads"))
            return
        for rank in range(job.size):
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                run_rank(job, rank)
            self._children[pid] = rank
        write_message(self._replies, ("started", list(self._children)))


def main() -> None:
    """Entry point of the script."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print goes to stderr, not into the protocol
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    import torch.distributed

    write_message(replies, ("ready", torch.__version__))
    Zygote(requests, replies).serve()


if __name__ == "__main__":
    # Under its own name, so that a pickle of the caller and this process mean the same classes.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from support.zygote import main as run

    run()
