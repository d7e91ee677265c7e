"""Precisions under the Trainer: what they compute in, how the loss is scaled, and what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_runs import (
    NAMES,
    assert_same,
    fit,
    make_trainer,
    module_class,
    no_group_left,
    ranks,
    spelling,
)

SIZES = [pytest.param(1, id="1 rank"), pytest.param(2, id="2 ranks", marks=pytest.mark.dist)]


def bf16_mixed(rank: int, size: int) -> None:
    with no_group_left():
        expected = fit("ddp", size, precision="bf16-mixed")
        for name in NAMES:
            run = fit(name, size, precision="bf16-mixed")
            assert_same(expected, run)
            assert run.weights["net.0.weight"].dtype == torch.float32


@pytest.mark.parametrize("size", SIZES)
def test_bf16_mixed_has_the_bits_of_ddp(size: int) -> None:
    """The weights stay fp32 under autocast."""
    ranks(size, bf16_mixed)


def true_precision(rank: int, size: int, precision: str, dtype: torch.dtype) -> None:
    with no_group_left():
        expected = fit("ddp", size, precision=precision)
        runs = [fit(name, size, precision=precision) for name in NAMES]
    for run in runs:
        assert run.weights["net.0.weight"].dtype == dtype
        # DDP updates the rounded weights themselves, we their fp32 masters.
        for ours, theirs in zip(run.losses, expected.losses, strict=True):
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.05, atol=0.05)
    for run in runs[1:]:
        assert_same(runs[0], run)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-true", torch.bfloat16), ("16-true", torch.float16)]
)
def test_true_precisions_follow_ddp_and_agree_with_one_another(
    size: int, precision: str, dtype: torch.dtype
) -> None:
    ranks(size, true_precision, precision, dtype)


def small_steps(rank: int, size: int) -> None:
    """Updates below half a bf16 ulp of the weight are lost in DDP, and add up in the master."""

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=2.0**-10)

        return Net()

    with no_group_left():
        start = module(spelling("lightning.pytorch"))
        del start
        theirs = fit("ddp", size, module=module, precision="bf16-true", max_epochs=8)
        ours = fit("zero_offload", size, module=module, precision="bf16-true", max_epochs=8)
        exact = fit("ddp", size, module=module, precision="32-true", max_epochs=8)

    def distance(run: Any) -> float:
        pairs = [(run.weights[k].float(), v) for k, v in exact.weights.items()]
        return sum(float((a - b).abs().sum()) for a, b in pairs)

    assert distance(ours) < 0.7 * distance(theirs)


def test_bf16_true_does_not_lose_small_updates() -> None:
    ranks(1, small_steps)


# ------------------------------------------------------------------ fp16 and its loss scale


def mixed_16(pl: Any) -> Any:
    """16-mixed on the CPU, which the Trainer's `precision=` would turn into bf16-mixed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a GradScaler without CUDA
        return pl.plugins.precision.MixedPrecision("16-mixed", "cpu")


def overflow(rank: int, size: int, folder: Path) -> dict[str, Any]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    seen: dict[str, Any] = {"scales": [], "skipped": [], "weights": []}

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = super().training_step(batch, batch_idx)
                return (
                    loss * torch.inf
                    if (self.current_epoch, batch_idx) == (0, 2) and rank == 0
                    else loss
                )

            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                engine = self.trainer.strategy.engine
                seen["scales"].append(engine.loss_scale)
                seen["skipped"].append(engine.step_was_skipped)
                seen["weights"].append(self.net[0].weight.detach().clone())

        return Net(optimizer="AdamW")

    def run(**options: Any) -> Any:
        pl = spelling("lightning.pytorch")
        warnings.filterwarnings("ignore", message=".*step skipped.*")
        return fit(
            "zero_offload", size, module=module, plugins=[mixed_16(pl)], max_epochs=4, **options
        )

    whole = run(
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
    )
    assert seen["skipped"] == [i == 2 for i in range(len(seen["skipped"]))]
    assert torch.equal(seen["weights"][2], seen["weights"][1])
    assert not torch.equal(seen["weights"][3], seen["weights"][2])
    assert seen["scales"][0] == 65536.0
    assert set(seen["scales"][3:]) == {32768.0}
    checkpoint = torch.load(folder / "epoch=1.ckpt", weights_only=True)
    assert checkpoint["MixedPrecision"]["scale"] == 32768.0
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(checkpoint["MixedPrecision"])  # plain DDP can go on from it
    half = len(seen["scales"]) // 2
    seen["scales"].clear()
    second = run(ckpt_path=folder / "epoch=1.ckpt")
    assert set(seen["scales"]) == {32768.0}
    whole.losses, whole.lrs = whole.losses[half:], whole.lrs[half:]
    assert_same(whole, second)
    return {"precision": type(whole.trainer.precision_plugin).__name__}


@pytest.mark.parametrize("size", SIZES)
def test_16_mixed_scales_the_loss_skips_overflows_and_resumes(size: int, tmp_path: Path) -> None:
    assert ranks(size, overflow, tmp_path) == [{"precision": "ZeroMixedPrecision"}] * size


def hooks_see_no_scale(rank: int, size: int) -> None:
    """`on_before_backward` gets the loss itself, and gradients are unscaled where they can be read."""
    norms: list[torch.Tensor] = []

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def on_before_backward(self, loss: torch.Tensor) -> None:
                assert torch.equal(loss.detach(), self.losses[-1])

            def on_before_optimizer_step(self, optimizer: Any) -> None:
                engine = self.trainer.strategy.engine
                with engine.full_grads():
                    gradients = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
                    norms.append(torch.cat(gradients).norm())
                    torch.testing.assert_close(
                        engine.clip_grad_norm_(float("inf")), norms[-1], rtol=1e-3, atol=1e-5
                    )

        return Net()

    plugin = mixed_16(spelling("lightning.pytorch"))
    fit("zero_offload", size, module=module, plugins=[plugin], max_epochs=1)
    assert all(0 < norm < 10 for norm in norms)


def test_hooks_see_neither_scaled_losses_nor_scaled_gradients() -> None:
    ranks(1, hooks_see_no_scale)


def fixed_scale(rank: int, size: int) -> None:
    from zero_plugin.integrations.lightning import ZeroOffloadStrategy

    scales: list[float] = []

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                scales.append(self.trainer.strategy.engine.loss_scale)

        return Net()

    strategy = ZeroOffloadStrategy(loss_scale=256.0)
    fit(strategy, size, module=module, precision="16-true", max_epochs=1)
    assert set(scales) == {256.0}
    scales.clear()
    fit("zero_offload", size, module=module, precision="32-true", max_epochs=1)
    assert set(scales) == {1.0}


def test_a_scale_of_the_users_is_kept_and_fp32_has_none() -> None:
    ranks(1, fixed_scale)


# ------------------------------------------------------------------ choices and refusals


def choices(rank: int, size: int, root: str) -> None:
    import importlib

    from zero_plugin.errors import ConfigError

    pl = spelling(root)
    plugins = pl.plugins.precision
    module = importlib.import_module(
        f"zero_plugin.integrations._lightning.trainer_{root.partition('.')[0]}"
    )

    def plugin_of(**options: Any) -> Any:
        return make_trainer(pl, "zero_offload", size, **options).precision_plugin

    for precision, kind in (
        ("32-true", module.ZeroPrecision),
        ("bf16-mixed", module.ZeroMixedPrecision),
        ("bf16-true", module.ZeroHalfPrecision),
        ("16-true", module.ZeroHalfPrecision),
    ):
        found = plugin_of(precision=precision)
        assert type(found) is kind
        assert found.precision == precision
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"):
        assert plugin_of(precision="16-mixed").precision == "bf16-mixed"  # Lightning's own decision
    assert plugin_of(plugins=[mixed_16(pl)]).precision == "16-mixed"
    given = module.ZeroOffloadStrategy(precision_plugin=plugins.HalfPrecision("bf16-true"))
    assert make_trainer(pl, given, size).precision_plugin.precision == "bf16-true"

    with pytest.raises(ConfigError, match="master weights and optimizer states are fp32"):
        plugin_of(precision="64-true")

    class Own(plugins.Precision):
        pass

    with pytest.raises(ConfigError, match=r"Own.*only the stock plugins"):
        plugin_of(plugins=[Own()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
        odd = plugins.MixedPrecision("16-mixed", "cuda", scaler)
        disguised = scaler.__dict__.get("_init_scale")
    assert disguised in (4.0, None)
    if disguised is not None:
        with pytest.raises(ConfigError, match="GradScaler has settings of its own"):
            plugin_of(plugins=[odd])


@pytest.mark.parametrize("root", ["lightning.pytorch", "pytorch_lightning"])
def test_the_plugin_is_ours_or_refused(root: str) -> None:
    ranks(1, choices, root)


def poor_device(rank: int, size: int) -> None:
    from zero_plugin.errors import ConfigError

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    original = torch.nn.functional.linear
    torch.nn.functional.linear = refuse
    try:
        with pytest.raises(
            ConfigError, match=r"device 'cpu' cannot do .*not implemented for 'Half'"
        ):
            fit("zero_offload", size, precision="16-true")
    finally:
        torch.nn.functional.linear = original


def test_what_a_device_cannot_do_is_refused_with_the_reason() -> None:
    ranks(1, poor_device)
