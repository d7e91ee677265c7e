"""Every setting that is refused, with the message that says how to go on."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import TinyMLP, make_gpt, mlp_loss
from support.training import adamw, config
from torch import nn

from zero_plugin.budget import Budget
from zero_plugin.config import ZeroConfig, parse_bytes
from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import BudgetError, ConfigError, OptimizerError, ParameterError, ZeroError

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stage": 4}, r"stage=4 is not one of 0, 1, 2, 3"),
    ({"stage": True}, r"stage=True is not one of"),
    ({"stage": "2"}, r"stage='2' is not one of"),
    ({"params": "gpu"}, r"params='gpu' is not one of 'device', 'host', 'nvme'"),
    ({"optimizer": "cpu"}, r"optimizer='cpu' is not one of"),
    ({"gradients": "disk"}, r"gradients='disk' is not one of"),
    ({"activations": None}, r"activations=None is not one of"),
    ({"nonfinite": "ignore"}, r"nonfinite='ignore' is not one of 'skip', 'raise', 'propagate'"),
    ({"reduce_dtype": "float32"}, r"reduce_dtype='float32' is not one of 'fp32', 'bf16', 'fp16'"),
    ({"reduce_dtype": None}, r"reduce_dtype=None is not one of"),
    ({"gradient_dtype": torch.bfloat16}, r"gradient_dtype=torch\.bfloat16 is not one of"),
    ({"backend": "nccl"}, r"backend='nccl' is not one of 'auto', 'inline', 'threads'"),
    ({"overlap": 1}, r"overlap=1 must be True or False"),
    ({"speculate": "no"}, r"speculate='no' must be True or False"),
    ({"delayed_update": 0}, r"delayed_update=0 must be True or False"),
    ({"broadcast_buffers": None}, r"broadcast_buffers=None must be True or False"),
    ({"device_limit": "8 gigs"}, r"device_limit='8 gigs' is not a byte count"),
    ({"host_limit": -1}, r"host_limit=-1 is negative"),
    ({"pinned_limit": True}, r"pinned_limit=True is not a byte count"),
    ({"nvme_limit": "x"}, r"nvme_limit='x' is not a byte count"),
    ({"bucket_bytes": 63}, r"bucket_bytes=63 is below 64 bytes"),
    ({"bucket_bytes": "fast"}, r"bucket_bytes='fast' is not a byte count"),
    ({"timeout_seconds": 0}, r"timeout_seconds=0 must be a number above 0"),
    ({"timeout_seconds": float("nan")}, r"timeout_seconds=nan must be a number above 0"),
    ({"nonfinite_patience": 0}, r"nonfinite_patience=0 must be a whole number above 0"),
    ({"delayed_update_warmup": -1}, r"delayed_update_warmup=-1 must be a whole number above 0"),
    ({"threads": 0}, r"threads=0 must be a whole number above 0"),
    ({"threads": "2"}, r"threads='2' must be a whole number above 0"),
    ({"threads": True}, r"threads=True must be a whole number above 0"),
    ({"loss_scale": 0.0}, r"loss_scale=0\.0 must be a positive power of two"),
    ({"loss_scale": -2.0}, r"loss_scale=-2\.0 must be a positive power of two"),
    ({"loss_scale": "auto"}, r"loss_scale='auto' must be a positive power of two"),
    ({"loss_scale": 3.0}, r"loss_scale=3\.0 is not a power of two"),
    ({"loss_scale": 0.3}, r"loss_scale=0\.3 is not a power of two"),
    ({"loss_scale": 1.5}, r"loss_scale=1\.5 is not a power of two"),
    ({"loss_scale": float("nan")}, r"loss_scale=nan"),
    ({"params": "host"}, r"params='host' needs stage=3"),
    ({"persist_below": 10}, r"persist_below=10 has no effect below stage 3"),
    ({"stage": 3, "persist_below": -1}, r"persist_below=-1 must be a whole number, 0 or more"),
    ({"prefetch_units": 2}, r"prefetch_units=2 has no effect below stage 3"),
    ({"stage": 3, "prefetch_units": 1.5}, r"prefetch_units=1.5 must be a whole number, 0 or more"),
    ({"max_unit_bytes": "1GiB"}, r"max_unit_bytes='1GiB' has no effect below stage 3"),
    ({"stage": 3, "max_unit_bytes": -1}, r"max_unit_bytes=-1 is negative"),
    ({"debug_poison": True}, r"debug_poison=True has no effect below stage 3"),
    ({"stage": 3, "debug_poison": 1}, r"debug_poison=1 must be True or False"),
    ({"prefetch_bytes": "1GiB"}, r"prefetch_bytes='1GiB' has no effect below stage 3"),
    ({"stage": 3, "prefetch_bytes": "big"}, r"prefetch_bytes='big' is not a byte count"),
    ({"activations": "nvme"}, r"nvme_path is not set: name a folder"),
    ({"optimizer": "nvme"}, r"nvme_path is not set: name a folder"),
    ({"nvme_engine": "aio"}, r"nvme_engine='aio' is not one of 'auto', 'uring', 'threads'"),
    ({"nvme_engine": "uring"}, r"nvme_engine='uring' has no effect"),
    ({"nvme_buffer_bytes": -1}, r"nvme_buffer_bytes=-1 is negative"),
    ({"nvme_cache_bytes": "1 lot"}, r"nvme_cache_bytes='1 lot' is not a byte count"),
    ({"nvme_checksum": 1}, r"nvme_checksum=1 must be True or False"),
    ({"gradients": "nvme"}, r"nvme_path is not set: name a folder"),
    ({"params": "nvme", "nvme_path": "/scratch"}, r"params='nvme' needs stage=3"),
    ({"speculate": True, "optimizer": "device"}, r"speculate=True needs optimizer='host'"),
    ({"delayed_update": True, "optimizer": "device"}, r"delayed_update=True has no use with"),
    ({"undo_bytes": "x"}, r"undo_bytes='x' is not a byte count"),
    ({"device_fraction": -0.1}, r"device_fraction=-0.1 must be a number from 0 to 1"),
    ({"moment_dtype": "fp8"}, r"moment_dtype='fp8' is not one of 'fp32', 'bf16', 'int8'"),
    ({"update_in_backward": True}, r"update_in_backward=True needs nonfinite='propagate'"),
    ({"bind_threads": 1}, r"bind_threads=1 must be True or False"),
    ({"nvme_path": "/scratch"}, r"nvme_path='/scratch' has no effect"),
    ({"split_master": True}, r"split_master=True needs stage=3"),
    ({"split_master": 1}, r"split_master=1 must be True or False"),
    (
        {"split_master": True, "stage": 3, "optimizer": "device"},
        r"split_master=True is not supported with optimizer='device'",
    ),
    ({"nvme_limit": "8GiB"}, r"nvme_limit='8GiB' has no effect"),
    ({"overlap": False, "backend": "threads"}, r"overlap=False contradicts backend='threads'"),
    ({"overlap": False, "backend": "chaos"}, r"overlap=False contradicts backend='chaos'"),
    (
        {"nonfinite": "propagate", "loss_scale": "dynamic"},
        r"nonfinite='propagate' contradicts loss_scale='dynamic'",
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[str(case[0]) for case in REFUSED])
def test_refused_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ZeroConfig(**settings)


def test_every_field_is_checked() -> None:
    free = {"backend_seed", "instruction_set", "trace"}  # any value; checked where they are used
    named = {name for settings, _ in REFUSED for name in settings}
    assert named | free >= {field.name for field in fields(ZeroConfig)}


@pytest.mark.parametrize(
    "setting",
    [
        {"loss_scale": float("inf")},
        {"timeout_seconds": float("inf")},
        {"threads": 1.5},
        {"backend_seed": "x"},
        {"nonfinite_patience": 2.5},
        {"device_limit": 1.5},
        {"trace": 3},
        {"overlap": False, "backend": "cuda"},
    ],
    ids=str,
)
def test_more_senseless_values_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ZeroConfig(**setting)


def test_a_config_cannot_be_changed_and_takes_keywords_only() -> None:
    settings = ZeroConfig()
    with pytest.raises(FrozenInstanceError):
        settings.stage = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        ZeroConfig(1)  # type: ignore[misc]
    assert ZeroConfig() == ZeroConfig()


def test_defaults_are_plain_torchs() -> None:
    settings = ZeroConfig()
    assert settings.reduce_dtype == "fp32"
    assert settings.gradient_dtype is None
    assert settings.loss_scale is None
    assert settings.nonfinite == "skip"
    assert settings.shards_optimizer
    assert settings.shards_gradients
    assert not settings.shards_parameters
    assert not ZeroConfig(stage=0).shards_optimizer
    assert not ZeroConfig(stage=1).shards_gradients


def test_from_dict() -> None:
    assert ZeroConfig.from_dict({"stage": 1, "bucket_bytes": "1MiB"}).bucket_size == 1 << 20
    with pytest.raises(ConfigError, match=r"unknown setting 'zero_stage'.*did you mean"):
        ZeroConfig.from_dict({"zero_stage": 2})
    with pytest.raises(ConfigError, match=r"unknown setting 'stgae'.*did you mean 'stage'"):
        ZeroConfig.from_dict({"stgae": 2})
    with pytest.raises(ConfigError, match=r"unknown setting 'qqq'.*known settings are stage"):
        ZeroConfig.from_dict({"qqq": 2})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (7, 7),
        ("7", 7),
        ("8GiB", 8 << 30),
        (" 500 MB ", 500_000_000),
        ("1.5kib", 1536),
        ("2tb", 2 * 10**12),
        ("3b", 3),
        ("0", 0),
    ],
)
def test_byte_counts(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "1 000", "1e9", "-1", "8GiBs", "0x10", "nan"])
def test_texts_that_are_no_byte_counts(text: str) -> None:
    with pytest.raises(ConfigError, match="quota="):
        parse_bytes(text, "quota")


# At construction ------------------------------------------------------------------------------------------------------


def test_an_instruction_set_the_machine_lacks_is_refused() -> None:
    model = TinyMLP()
    with pytest.raises(ZeroError, match="sse9"):
        ZeroEngine(model, adamw(model.parameters()), config(instruction_set="sse9"))


def test_the_cuda_backend_on_a_cpu_model_is_refused() -> None:
    model = TinyMLP()
    with pytest.raises(ConfigError, match=r"cuda"):
        ZeroEngine(model, adamw(model.parameters()), config(backend="cuda"))


def test_no_optimizer() -> None:
    with pytest.raises(ConfigError, match="no optimizer"):
        ZeroEngine(TinyMLP(), [])


def used_bytes(tier: str, **settings: Any) -> int:
    model = make_gpt(torch.bfloat16, width=12, layers=1)
    with ZeroEngine(model, adamw(model.parameters()), config(**settings)) as engine:
        return sum(engine.memory()[tier].values())


@pytest.mark.parametrize(
    ("tier", "settings"),
    [
        ("host", {}),
        ("host", {"gradients": "device"}),
        ("device", {"optimizer": "device", "gradients": "device"}),
        ("device", {}),
    ],
    ids=str,
)
def test_a_limit_below_what_is_needed_is_refused_before_anything_is_allocated(
    tier: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    need = used_bytes(tier, **settings)
    assert used_bytes(tier, **{f"{tier}_limit": need}, **settings) == need
    allocated: list[int] = []
    from zero_plugin.runtime import threads

    original = threads.allocate_host

    def counting(nbytes: int) -> Any:
        allocated.append(nbytes)
        return original(nbytes)

    monkeypatch.setattr(threads, "allocate_host", counting)
    model = make_gpt(torch.bfloat16, width=12, layers=1)
    with pytest.raises(BudgetError, match=rf"{tier}_limit is .*: raise it, use more processes"):
        ZeroEngine(
            model, adamw(model.parameters()), config(**{f"{tier}_limit": need - 1}, **settings)
        ).close()
    assert sum(allocated) == 0


# Parameters -----------------------------------------------------------------------------------------------------------


def test_duplicated_parameters() -> None:
    model = TinyMLP()
    first = model.first.weight
    other = torch.optim.SGD([first], lr=0.1)
    with pytest.raises(
        ParameterError, match=r"'first\.weight' appears twice \(optimizer 1 \(SGD\), group 0"
    ):
        ZeroEngine(model, [adamw(model.parameters()), other])
    optimizer = adamw(model.parameters())
    optimizer.param_groups[0]["params"].append(first)
    with pytest.raises(ParameterError, match=r"'first\.weight' appears twice"):
        ZeroEngine(model, optimizer)


def test_a_non_leaf_parameter() -> None:
    model = TinyMLP()
    optimizer = adamw(model.parameters())
    optimizer.param_groups[0]["params"][1] = model.first.weight * 2
    with pytest.raises(
        ParameterError, match=r"group 0, position 1 holds a non-leaf tensor of shape \(13, 7\)"
    ):
        ZeroEngine(model, optimizer)


def test_a_parameter_of_another_model() -> None:
    model, other = TinyMLP(), TinyMLP()
    with pytest.raises(
        OptimizerError, match=r"not a parameter of the model: build the optimizer on"
    ):
        ZeroEngine(model, adamw(other.parameters()))
    optimizer = adamw(model.parameters())
    model.second = nn.Linear(13, 5)
    with pytest.raises(OptimizerError, match=r"after any step that replaces them"):
        ZeroEngine(model, optimizer)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_parameter_of_a_dtype_without_kernels(dtype: torch.dtype) -> None:
    model = TinyMLP()
    model.first.bias = nn.Parameter(torch.zeros(13, dtype=dtype))
    with pytest.raises(
        ParameterError, match=rf"'first\.bias' has dtype {dtype}.*requires_grad=False"
    ):
        ZeroEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_parameter_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = TinyMLP()
    with pytest.raises(ParameterError, match="materialise"):
        ZeroEngine(model, adamw(model.parameters()))


def test_a_frozen_parameter_may_be_of_any_kind() -> None:
    model = TinyMLP()
    model.table = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    model.exact = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)
    with ZeroEngine(model, adamw(p for p in model.parameters() if p.requires_grad)) as engine:
        engine.backward(mlp_loss(model, 0))
        engine.step()


def test_a_param_group_that_is_refused_later_changes_nothing() -> None:
    model = TinyMLP()
    optimizer = adamw(model.first.parameters())
    with ZeroEngine(model, optimizer, config()) as engine:
        with pytest.raises(OptimizerError, match="not a parameter of the model"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        assert len(optimizer.param_groups) == 1
        engine.backward(mlp_loss(model, 0))
        optimizer.step()


def test_trace_is_written_at_the_end(tmp_path: Path) -> None:
    import json

    path = tmp_path / "trace.json"
    model = TinyMLP()
    with ZeroEngine(model, adamw(model.parameters()), config(trace=path)) as engine:
        engine.backward(mlp_loss(model, 0))
        engine.step()
    events = json.loads(path.read_text())["traceEvents"]
    assert {"offload", "update", "upload"} <= {e["args"]["name"] for e in events if e["ph"] == "M"}


def test_a_limit_on_pinned_memory_is_refused_where_nothing_is_pinned() -> None:
    model = TinyMLP()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=r"pinned_limit='1GiB' has no effect on cpu"):
        ZeroEngine(model, optimizer, ZeroConfig(pinned_limit="1GiB"))


def test_a_limit_on_pinned_memory_counts_host_states_of_a_cuda_device() -> None:
    budget = Budget(ZeroConfig(pinned_limit=1000), torch.device("cuda"))
    budget.plan({"device": 10_000, "host": 1000})
    with pytest.raises(
        BudgetError, match=r"need 1,001 bytes of host memory .* pinned_limit is 1,000"
    ):
        budget.plan({"host": 1001})
    with pytest.raises(BudgetError, match=r"need 1,008 bytes of host memory"):
        budget.take("host", 8)


def test_a_warmup_without_a_delayed_update_is_refused() -> None:
    with pytest.raises(ConfigError, match="delayed_update_warmup=10 has no effect"):
        ZeroConfig(delayed_update_warmup=10)
