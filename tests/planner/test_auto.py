"""`ZeroConfig.auto` and `strategy="zero_auto"`: measured, planned, agreed on, applied; and stopped before training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import make_gpt
from support.training import ranks

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import BudgetError, ConfigError
from zero_plugin.machine import cache

KEPT = {
    "update": 8e9,
    "flops": 5e10,
    "up": 4e9,
    "down": 4e9,
    "device_bandwidth": 9e9,
    "collective": 5e8,
}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that was measured, so that no test measures anything."""
    monkeypatch.setenv("HOME", str(tmp_path))
    cache.save_measurement(KEPT)
    return tmp_path


def test_a_config_is_planned_and_logged(measured: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="zero_plugin"):
        config = ZeroConfig.auto(make_gpt(torch.bfloat16), batch=4, seq=12, nonfinite="raise")
    assert config.nonfinite == "raise"
    lines = [record.getMessage() for record in caplog.records if record.name == "zero_plugin"]
    assert 3 <= len(lines) <= 10
    assert lines[0].startswith("plan for TinyGPT, 51,172 parameters, on 1 rank")
    assert "nonfinite='raise'" in lines[1]


def test_pinned_tiers_are_kept(measured: Path) -> None:
    config = ZeroConfig.auto(make_gpt(), stage=3, params="host", optimizer="host")
    assert (config.stage, config.params, config.optimizer) == (3, "host", "host")


def test_nothing_fits_stops_with_what_would_help(measured: Path) -> None:
    with pytest.raises(
        BudgetError, match=r"lacking: .* of host memory.*name a folder on a fast disk"
    ):
        ZeroConfig.auto(make_gpt(), host=1000)


def test_bad_options_are_refused(measured: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'nonfinite'"):
        ZeroConfig.auto(make_gpt(), nonfinit="raise")


def test_accelerates_plugin_plans_when_a_model_is_prepared(measured: Path) -> None:
    from zero_plugin.integrations._huggingface.plugin import ZeroOffloadPlugin
    from zero_plugin.integrations._huggingface.prepared import Prepared

    given = ZeroOffloadPlugin(auto=True, batch=2, seq=12, optimizer="host", nonfinite="raise")
    carried = ZeroOffloadPlugin.from_environment(given.to_environment())
    assert carried == given
    assert carried.options == {"batch": 2, "seq": 12, "optimizer": "host", "nonfinite": "raise"}
    prepared = Prepared(carried.config, carried.options)
    model = make_gpt()
    prepared.add_model(model)
    prepared.add_optimizer(torch.optim.AdamW(model.parameters()))
    prepared.settle_complete()
    (engine,) = prepared.engines
    try:
        assert (engine.config.optimizer, engine.config.nonfinite) == ("host", "raise")
        assert prepared.config == engine.config
    finally:
        engine.close()
    with pytest.raises(ConfigError, match="pass one or the other"):
        ZeroOffloadPlugin(ZeroConfig(), auto=True)
    with pytest.raises(ConfigError, match="nonfinit"):
        ZeroOffloadPlugin(auto=True, nonfinit="raise")


def two_ranks(rank: int, size: int, home: str) -> ZeroConfig:
    """In a rank: both plan together, rank 1 without a measurement of its own."""
    cache_folder = Path(home)
    cache.cache_folder = lambda: cache_folder
    return ZeroConfig.auto(make_gpt(torch.bfloat16), batch=2, seq=12, optimizer="host")


@pytest.mark.dist
def test_all_ranks_get_the_same(measured: Path) -> None:
    first, second = ranks(2, two_ranks, str(measured / ".cache" / "zero_plugin"))
    assert first == second
    assert first.optimizer == "host"


def fits(rank: int, size: int, home: str) -> dict[str, Any]:
    """In a rank: a fit and a Fabric step that plan for themselves, and a fit for which there is no room."""
    import lightning.pytorch as pl
    from lightning.fabric import Fabric
    from lightning.pytorch.loggers import CSVLogger
    from support.lightning_runs import data, held_out, module_class, network

    from zero_plugin.integrations.lightning import ZeroMonitor, ZeroOffloadStrategy

    folder = Path(home)
    cache.cache_folder = lambda: folder
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    found: dict[str, Any] = {}
    monitor = ZeroMonitor(folder / "run")
    logger = CSVLogger(folder, flush_logs_every_n_steps=1)
    trainer = pl.Trainer(strategy="zero_auto", callbacks=[monitor], **{**options, "logger": logger})
    trainer.fit(module_class(pl)(), data(), held_out())
    found["logged"] = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
    strategy: Any = trainer.strategy
    found["steps"], found["config"] = trainer.global_step, strategy.config
    trainer = pl.Trainer(strategy=ZeroOffloadStrategy(auto=True, host=1000), **options)
    try:
        trainer.fit(module_class(pl)(), data(), held_out())
    except BudgetError as error:
        found["refused"], found["steps of the refused"] = str(error), trainer.global_step
    try:
        ZeroOffloadStrategy(ZeroConfig(), auto=True)
    except ConfigError as error:
        found["both"] = str(error)
    fabric = Fabric(strategy="zero_auto", accelerator="cpu", devices=1)
    fabric.launch()
    model = network()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model, optimizer = fabric.setup(model, optimizer)
    weight = next(model.parameters())
    before = weight.detach().clone()
    fabric.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    found["moved"] = not torch.equal(before, weight)
    strategy = fabric.strategy
    for engine in strategy.engines:
        engine.close()
    found["fabric"] = strategy.config
    return found


@pytest.mark.dist
def test_the_strategies_plan_when_they_are_set_up(measured: Path) -> None:
    from support.lightning_runs import ranks as lightning_ranks

    (found,) = lightning_ranks(1, fits, str(measured / ".cache" / "zero_plugin"))
    assert found["steps"] == 2
    assert {"zero/device_bytes", "zero/step_seconds"} <= set(found["logged"].split(","))
    assert found["config"].optimizer == found["fabric"].optimizer == "device"
    assert "lacking" in found["refused"]
    assert found["steps of the refused"] == 0
    assert "pass one or the other" in found["both"]
    assert found["moved"]
