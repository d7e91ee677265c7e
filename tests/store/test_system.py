"""Full, small, read-only and slow file systems, limits on the process, and kernels that refuse io_uring."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zero_plugin.errors import ConfigError, StoreError
from zero_plugin.store.store import NvmeStore

MIB = 1 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 20 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if not mount("-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)):
        pytest.skip("mounting is refused here (it needs root)")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def mount(*arguments: str) -> bool:
    try:
        return (
            subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0
        )
    except FileNotFoundError:
        return False


def test_a_full_disk_is_found_at_the_start(small: Path, engine: str) -> None:
    store = NvmeStore([small], engine=engine)  # type: ignore[arg-type]
    first = store.reserve(8 * MIB, "first")
    with pytest.raises(
        StoreError,
        match=rf"cannot reserve 33,554,432 bytes in {small}.* are free: ENOSPC .*lower nvme_limit",
    ) as caught:
        store.reserve(32 * MIB, "second")
    assert caught.value.errno == 28
    source = torch.arange(8 * MIB, dtype=torch.int64).to(torch.uint8)
    back = torch.zeros_like(source)
    store.write(first, 0, source)
    store.read(first, 0, back)
    assert torch.equal(back, source)
    store.reserve(8 * MIB, "third")
    store.close()
    assert list(small.iterdir()) == []


def test_a_full_second_disk_takes_nothing_from_the_first(small: Path, tmp_path: Path) -> None:
    store = NvmeStore([tmp_path, small])
    with pytest.raises(StoreError, match="ENOSPC"):
        store.reserve(100 * MIB, "states")
    assert [path.folder.joinpath("slab").stat().st_size for path in store.describe().paths] == [
        0,
        0,
    ]
    assert store.reserved_bytes == 0
    store.close()


def test_a_disk_too_small_to_be_measured_works(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    if not mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)):
        pytest.skip("mounting is refused here (it needs root)")
    try:
        store = NvmeStore([folder])
        assert store.describe().paths[0].read_mb is None
        extent = store.reserve(16384, "states")
        source = torch.arange(4096, dtype=torch.float32)
        back = torch.zeros(4096)
        store.write(extent, 0, source)
        store.read(extent, 0, back)
        assert torch.equal(back, source)
        store.close()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_file_system_without_direct_io_is_said(
    small: Path, caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    with caplog.at_level(logging.WARNING, logger="zero_plugin"):
        store = NvmeStore([small], engine=engine)  # type: ignore[arg-type]
    description = store.describe().paths[0]
    assert (description.file_system, description.direct) == ("tmpfs", False)
    assert f"nvme_path {small} lies on tmpfs, which has no direct I/O" in caplog.text
    assert "through the page cache" in str(store.describe())
    store.close()


def test_a_read_only_file_system_is_refused(small: Path) -> None:
    if not mount("-o", "remount,ro", str(small)):
        pytest.skip("remounting is refused here")
    with pytest.raises(ConfigError, match=r"is not writable|EROFS"):
        NvmeStore([small])


def test_a_file_system_that_turns_read_only_or_vanishes(small: Path, engine: str) -> None:
    """Lazy unmounting takes the name away and leaves the open file: its bytes stay good to the end."""
    store = NvmeStore([small], engine=engine)  # type: ignore[arg-type]
    extent = store.reserve(MIB, "states")
    source = torch.full((MIB,), 9, dtype=torch.uint8)
    store.write(extent, 0, source)
    subprocess.run(["umount", "-l", str(small)], check=True)
    back = torch.zeros_like(source)
    store.read(extent, 0, back)
    assert torch.equal(back, source)
    store.close()
    assert mount("-t", "tmpfs", "-o", "size=20m", "tmpfs", str(small))  # for the fixture to unmount


# ------------------------------------------------------------------ what the process may do

CHILD = """
import sys
{prepare}
import torch
from zero_plugin.store.store import NvmeStore
from zero_plugin.errors import StoreError
store = NvmeStore([sys.argv[1]], engine={engine!r})
print(store.describe().engine, "|", store.describe().reason)
try:
    extent = store.reserve({nbytes}, "states")
    source = torch.arange({nbytes} // 8)
    back = torch.zeros_like(source)
    store.write(extent, 0, source)
    store.read(extent, 0, back)
    print("equal" if torch.equal(source, back) else "WRONG", store.registration())
except StoreError as error:
    print(error)
store.close()
"""

# struct sock_filter: the call's number; refuse what is listed with an errno; allow the rest.
SECCOMP = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
def refuse(numbers, code):
    rules = [(0x20, 0, 0, 0)]
    for n in numbers:
        rules += [(0x15, 0, 1, n), (0x06, 0, 0, 0x00050000 | code)]
    rules.append((0x06, 0, 0, 0x7FFF0000))
    packed = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    buffer = ctypes.create_string_buffer(packed)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(buffer)))
    libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    done = libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.addressof(program), 0, 0)
    if done:
        sys.exit("no seccomp: " + str(ctypes.get_errno()))
"""


def run_child(
    folder: Path, prepare: str, *, engine: str = "auto", nbytes: int = 3 * MIB
) -> list[str]:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            CHILD.format(prepare=prepare, engine=engine, nbytes=nbytes),
            str(folder),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if "no seccomp" in done.stderr:
        pytest.skip("this system has no seccomp filters")
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    return done.stdout.splitlines()


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="system call numbers of these machines"
)
@pytest.mark.parametrize(
    ("numbers", "code", "reason"),
    [
        ("[425, 426, 427]", 1, "io_uring is refused (io_uring_setup: Operation not permitted)"),
        ("[425]", 38, "io_uring is refused (io_uring_setup: Function not implemented)"),
        ("[425]", 12, "io_uring is refused (io_uring_setup: Cannot allocate memory)"),
        ("[426]", 1, "io_uring_enter is refused (Operation not permitted)"),
        ("[427]", 1, "too old"),
    ],
    ids=["EPERM", "ENOSYS", "ENOMEM", "enter", "register"],
)
def test_where_io_uring_is_refused_threads_take_over_and_say_so(
    tmp_path: Path, numbers: str, code: int, reason: str, io_uring_refusal: str
) -> None:
    if io_uring_refusal:
        pytest.skip(io_uring_refusal)
    chosen, outcome = run_child(tmp_path, SECCOMP + f"refuse({numbers}, {code})")
    assert chosen.startswith("threads | ")
    assert reason in chosen
    assert "the thread pool is used instead" in chosen
    assert outcome.startswith("equal")


def test_where_io_uring_works_it_is_chosen(tmp_path: Path, io_uring_refusal: str) -> None:
    if io_uring_refusal:
        pytest.skip(io_uring_refusal)
    assert run_child(tmp_path, "")[0] == "uring | io_uring works here"


@pytest.mark.parametrize("name", ["threads", "uring"])
def test_a_limit_on_file_sizes(tmp_path: Path, name: str, io_uring_refusal: str) -> None:
    if name == "uring" and io_uring_refusal:
        pytest.skip(io_uring_refusal)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (12 << 20, 12 << 20))"
    _, outcome = run_child(tmp_path, limit, engine=name, nbytes=32 * MIB)
    assert "cannot reserve 33,554,432 bytes" in outcome
    assert "EFBIG" in outcome
    assert "ulimit -f" in outcome


def test_memory_that_may_not_be_locked_is_used_as_it_is(io_uring_refusal: str) -> None:
    """`ulimit -l`: registering is refused, reading and writing are not."""
    if io_uring_refusal or os.geteuid() != 0:
        pytest.skip(io_uring_refusal or "needs root, to become a user without its rights")
    code = """
import os, resource, sys, tempfile, torch
from zero_plugin.store.store import NvmeStore
from zero_plugin.runtime.memory import allocate_host
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with tempfile.TemporaryDirectory() as folder:
    store = NvmeStore([folder], engine="uring")
    memory = allocate_host(8 << 20)
    store.register(memory)
    extent = store.reserve(8 << 20, "states")
    memory.fill_(3)
    store.write(extent, 0, memory)
    memory.zero_()
    store.read(extent, 0, memory)
    print(bool(memory.eq(3).all()), store.registration())
    store.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True memory not registered (ulimit -l): Cannot allocate memory")
