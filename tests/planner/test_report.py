"""Step figures and the report that draws them beside the timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import gpt_batch, make_gpt
from support.training import engine_for

from zero_plugin import cli
from zero_plugin.machine.figures import StepFigures, read_steps
from zero_plugin.runtime.threads import Latency
from zero_plugin.trace import STALL_CAUSES


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a short run left its trace and its figures."""
    folder = tmp_path_factory.mktemp("run")
    model = make_gpt(torch.bfloat16, width=16)
    last: dict[str, Any] = {}
    with engine_for(model, trace=folder / "trace.json") as (engine, optimizer):
        figures = StepFigures(engine, folder)
        assert figures.summary() == "no step was taken"
        for step in range(3):
            engine.backward(model(gpt_batch(step)))
            optimizer.step()
            optimizer.zero_grad()
            engine.drain()
            last = figures.step()
        held = {tier: sum(kinds.values()) for tier, kinds in engine.memory().items()}
        assert {tier: last[f"zero/{tier}_bytes"] for tier in held} == held
        elements = sum(p.numel() for p in model.parameters())
        # What a step moves: a bf16 gradient down for each parameter, padding aside.
        assert 2 * elements <= last["zero/device_to_host"] <= 2.5 * elements
        assert last["zero/updated_parameters_per_second"] > 0
        # `drain` blocked on the update, once a step.
        assert last["zero/stall_seconds"] >= last["zero/stall_update_seconds"] > 0
        assert figures.summary().startswith("3 steps of ")
        assert "of the time waiting" in figures.summary()
        assert "million parameters/s" in figures.summary()
    return folder


def test_stalls_are_told_apart_and_misses_counted() -> None:
    slow = {"fetch weights": Latency(seconds=0.003), "update": Latency(seconds=0.02)}
    model = make_gpt(width=16)
    with engine_for(model, stage=3, params="host") as (engine, optimizer):
        backend: Any = engine._resources.backend
        backend._latency = slow  # Of lanes that are made later.
        for worker in backend._workers:
            worker._latency = slow.get(worker._thread.name.removeprefix("zero-lane-"))
        before = engine.figures()
        engine.backward(model(gpt_batch(0)))
        optimizer.step()
        first = engine.figures()
        engine.drain()
        after = engine.figures()
    gathers = first["prefetch_misses"] - before["prefetch_misses"]
    assert gathers >= 3
    assert first["stall_seconds"]["gather"] >= 0.003 * gathers
    assert after["stall_seconds"]["update"] >= 0.015
    assert after["stall_seconds"].keys() <= set(STALL_CAUSES)
    assert after["updated_parameters"] >= sum(p.numel() for p in model.parameters())


def test_torchs_profiler_shows_the_lanes_by_name() -> None:
    model = make_gpt(width=16)
    native: Any = torch._C
    everyone: Any = {
        "experimental_config": native._profiler._ExperimentalConfig(profile_all_threads=True)
    }
    with engine_for(model) as (engine, optimizer):
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], **everyone
        ) as profile:
            engine.backward(model(gpt_batch(0)))
            optimizer.step()
            engine.drain()
        shown = {row.key.partition(":")[0] for row in profile.key_averages()}
        assert {"offload", "update", "upload"} <= shown
        assert any(row.key.startswith("update: update block 0") for row in profile.key_averages())


def test_a_line_for_each_step(run: Path) -> None:
    lines = read_steps(run / "zero-plugin-steps.rank0.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["zero/step_seconds"] > 0 for line in lines)


def test_the_report_says_and_draws(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the pictures are drawn with it")
    assert cli.main(["report", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "3 steps" in shown
    assert "host: at most" in shown
    assert "update" in shown
    for name in ("zero-plugin-steps.rank0.png", "trace.png"):
        assert (run / name).read_bytes().startswith(b"\x89PNG")


def test_a_report_without_pictures(run: Path, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text((run / "trace.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps({"no": "trace"}))
    assert cli.main(["report", str(tmp_path), "--text"]) == 0
    assert not list(tmp_path.glob("*.png"))


def test_nothing_to_report_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "neither a trace" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "absent")]) == 2
    assert "is not a folder" in capsys.readouterr().err
