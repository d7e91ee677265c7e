"""Whole scripts under Lightning's own launchers, as a user starts them after `pip install`."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.lightning_runs import fit, make_trainer, ranks, spelling

SCRIPT = """
    import json, sys
    import torch
    import {package} as L
    from torch.utils.data import DataLoader, TensorDataset

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 2)

        def training_step(self, batch, batch_idx):
            loss = torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def main():
        torch.set_num_threads(1)
        L.seed_everything(3, verbose=False)
        features = torch.randn(32, 8)
        loader = DataLoader(TensorDataset(features, (features.sum(1) > 0).long()), batch_size=4)
        trainer = L.Trainer(
            strategy={strategy}, accelerator="cpu", devices=2, max_epochs=1, logger=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1],
        )
        model = Net()
        trainer.fit(model, loader)
        if trainer.is_global_zero:
            print("RESULT", json.dumps({{
                "world": trainer.world_size,
                "steps": trainer.global_step,
                "loss": float(trainer.callback_metrics["loss"]),
                "sum": float(model.layer.weight.detach().abs().sum()),
                "strategy": type(trainer.strategy).__module__,
                "optimizer": type(trainer.optimizers[0]).__name__ if trainer.optimizers else None,
            }}))

    if __name__ == "__main__":
        main()
"""


def run_scripts(folder: Path, *cases: tuple[str, str]) -> list[dict[str, Any]]:
    """Run the script for every (package, strategy expression) side by side; what rank 0 of each reports."""
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    environment = {key: value for key, value in os.environ.items() if key not in launcher}
    outputs = [folder / f"output{number}" for number in range(len(cases))]
    with ExitStack() as stack:
        running: list[subprocess.Popen[bytes]] = []
        for output, (package, strategy) in zip(outputs, cases, strict=True):
            script = output.with_suffix(".py")
            script.write_text(textwrap.dedent(SCRIPT.format(package=package, strategy=strategy)))
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(script), str(folder)],
                    stdout=stack.enter_context(output.open("wb")),
                    stderr=subprocess.STDOUT,
                    env={**environment, "PYTHONWARNINGS": "ignore"},
                )
            )
            stack.callback(process.kill)
            running.append(process)
        codes = [process.wait(timeout=200) for process in running]
    found: list[dict[str, Any]] = []
    for code, output in zip(codes, outputs, strict=True):
        text = output.read_text()
        assert code == 0, text
        (line,) = [line for line in text.splitlines() if line.startswith("RESULT ")]
        found.append(json.loads(line.removeprefix("RESULT ")))
    return found


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_scripts_with_two_devices(tmp_path: Path) -> None:
    """By name, with nothing of ours imported by the script; and with processes forked from it."""
    module = "__import__('zero_plugin.integrations.lightning', fromlist=['x'])"
    started, forked = run_scripts(
        tmp_path,
        ("lightning", "'zero_offload'"),
        ("pytorch_lightning", f"{module}.ZeroOffloadStrategy(start_method='fork')"),
    )
    assert started["strategy"].endswith("trainer_lightning")
    assert forked["strategy"].endswith("trainer_pytorch_lightning")
    assert started["optimizer"] == "ZeroAdamW"
    assert started["steps"] == 4
    for values in (
        started,
        forked,
    ):  # of a forked run Lightning brings back weights and metrics only
        assert values["world"] == 2
        assert 0.3 < values["loss"] < 1.0
    assert started["sum"] == forked["sum"]


def pickles(rank: int, size: int) -> None:
    import importlib

    from zero_plugin import ZeroConfig

    for module, name in (
        ("zero_plugin.integrations.lightning", "ZeroOffloadStrategy"),
        ("zero_plugin.integrations.lightning", "FabricZeroOffloadStrategy"),
        ("zero_plugin.integrations.pytorch_lightning", "ZeroOffloadStrategy"),
        ("zero_plugin.integrations.pytorch_lightning", "FabricZeroOffloadStrategy"),
    ):
        kind = getattr(importlib.import_module(module), name)
        assert kind.__name__ == name == kind.__qualname__
        assert getattr(importlib.import_module(kind.__module__), name) is kind
        strategy = kind(stage=1, optimizer="device", gradients="device")
        clone = pickle.loads(pickle.dumps(strategy))
        assert type(clone) is kind
        assert clone.config == ZeroConfig(stage=1, optimizer="device", gradients="device")
    pl = spelling("lightning.pytorch")
    strategy = make_trainer(pl, "zero_2", size, precision="bf16-mixed").strategy
    clone = pickle.loads(pickle.dumps(strategy))
    assert clone.precision_plugin.precision == "bf16-mixed"
    assert clone.precision_plugin.slots is clone._slots  # one set of engines, as before


def test_strategies_are_where_they_say_and_can_be_pickled() -> None:
    ranks(1, pickles)


SPELLINGS = {
    "": ("trainer_lightning", "fabric_lightning"),
    "import pytorch_lightning": ("trainer_pytorch_lightning", "fabric_lightning"),
    "import lightning.pytorch": ("trainer_lightning", "fabric_lightning"),
    "import pytorch_lightning, lightning_fabric": (
        "trainer_pytorch_lightning",
        "fabric_lightning_fabric",
    ),
    "import lightning.pytorch, pytorch_lightning": ("trainer_lightning", "fabric_lightning"),
}


@pytest.mark.parametrize("first", SPELLINGS)
def test_the_names_mean_the_spelling_in_use(first: str) -> None:
    """Both are usually installed, so what can be imported says nothing."""
    code = f"""
        import importlib.util, sys
        class Stub:  # the modules of our classes, without what they import
            def find_spec(self, name, path=None, target=None):
                if name.startswith("zero_plugin.integrations._lightning.") and not name.endswith(".checks") or name in (
                    "pytorch_lightning", "lightning_fabric", "lightning", "lightning.pytorch"
                ):
                    return importlib.util.spec_from_loader(name, self, is_package=True)
            def create_module(self, spec): return None
            def exec_module(self, module):
                module.ZeroOffloadStrategy = module.FabricZeroOffloadStrategy = module.__name__.rpartition(".")[2]
        sys.meta_path.insert(0, Stub())
        {first}
        from zero_plugin.integrations.lightning import FabricZeroOffloadStrategy, ZeroOffloadStrategy
        from zero_plugin.integrations import pytorch_lightning as other
        print(ZeroOffloadStrategy, FabricZeroOffloadStrategy, other.ZeroOffloadStrategy, other.FabricZeroOffloadStrategy)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert out.stdout.split() == [
        *SPELLINGS[first],
        "trainer_pytorch_lightning",
        "fabric_lightning_fabric",
    ], out.stderr


def test_without_lightning_the_cure_is_named() -> None:
    code = """
        import sys
        class Missing:
            def find_spec(self, name, path=None, target=None):
                return None
        sys.meta_path[:] = [f for f in sys.meta_path]
        import importlib.util, zero_plugin.integrations.lightning as module
        module.find_spec = lambda name: None
        try:
            module.ZeroOffloadStrategy
        except ImportError as error:
            print(error)
        try:
            module.Nonsense
        except AttributeError as error:
            print(error)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    first, second = out.stdout.splitlines()
    assert "neither lightning.pytorch nor pytorch_lightning is installed" in first
    assert "pip install 'zero-plugin[lightning]'" in first
    assert "no attribute 'Nonsense'" in second


def reported(rank: int, size: int) -> dict[str, Any]:
    """What a user may look at while it runs."""
    seen: dict[str, Any] = {}

    def module(pl: Any) -> Any:
        from support.lightning_runs import module_class

        class Net(module_class(pl)):
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                engine = self.trainer.strategy.engine
                seen["memory"] = engine.memory()
                seen["ledger"] = engine.ledger()

        return Net()

    fit("zero_offload", size, module=module, max_steps=3)
    return seen


def test_engine_memory_and_ledger_are_in_reach() -> None:
    (seen,) = ranks(1, reported)
    parameters = 8 * 16 + 16 + 16 * 2 + 2
    assert seen["memory"]["host"]["master"] >= 4 * parameters
    assert seen["memory"]["host"]["moments"] >= 4 * parameters
    assert seen["ledger"]["device_to_host"] == 3 * 4 * parameters
    assert seen["ledger"]["host_to_device"] == 3 * 4 * parameters
