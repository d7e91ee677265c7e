"""Who gets an engine, by what, and what is refused; a run that did not ask is the stock run."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from support.accelerate_runs import accelerator_for, network, ranks, sgd

from zero_plugin import ZeroConfig, _autoload, errors
from zero_plugin.integrations._huggingface.selection import SETTINGS, SWITCH, is_selected
from zero_plugin.integrations.accelerate import ZeroOffloadPlugin

REPORT = """
import inspect, json, re, sys
from accelerate import Accelerator
import accelerate.accelerator, accelerate.state, torch
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
def source(owner):
    return {
        name: [getattr(item, "__qualname__", ""), getattr(item, "__module__", ""), re.sub("0x[0-9a-f]+", "", str(inspect.signature(item)))]
        for name, item in vars(owner).items() if callable(item)
    }
print(json.dumps({
    "class": type(accelerator).__qualname__, "is stock": type(accelerator) is accelerate.accelerator.Accelerator,
    "optimizer": type(optimizer).__qualname__, "plain": type(optimizer.optimizer).__qualname__,
    "attributes": sorted(vars(accelerator)), "state": sorted(vars(accelerator.state)),
    "methods": source(accelerate.accelerator.Accelerator),
    "module class": type(accelerate.accelerator).__name__,
    "loader": type(accelerate.accelerator.__spec__.loader).__name__,
    "ours": sorted(n for n in sys.modules if n.startswith("zero_plugin")),
    "engine": "zero_plugin.engine" in sys.modules,
    "weights": [float(p.sum()) for p in model.parameters()] if torch.manual_seed(0) is None else [],
}))
"""


def report(first: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", first + REPORT],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_run_that_did_not_ask_is_the_stock_run() -> None:
    on = report("", **{_autoload.SWITCH: "1"})
    off = report("", **{_autoload.SWITCH: "0"})
    assert on.pop("ours") == [
        "zero_plugin",
        "zero_plugin.integrations",
        "zero_plugin.integrations._huggingface",
        "zero_plugin.integrations._huggingface.config_hooks",
        "zero_plugin.integrations._huggingface.entry",
        "zero_plugin.integrations._huggingface.hooked",
        "zero_plugin.integrations._huggingface.selection",
    ]
    assert off.pop("ours") == []
    assert on == off
    assert on["is stock"]


def test_the_environment_selects_us() -> None:
    found = report(
        "import torch\n", **{SWITCH: "true", SETTINGS: '{"stage": 1}', _autoload.SWITCH: "1"}
    )
    assert found["class"] == "Accelerator"
    assert found["optimizer"] == "ZeroAcceleratedOptimizer"
    assert found["plain"] == "ZeroSGD"


def test_plugin_and_environment_are_inverse() -> None:
    plugin = ZeroOffloadPlugin(stage=3, params="nvme", optimizer="nvme", nvme_path=("/a", "/b"))
    variables = plugin.to_environment()
    assert is_selected(variables)
    assert ZeroOffloadPlugin.from_environment(variables) == plugin
    assert ZeroOffloadPlugin.from_environment({}).config == ZeroConfig()
    assert json.loads(variables[SETTINGS])["nvme_path"] == ["/a", "/b"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"stage": 4}', "ZERO_PLUGIN_CONFIG: stage=4 is not one of"),
        ('{"stgae": 3}', "did you mean 'stage'"),
        ("[3]", "is a JSON list: give an object"),
        ("stage=3", "is not JSON"),
        ('{"stage": 2, "params": "host"}', "needs stage=3"),
    ],
)
def test_wrong_settings_are_named(text: str, reason: str) -> None:
    with pytest.raises(errors.ConfigError, match=reason):
        ZeroOffloadPlugin.from_environment({SETTINGS: text})


def test_a_switch_that_is_neither_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="neither true nor false"):
        is_selected({SWITCH: "maybe"})
    assert not is_selected({SWITCH: "False"})
    assert not is_selected({})


def refusals(_rank: int, _size: int) -> None:
    from accelerate.utils import (
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        FullyShardedDataParallelPlugin,
    )

    def refused(reason: str, kind: type[Exception] = errors.ConfigError, **options: Any) -> None:
        with pytest.raises(kind, match=reason), accelerator_for({"stage": 2}, **options):
            pass

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    refused("zero-plugin and DeepSpeed were both asked for")
    del os.environ["ACCELERATE_USE_DEEPSPEED"]
    refused(r"Accelerator\(fsdp_plugin=", fsdp_plugin=FullyShardedDataParallelPlugin())
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    refused("comm_hook", kwargs_handlers=[handler])

    with accelerator_for({"stage": 2}) as accelerator:
        model = network()
        model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
        with pytest.raises(
            errors.ConfigError, match=r"2 of the 6 trainable weights of one ZeroSGD"
        ):
            accelerator.clip_grad_norm_(model[0].parameters(), 1.0)
        late = sgd(model.parameters())
        with pytest.raises(errors.EngineStateError, match="prepare all optimizers of a model"):
            accelerator.prepare(late)
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            __import__("copy").deepcopy(optimizer)


@pytest.mark.dist
def test_refusals() -> None:
    ranks(1, refusals)


def nothing_prepared(_rank: int, _size: int) -> None:
    with accelerator_for({"stage": 2}) as accelerator:
        model = network()
        model = accelerator.prepare(model)
        import torch

        with pytest.raises(errors.EngineStateError, match="no model and optimizer prepared"):
            accelerator.backward(model(torch.ones(1, 8)).sum())


@pytest.mark.dist
def test_backward_that_nobody_would_average_is_refused() -> None:
    ranks(2, nothing_prepared)


def test_an_unknown_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from zero_plugin.integrations._huggingface import checks

    class Changed:
        def prepare(self, *args: Any) -> None: ...

    with pytest.raises(errors.FrameworkError, match=r"has no Changed.prepare\(device_placement\)"):
        checks.check_supported(Changed)
    import accelerate

    checks.check_supported(accelerate.Accelerator)


def subclassed(_rank: int, _size: int) -> None:
    import accelerate
    from accelerate.state import AcceleratorState

    class Own(accelerate.Accelerator):
        def __init__(self, **options: Any) -> None:
            super().__init__(cpu=True, **options)
            self.mark = type(self).__name__

    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    own: Any = Own(zero_plugin=ZeroOffloadPlugin(stage=1))
    assert type(own).__name__ == "Own"
    assert own.mark == "Own"
    # the settings of a process are shared, as Accelerate's own are
    second: Any = accelerate.Accelerator(cpu=True)
    assert second.zero_plugin is own.zero_plugin
    AcceleratorState._reset_state(reset_partial_state=True)
    third = accelerate.Accelerator(cpu=True)
    assert not hasattr(third, "zero_plugin")
    assert "zero_plugin" not in inspect.signature(accelerate.Accelerator.__init__).parameters


@pytest.mark.dist
def test_subclasses_and_second_accelerators() -> None:
    ranks(1, subclassed)
