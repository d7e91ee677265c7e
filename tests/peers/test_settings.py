"""Settings: defaults that surprise no user of plain torch, and nothing that is accepted and then ignored.

DeepSpeed 0.19.8 takes each of the refused settings below without a word; docs/differences.md has the list.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from support.models import TinyMLP, make, mlp_loss
from support.training import assert_like_plain_torch, engine_for

from zero_plugin import ZeroConfig, ZeroEngine
from zero_plugin.errors import ConfigError, GradientAccessError

# Their names of settings that this package does otherwise or not at all, with a value they accept.
THEIRS: dict[str, Any] = {
    "zero_optimisation": {"stage": 3},
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 1.0,
    "train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "offload_optimizer": {"device": "cpu"},
    "offload_param": {"device": "cpu"},
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 500_000_000,
    "allgather_partitions": True,
    "allgather_bucket_size": 500_000_000,
    "round_robin_gradients": True,
    "ignore_unused_parameters": True,
    "sub_group_size": 1_000_000_000,
    "stage3_max_reuse_distance": 0,
    "pin_memory": True,
    "pipeline_read": True,
    "fast_init": True,
    "ratio": 0.5,
    "zenflow": {},
    "communication_data_type": "fp32",
    "grad_accum_dtype": "fp32",
    "prescale_gradients": True,
    "aio": {"block_size": 1 << 20},
    "elastic_checkpoint": True,
    "legacy_stage1": True,
}


@pytest.mark.parametrize("key", THEIRS)
def test_a_setting_that_is_not_ours_is_refused_by_name(key: str) -> None:
    """A misspelt or foreign key trained without ZeRO, with no message."""
    with pytest.raises(ConfigError, match=rf"unknown setting '{key}'"):
        ZeroConfig.from_dict({key: THEIRS[key]})
    with pytest.raises(TypeError, match=key):
        ZeroConfig(**{key: THEIRS[key]})


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("stge", "stage"),
        ("optimiser", "optimizer"),
        ("gradient", "gradients"),
        ("bucket_byte", "bucket_bytes"),
        ("nonfinit", "nonfinite"),
        ("reduce_dtypes", "reduce_dtype"),
    ],
)
def test_a_misspelt_setting_is_refused_with_the_one_that_was_meant(typo: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean '{meant}'"):
        ZeroConfig.from_dict({typo: 1})


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_on_nvme_are_refused_where_they_would_not_go_there(stage: int) -> None:
    """`offload_param` at stage 2 did nothing; the other states do go to files at every stage (tests/engine)."""
    with pytest.raises(ConfigError, match="params='nvme' needs stage=3"):
        ZeroConfig.from_dict({"stage": stage, "params": "nvme", "nvme_path": "/nowhere"})


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"nvme_path": "/nowhere"}, "nvme_path"),
        ({"nvme_limit": "1GiB"}, "nvme_limit"),
        ({"prefetch_units": 3}, "prefetch_units"),
        ({"params": "host"}, "params"),
        ({"delayed_update": True, "optimizer": "device"}, "delayed_update"),
        ({"speculate": True, "optimizer": "device"}, "speculate"),
        ({"overlap": False, "backend": "threads"}, "overlap"),
        ({"nonfinite": "propagate", "loss_scale": "dynamic"}, "nonfinite"),
        ({"loss_scale": 1000.0}, "loss_scale"),
        ({"loss_scale": 0}, "loss_scale"),
        ({"optimizer": "cpu"}, "optimizer"),
        ({"stage": True}, "stage"),
        ({"stage": "2"}, "stage"),
        ({"bucket_bytes": "5e8"}, "bucket_bytes"),
        ({"threads": 0}, "threads"),
        ({"host_limit": "lots"}, "host_limit"),
    ],
    ids=str,
)
def test_a_setting_without_effect_or_sense_is_refused(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        ZeroConfig.from_dict(settings)


def test_defaults_are_plain_torchs() -> None:
    """fp32 reduction, no loss scale, no clipping, one process or many."""
    config = ZeroConfig()
    assert config.reduce_dtype == "fp32"
    assert config.gradient_dtype is None
    assert config.loss_scale is None
    assert not config.delayed_update
    assert not config.speculate


def test_a_default_engine_trains_as_plain_torch_does() -> None:
    """No clipping, no accumulation dtype, no scale: bit for bit, gradients of all sizes."""

    def script(session: Any) -> None:
        for step, factor in enumerate((1e-6, 1.0, 3e3)):
            for micro in range(2):
                session.backward(factor * mlp_loss(session.model, 2 * step + micro))
            session.update()

    assert_like_plain_torch(TinyMLP, script, settings=({},))


def test_low_precision_micro_batches_are_added_in_fp32_by_default() -> None:
    """1.3: `grad_accum_dtype` is the model's dtype there: 256 plus 1 is 256 in bf16, so the second was lost."""
    model = torch.nn.Linear(2, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(0.0)
    with engine_for(model, torch.optim.SGD(model.parameters(), lr=1.0)) as (engine, optimizer):
        for inputs in ((256.0, 1.0), (1.0, 1.0), (1.0, 1.0)):
            engine.backward(model(torch.tensor([inputs], dtype=torch.bfloat16)).sum())
        optimizer.step()
    assert model.weight.tolist() == [[-258.0, -3.0]]


def test_gradient_hooks_see_real_gradients_and_later_readers_a_clear_error() -> None:
    """What the engine has taken is not readable by accident as a wrong number, nor silently None."""
    model = make(TinyMLP)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    seen: list[float] = []
    model.first.weight.register_hook(lambda grad: seen.append(grad.norm().item()))
    with engine_for(model) as (engine, optimizer):
        engine.backward(mlp_loss(model, 0))
        assert len(seen) == 1
        assert seen[0] > 0
        grads = [parameter.grad for parameter in model.parameters()]
        assert all(grad is not None for grad in grads)
        for read in (
            lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
            lambda: torch.nn.utils.get_total_norm(grads),
            lambda: scaler.unscale_(optimizer),
        ):
            with pytest.raises(GradientAccessError, match=r"engine\.clip_grad_norm_.*full_grads"):
                read()
        with engine.full_grads():
            grad = model.first.weight.grad
            assert grad is not None
            assert grad.norm().item() == pytest.approx(seen[0])
        optimizer.step()


def test_nothing_of_torch_is_patched() -> None:
    """1.1: torch.nn.functional.linear stayed replaced after the engine was destroyed."""
    watched = [
        (torch.nn.functional, "linear"),
        (torch.nn.Module, "apply"),
        (torch.nn.Module, "__init__"),
        (torch.nn.Module, "__init_subclass__"),
        (torch.nn.Module, "__call__"),
        (torch.Tensor, "__new__"),
        (torch.Tensor, "backward"),
        (torch, "tensor"),
        (torch, "empty"),
        (torch, "zeros"),
        (torch, "ones"),
        (torch, "full"),
        (torch, "arange"),
        (torch, "eye"),
        (torch, "randn"),
        (torch.optim.AdamW, "step"),
        (torch.optim.AdamW, "zero_grad"),
    ]
    before = [getattr(owner, attribute) for owner, attribute in watched]
    model = make(TinyMLP)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = ZeroEngine(model, optimizer, ZeroConfig(threads=1))
    during = [getattr(owner, attribute) for owner, attribute in watched]
    engine.backward(mlp_loss(model, 0))
    optimizer.step()
    engine.close()
    after = [getattr(owner, attribute) for owner, attribute in watched]
    assert during == before
    assert after == before
    # An optimizer of the same class that was not given to the engine is torch's own still.
    other = make(TinyMLP)
    plain = torch.optim.AdamW(other.parameters())
    mlp_loss(other, 0).backward()
    plain.step()
    plain.zero_grad()


def test_a_loss_backward_without_the_engine_counts_too() -> None:
    """`loss.backward()` by a library, without the engine, is reduced all the same."""

    def script(session: Any) -> None:
        for step in range(3):
            mlp_loss(session.model, step).backward()
            session.update()

    assert_like_plain_torch(TinyMLP, script)


def test_an_optimizer_that_is_slower_or_refused_says_so() -> None:
    """No optimizer is replaced by another one: an element-wise one runs as it is, others are refused."""
    for make_optimizer in (
        torch.optim.Adafactor,
        torch.optim.LBFGS,
        lambda p: torch.optim.SparseAdam(list(p)),
    ):
        model = make(TinyMLP)
        optimizer = make_optimizer(model.parameters())
        with pytest.raises(TypeError, match=f"{type(optimizer).__name__} cannot run on shards"):
            ZeroEngine(model, optimizer, ZeroConfig(threads=1))
    model = make(TinyMLP)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        engine, optimizer = stack.enter_context(
            engine_for(model, torch.optim.NAdam(model.parameters()))
        )
        assert isinstance(optimizer, torch.optim.NAdam)
        engine.backward(mlp_loss(model, 0))
        optimizer.step()
