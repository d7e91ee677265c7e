"""A run's folder is its own: unseen by other users, untouched by other runs, removed when its run was killed."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zero_plugin.errors import ConfigError
from zero_plugin.store.folder import RunFolder, remove_leftovers

HOLD = """
import sys, time
from pathlib import Path
from zero_plugin.store.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]), rank=3)
(folder.path / "slab").write_bytes(b"x" * 1000)
print(folder.path, flush=True)
time.sleep(100)
"""

WRITE = """
import sys, torch
from zero_plugin.store.store import NvmeStore
store = NvmeStore([sys.argv[1]])
extent = store.reserve(64 << 20, "states")
data = torch.ones(64 << 20, dtype=torch.uint8)
print("writing", flush=True)
while True:
    store.write(extent, 0, data)
"""


@pytest.fixture
def start() -> Iterator[object]:
    """Starts children; killed after the test."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for child in started:
        child.kill()
        child.wait(20)
        if child.stdout:
            child.stdout.close()


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_only_the_owner_can_look_in(tmp_path: Path) -> None:
    for umask in (0o000, 0o777):
        before = os.umask(umask)
        try:
            folder = RunFolder(tmp_path, rank=0)
        finally:
            os.umask(before)
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert all(f.stat().st_mode & 0o077 == 0 for f in folder.path.iterdir())
        folder.close()


def test_slab_is_for_the_owner_only(make_store) -> None:
    before = os.umask(0)
    try:
        store = make_store()
    finally:
        os.umask(before)
    folder = store.describe().paths[0].folder
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "lock": 0o600,
        "slab": 0o600,
    }


def test_leftovers_of_a_killed_run_are_removed_and_said(
    tmp_path: Path, start, caplog: pytest.LogCaptureFixture
) -> None:
    child = start(HOLD, tmp_path)
    left = Path(first_line(child))
    assert left.name.endswith("-rank3")
    assert remove_leftovers(tmp_path) == []  # it runs
    assert (left / "slab").stat().st_size == 1000
    child.send_signal(signal.SIGKILL)
    child.wait(20)
    with caplog.at_level(logging.WARNING, logger="zero_plugin"):
        folder = RunFolder(tmp_path, rank=0)
    assert folder.removed == [left]
    assert not left.exists()
    assert f"removed {left}: 1,000 bytes left by a run that was killed" in caplog.text
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_killed_at_random_moments_leaves_nothing_for_long(
    make_store, disks, start
) -> None:
    for pause in (0.0, 0.05, 0.2):
        child = start(WRITE, disks[0])
        assert first_line(child) == "writing"
        time.sleep(pause)
        child.send_signal(signal.SIGKILL)
        child.wait(20)
        assert len(list(disks[0].iterdir())) == 1
        store = make_store()
        own = store.describe().paths[0].folder
        assert list(disks[0].iterdir()) == [own]
        store.close()


def test_two_runs_on_one_path_do_not_touch_each_other(tmp_path: Path, start) -> None:
    other = Path(first_line(start(HOLD, tmp_path)))
    mine, twin = RunFolder(tmp_path, rank=3), RunFolder(tmp_path, rank=3)
    assert len({mine.path, twin.path, other}) == 3
    mine.close()
    mine.close()
    assert twin.path.is_dir()
    assert (other / "slab").read_bytes() == b"x" * 1000
    twin.close()
    assert list(tmp_path.iterdir()) == [other]


def test_a_lock_lives_as_long_as_a_forked_child(tmp_path: Path) -> None:
    """A loader worker that outlives its killed parent still has the file open."""
    code = """
import os, sys, time
from pathlib import Path
from zero_plugin.store.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]), rank=0)
child = os.fork()
if child == 0:
    os.close(1); os.close(2)
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    child = int(done.stdout)
    try:
        assert remove_leftovers(tmp_path) == []
    finally:
        os.kill(child, signal.SIGKILL)
    limit = time.monotonic() + 10
    while not (removed := remove_leftovers(tmp_path)) and time.monotonic() < limit:
        time.sleep(0.02)
    assert len(removed) == 1


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    name = "zero-plugin-run-0123456789abcdef-rank0"
    target = tmp_path / "target"
    target.mkdir()
    (target / "lock").touch()
    paths = tmp_path / "paths"
    paths.mkdir()
    (paths / name).symlink_to(target)
    (paths / "zero-plugin-run-short-rank0").mkdir()
    (paths / (name + "0")).touch()
    young = paths / (name + "1")
    young.mkdir()  # in the making: no lock yet
    assert remove_leftovers(paths) == []
    assert (target / "lock").exists()
    long_ago = time.time_ns() / 1e9 - 7200
    os.utime(young, (long_ago, long_ago))
    assert remove_leftovers(paths) == [young]
    assert len(list(paths.iterdir())) == 3


def test_a_folder_of_another_user_stays(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make another user's folder")
    folder = tmp_path / "zero-plugin-run-0123456789abcdef-rank0"
    folder.mkdir()
    (folder / "lock").touch()
    os.chown(folder, 12345, 12345)
    assert remove_leftovers(tmp_path) == []
    assert (folder / "lock").exists()


def test_a_folder_taken_away_in_the_making_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run finds the lock file before it is locked, takes it for a leftover and removes it."""
    real, taken = fcntl.flock, []

    def slow_lock(descriptor: int, operation: int) -> None:
        if not taken:
            taken.append(next(tmp_path.iterdir()))
            monkeypatch.setattr(fcntl, "flock", real)
            assert remove_leftovers(tmp_path) == taken
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", slow_lock)
    folder = RunFolder(tmp_path, rank=0)
    assert taken
    assert list(tmp_path.iterdir()) == [folder.path]
    folder.close()


def test_a_folder_whose_lock_is_lost_for_good_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match="taken away 20 times"):
        RunFolder(tmp_path, rank=0)
