"""Optimizer states on NVMe when something goes wrong: refused at the start, or the right error, and nothing left behind."""

from __future__ import annotations

import _thread
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import gpt_batch, make_gpt
from support.ranks import mark
from support.training import (
    Recipe,
    adamw,
    assert_same_outcome,
    config,
    engine_for,
    ranks,
    train,
)
from torch import Tensor, nn

from zero_plugin import _native
from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import BudgetError, ConfigError, LaneError, OptimizerError, StoreError
from zero_plugin.runtime.buffers import SlabPool
from zero_plugin.store.store import NvmeStore

HERE = Path(__file__).parent
PAGE = 4096
THREE = 4 * 3 * PAGE


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that stands for a disk and is empty again at the end."""
    folder = tmp_path / "disk"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []


def on_nvme(disk: Path, **settings: Any) -> dict[str, Any]:
    return {
        "optimizer": "nvme",
        "nvme_path": disk,
        "nvme_buffer_bytes": THREE,
        "bucket_bytes": "1MiB",
        "backend": "threads",
        **settings,
    }


def small_gpt() -> Any:
    return make_gpt(torch.bfloat16, width=24, layers=1)


def step(engine: ZeroEngine, optimizer: Any, model: Any, number: int) -> None:
    engine.backward(model(gpt_batch(number)))
    optimizer.step()
    engine.wait_for_update()
    optimizer.zero_grad()


# Refused at the start ------------------------------------------------------------------------------------------------


def refuse(disk: Path, kind: type[BaseException], match: str, **settings: Any) -> None:
    model = small_gpt()
    threads = threading.active_count()
    with (
        pytest.raises(kind, match=match),
        engine_for(model, **on_nvme(disk, **settings)) as (engine, _),
    ):
        step(engine, engine.optimizers[0], model, 0)
    assert threading.active_count() == threads
    # The model is plain torch's again.
    model(gpt_batch(0)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_path_that_cannot_be_used(disk: Path, tmp_path: Path, stage: int) -> None:
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.write_text("")
    refuse(disk, ConfigError, "nvme_path is not set", nvme_path=None, stage=stage)
    refuse(disk, ConfigError, f"{missing}' does not exist", nvme_path=missing, stage=stage)
    refuse(disk, ConfigError, f"{file}' is not a folder", nvme_path=file, stage=stage)
    refuse(disk, ConfigError, "twice", nvme_path=(disk, disk), stage=stage)
    assert not missing.exists()


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write to every folder"
)
def test_a_path_that_is_not_writable(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    refuse(folder, ConfigError, "is not writable")


def test_a_path_that_root_cannot_write_to(disk: Path) -> None:
    refuse(disk, ConfigError, "is not writable|does not take a new folder", nvme_path="/proc/self")


def test_optimizers_without_a_compiled_rule(disk: Path) -> None:
    for build, culprit in (
        (lambda p: torch.optim.Adam(p, amsgrad=True), "Adam.*amsgrad"),
        (torch.optim.RMSprop, "RMSprop"),
    ):
        model = small_gpt()
        with (
            pytest.raises(OptimizerError, match=rf"{culprit}.*optimizer='host'"),
            engine_for(model, build(model.parameters()), **on_nvme(disk)),
        ):
            pass


def test_a_limit_that_is_too_small_is_said_before_anything_is_reserved(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_for(small_gpt(), **on_nvme(disk)) as (engine, _):
        needed = sum(engine.memory()["nvme"].values())
    with engine_for(small_gpt(), **on_nvme(disk, nvme_limit=needed)) as (engine, optimizer):
        step(engine, optimizer, engine.model, 0)
    reserved: list[Any] = []
    monkeypatch.setattr(NvmeStore, "reserve", lambda *a: reserved.append(a))
    monkeypatch.setattr(SlabPool, "_allocate", lambda *a: reserved.append(a))
    refuse(
        disk,
        BudgetError,
        rf"{needed:,} bytes of nvme memory.*nvme_limit is {needed - 1:,}",
        nvme_limit=needed - 1,
    )
    refuse(
        disk,
        BudgetError,
        rf"nvme_buffer_bytes={THREE - 1:,} cannot hold 4 tiles of 3 states.*at least {THREE:,} bytes",
        nvme_buffer_bytes=THREE - 1,
    )
    refuse(disk, BudgetError, "host_limit is 1,000", host_limit=1000)
    assert reserved == []


def test_the_cache_counts_towards_the_host_limit(disk: Path) -> None:
    with engine_for(small_gpt(), **on_nvme(disk)) as (engine, _):
        needed = sum(engine.memory()["host"].values())
    limits = {"host_limit": needed + 2**20, "nvme_cache_bytes": 2**20}
    with engine_for(small_gpt(), **on_nvme(disk, **limits)):
        pass
    refuse(
        disk, BudgetError, "host_limit", host_limit=needed + 2**20, nvme_cache_bytes=2**20 + THREE
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 12 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is refused here (it needs root)")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_found_at_the_start(small_disk: Path) -> None:
    model = nn.Linear(1000, 2000)
    pattern = rf"cannot reserve [0-9,]+ bytes in {small_disk}.* are free: ENOSPC"
    with (
        pytest.raises(StoreError, match=pattern),
        engine_for(model, **on_nvme(small_disk, nvme_buffer_bytes="1MiB", bucket_bytes="32MiB")),
    ):
        pass
    assert list(small_disk.iterdir()) == []
    assert "tmpfs" in Path("/proc/mounts").read_text()


def test_states_on_a_file_system_without_direct_io(small_disk: Path) -> None:
    recipe = Recipe(steps=3, width=24, layers=1, dtype=torch.bfloat16)
    assert_same_outcome(train(recipe, **on_nvme(small_disk)), train(recipe))
    assert list(small_disk.iterdir()) == []


# Faults while training -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and Linux, to build what makes I/O fail")
    built = tmp_path_factory.mktemp("shim") / "shim.so"
    source = HERE.parent / "store" / "fault_shim.c"
    command = [compiler, "-O1", "-shared", "-fPIC", str(source), "-o", str(built), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return built


@pytest.fixture(scope="module", params=["threads", "uring"])
def ran(
    request: pytest.FixtureRequest, shim: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """All faults in one process."""
    engine = _native.IoEngine("auto", 1, PAGE)
    name, reason = engine.name, engine.reason
    engine.close()
    if request.param == "uring" and name != "uring":
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("disk")
    done = subprocess.run(
        [
            sys.executable,
            str(HERE / "nvme_scenarios.py"),
            "faults",
            str(shim),
            request.param,
            str(folder),
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ | {"LD_PRELOAD": str(shim)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_fault_stops_training_with_its_reason_and_no_wrong_weight(ran: dict[str, Any]) -> None:
    failing = {name: found for name, found in ran.items() if not name.endswith(" short")}
    assert len(failing) == 24
    for name, found in failing.items():
        assert found["hits"] >= 1, name
        assert found["raised_at"] is not None, name
        assert found["wrong"] == [], name
        # A failed read stops its own step; a failed write the next use of the tile.
        assert found["late"] <= (0 if name.startswith("read") else 1), name
        assert found["type"] == "LaneError" or "inline" in name, (name, found)
        assert found["is_store"], (name, found)
        assert re.search(r"(reading|writing) [0-9,]+ bytes at offset [0-9,]+ of ", found["message"])
        assert "zero-plugin-run-" in found["message"], name
        for error in ("EIO", "ENOSPC"):
            if error in name:
                assert f"{error} (" in found["message"], name
        # Under chaos the weights that were to come are NaN by now, and the step is skipped for that.
        assert found["again"] or "chaos" in name, f"{name}: the next step took the disk's bytes"
        # Plain weights cannot be made of shards that were not written to the end; all else is closed.
        assert not found["close_raised"] or "stage 3" in name, name
        assert found["seconds"] < 10, name
        assert found["closing"] < 5, name
        assert found["left"] == [], name


@pytest.mark.slow
def test_what_falls_short_is_gone_on_with(ran: dict[str, Any]) -> None:
    for act in ("read", "write"):
        found = ran[f"{act} short"]
        assert found["hits"] == 1
        assert found["raised_at"] is None
        assert found["wrong"] == []


def only_slab(disk: Path) -> Path:
    (folder,) = disk.iterdir()
    return folder / "slab"


def test_a_file_that_something_truncated(disk: Path) -> None:
    model = small_gpt()
    with engine_for(model, **on_nvme(disk)) as (engine, optimizer):
        step(engine, optimizer, model, 0)
        engine.drain()
        slab = only_slab(disk)
        os.truncate(slab, slab.stat().st_size // 2)
        with pytest.raises(LaneError) as caught:
            step(engine, optimizer, model, 1)
        assert isinstance(caught.value.__cause__, StoreError)
        assert "the file ends there" in str(caught.value.__cause__)


def test_bytes_that_changed_on_the_disk_are_found_by_their_checksum(disk: Path) -> None:
    model = small_gpt()
    with engine_for(model, **on_nvme(disk, nvme_checksum=True)) as (engine, optimizer):
        step(engine, optimizer, model, 0)
        engine.drain()
        with only_slab(disk).open("r+b") as file:
            file.seek(5 * PAGE + 17)
            byte = file.read(1)
            file.seek(5 * PAGE + 17)
            file.write(bytes([byte[0] ^ 1]))
            file.flush()
            os.fsync(file.fileno())
        with pytest.raises(LaneError) as caught:
            step(engine, optimizer, model, 1)
        assert isinstance(caught.value.__cause__, StoreError)
        assert "checksum differs" in str(caught.value.__cause__)


# One rank of several ------------------------------------------------------------------------------------------------


def one_rank_fails(rank: int, size: int, disk: Path, stage: int) -> float:
    """In a rank: rank 1 cannot read from its third step on; returns by raising."""
    model = small_gpt()
    original = NvmeStore.read
    failing = threading.Event()

    def read(self: NvmeStore, extent: Any, offset: int, destination: Tensor) -> None:
        if failing.is_set() and offset:
            raise StoreError("reading failed: EIO")
        original(self, extent, offset, destination)

    NvmeStore.read = read
    try:
        with engine_for(model, **on_nvme(disk, stage=stage)) as (engine, optimizer):
            for number in range(6):
                if rank == 1 and number == 2:
                    failing.set()
                mark(f"step {number}")
                step(engine, optimizer, model, number)
    finally:
        NvmeStore.read = original
    return 0.0


@pytest.mark.dist
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_rank_whose_disk_fails_stops_both(disk: Path, stage: int) -> None:
    begin = time.monotonic()
    first, second = ranks(2, one_rank_fails, disk, stage, errors="return")
    assert time.monotonic() - begin < 20
    assert isinstance(second, LaneError)
    assert "EIO" in str(second.__cause__) or "EIO" in str(second)
    assert isinstance(first, Exception), "rank 0 went on alone"


# Killed --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_killed_run_left_is_removed_by_the_next_and_no_other(disk: Path) -> None:
    recipe = Recipe(steps=3, width=24, layers=1, dtype=torch.bfloat16)
    expected = train(recipe)
    draw = random.Random(7)
    for settings in (["nvme_engine=threads"], [], ["nvme_cache_bytes=65536"]):
        command = [sys.executable, str(HERE / "nvme_scenarios.py"), "train", str(disk), *settings]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("step")
            (theirs,) = disk.iterdir()
            # A run beside it leaves it alone.
            assert_same_outcome(train(recipe, **on_nvme(disk)), expected)
            assert list(disk.iterdir()) == [theirs]
            time.sleep(draw.uniform(0.0, 0.2))
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=20)
        assert list(disk.iterdir()) == [theirs]
        with engine_for(recipe.model(), **on_nvme(disk)):
            (mine,) = disk.iterdir()
            assert mine != theirs
        assert list(disk.iterdir()) == []
        assert_same_outcome(train(recipe, **on_nvme(disk)), expected)


# Interrupted ---------------------------------------------------------------------------------------------------------


def step_until_interrupted(optimizer: Any, delay: float) -> None:
    timer = threading.Timer(delay, _thread.interrupt_main)
    try:
        timer.start()
        while True:
            optimizer.step()
            time.sleep(0.001)
    finally:
        timer.join()


@pytest.mark.parametrize("cache", [0, 6 * 3 * PAGE, "4MiB"])
def test_an_interrupt_in_the_step(disk: Path, cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("read", "write"):
        original = getattr(NvmeStore, name)

        def slow(self: Any, *arguments: Any, original: Any = original) -> None:
            time.sleep(0.02)
            original(self, *arguments)

        monkeypatch.setattr(NvmeStore, name, slow)
    threads = threading.active_count()
    for delay in (0.01, 0.03, 0.1, 0.16):
        model = small_gpt()
        with engine_for(model, **on_nvme(disk, nvme_cache_bytes=cache)) as (engine, optimizer):
            step(engine, optimizer, model, 0)
            engine.drain()
            engine.backward(model(gpt_batch(1)))
            with pytest.raises(KeyboardInterrupt):
                step_until_interrupted(optimizer, delay)
            engine.abort_step()
            # What is there can still be looked at; every state is of the step before or of this one.
            state = optimizer.state_dict()
            assert all(e["exp_avg_sq"].isfinite().all() for e in state["state"].values())
        assert threading.active_count() == threads
        assert list(disk.iterdir()) == []


def test_an_error_of_the_forward_leaves_the_states_good(disk: Path) -> None:
    recipe = Recipe(steps=4, width=24, layers=1, dtype=torch.bfloat16)
    expected = train(recipe)
    model = recipe.model()
    optimizer = adamw(model.parameters())
    engine = ZeroEngine(model, optimizer, config(**on_nvme(disk, nvme_cache_bytes=4 * 3 * PAGE)))
    try:
        for number in range(4):
            with pytest.raises(ZeroDivisionError):
                engine.backward(model(gpt_batch(number)) * (1 / 0))
            step(engine, optimizer, model, number)
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected.weights[name])
    finally:
        engine.close()
