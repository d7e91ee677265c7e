"""What a run is told of, with readings made up: once each, with the value seen and the cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import TinyMLP
from support.training import engine_for

from zero_plugin.machine.figures import tokens_of
from zero_plugin.runtime.alarms import Alarms, disk_trouble, is_spinning, warn_of_disk
from zero_plugin.trace import Meter

GIB = 2**30


class Run:
    """A run of faked steps."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.left, self.own, self.now = 32 * GIB, GIB, 0.0
        self.alarms = Alarms(
            available=lambda: self.left,
            own=lambda: self.own,
            total=64 * GIB,
            clock=lambda: self.now,
        )

    def steps(self, count: int = 16, *, stalled: float = 0.0, rate: float = 0.0) -> None:
        for _ in range(count):
            self.now += 1.0
            self.meter.waited("update", stalled)
            if rate:
                self.meter.transferred(int(rate), 1.0)
            self.alarms(self.meter)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "zero_plugin"]


def test_a_calm_run_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.steps(96, stalled=0.1, rate=1e9)
    assert messages(caplog) == []


def test_a_small_batch_is_told_the_tokens_that_would_hide_the_update(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run()
    run.meter.tokens = 1000
    run.steps(64, stalled=0.5)
    (text,) = messages(caplog)
    assert "50% of the time" in text
    assert "2,000 tokens instead of 1,000" in text
    again = Run()
    again.steps(64, stalled=0.75)
    assert "4.0 times the tokens" in messages(caplog)[1]


def test_a_throttled_disk_is_told(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.steps(48, rate=1e9)
    assert messages(caplog) == []
    run.steps(48, rate=3e8)
    (text,) = messages(caplog)
    assert "300 MB/s, after 1000 before" in text


def test_memory_that_others_take_is_told(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.steps()
    # The run's own growth is its own business.
    run.left, run.own = 2 * GIB, 31 * GIB
    run.steps()
    assert messages(caplog) == []
    run.own = 11 * GIB
    run.steps(64)
    (text,) = messages(caplog)
    assert "2.00 GiB of host memory are left, and other processes took 20.00 GiB" in text


@pytest.mark.parametrize(
    ("file_system", "said"),
    [("tmpfs", "is memory"), ("nfs4", "not a local disk"), ("fuse.sshfs", "not a local disk")],
)
def test_a_bad_place_for_files_is_told_at_the_start(
    file_system: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_disk(tmp_path, file_system)
    (text,) = messages(caplog)
    assert said in text
    assert str(tmp_path) in text


def test_a_spinning_disk_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    number = tmp_path.stat().st_dev
    queue = tmp_path / f"{os.major(number)}:{os.minor(number)}" / "queue"
    queue.mkdir(parents=True)
    for said in ("0", "1"):
        (queue / "rotational").write_text(said + "\n")
        assert is_spinning(tmp_path, tmp_path) is (said == "1")
    monkeypatch.setattr("zero_plugin.runtime.alarms.is_spinning", lambda path: True)
    assert "spinning" in (disk_trouble(tmp_path, "ext4", 180.0) or "")
    assert disk_trouble(tmp_path, "ext4", 2000.0) is None


def test_an_engine_asks_at_each_step_and_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(
        "zero_plugin.resources.warn_of_disk", lambda path, kind, rate: told.append((path, kind))
    )
    model = TinyMLP()
    with engine_for(model, optimizer="nvme", nvme_path=tmp_path) as (engine, optimizer):
        assert [path for path, _ in told] == [tmp_path]
        meter = engine._resources.backend.meter
        assert isinstance(meter.watcher, Alarms)
        steps: list[Meter] = []
        meter.watcher = steps.append
        engine.note_tokens(7)
        for _ in range(2):
            engine.backward(model(torch.ones(2, 7)).sum())
            optimizer.step()
            optimizer.zero_grad()
        engine.drain()
        assert steps == [meter, meter]
        assert meter.tokens == 7
        nbytes, seconds = meter.transfers()
        ledger = engine.ledger()
        assert nbytes >= ledger["nvme_read"] > 0
        assert seconds > 0


def test_tokens_of_a_batch() -> None:
    words = torch.zeros(3, 5, dtype=torch.long)
    assert tokens_of({"input_ids": words, "labels": torch.zeros(3)}) == 15
    assert tokens_of([torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)]) == 4
    assert tokens_of("text") == 0
