"""What we override, call and import in Lightning: a release that lacks some of it is refused by name."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from zero_plugin import errors
from zero_plugin.integrations import registration
from zero_plugin.integrations._lightning import checks
from zero_plugin.integrations._lightning.fabric import FabricStrategy
from zero_plugin.integrations._lightning.trainer import TrainerStrategy

CASES = [
    ("lightning.pytorch.strategies", checks.TRAINER, TrainerStrategy, "trainer_lightning"),
    ("pytorch_lightning.strategies", checks.TRAINER, TrainerStrategy, "trainer_pytorch_lightning"),
    ("lightning.fabric.strategies", checks.FABRIC, FabricStrategy, "fabric_lightning"),
    ("lightning_fabric.strategies", checks.FABRIC, FabricStrategy, "fabric_lightning_fabric"),
]

# Imported before the tests, since their imports set environment variables.
STOCK = {module: import_module(module).DDPStrategy for module, *_ in CASES}


@pytest.mark.parametrize(("module", "members", "ours", "place"), CASES)
def test_a_strategy_that_changed_is_named(
    module: str, members: Any, ours: type[Any], place: str
) -> None:
    stock: Any = STOCK[module]
    checks.check_supported(stock, members)
    inherited = {name for owner in stock.__mro__[:-1] for name in vars(owner)}
    replaced = {n for n in vars(ours) if n in inherited and (n == "__init__" or n[:2] != "__")}
    assert replaced - {"_abc_impl"} <= set(members)
    for name, parameters in members.items():
        changed: Any = type(stock.__name__, (), {n: _bare for n in members if n != name})
        for other, needed in members.items():
            if needed and other != name:
                setattr(changed, other, getattr(stock, other))
        changed.__module__ = stock.__module__
        if name == "__init__":
            changed.__init__ = _bare
        assert parameters or not hasattr(changed, name)
        with pytest.raises(errors.FrameworkError, match=rf"has no DDPStrategy\.{name}.* install "):
            checks.check_supported(changed, members)


def _bare(self: Any) -> None:
    del self


def test_a_name_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "zero_plugin.integrations._lightning.trainer_lightning"
    monkeypatch.delitem(sys.modules, place, raising=False)
    optimizer: Any = import_module("lightning.pytorch.core.optimizer")
    monkeypatch.delattr(optimizer, "_MockOptimizer")
    factory = registration.StrategyFactory(place, "ZeroOffloadStrategy")
    expected = r"lightning 2\..* lacks what zero-plugin's ZeroOffloadStrategy is made of \(.*_MockOptimizer"
    with pytest.raises(errors.FrameworkError, match=expected):
        factory(stage=2)
    with pytest.raises(errors.FrameworkError, match=expected):
        _ = import_module("zero_plugin.integrations.lightning").ZeroOffloadStrategy


def test_a_missing_package_is_not_a_changed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'lightning'", name="lightning")

    monkeypatch.setattr(checks, "import_module", absent)
    with pytest.raises(ModuleNotFoundError):
        checks.load_class("zero_plugin.integrations._lightning.monitor_lightning", "ZeroMonitor")


@pytest.mark.parametrize("name", ["lightning.pytorch.strategies", "pytorch_lightning.core.saving"])
def test_a_registry_that_is_gone_is_named(name: str) -> None:
    with pytest.raises(errors.FrameworkError, match=rf"has no {name}\.\w+, where zero-plugin"):
        registration.register_strategies(ModuleType(name))
