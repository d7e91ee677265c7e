"""Fabric under our strategies against plain DDP, for both spellings."""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_runs import NAMES, data, network, no_group_left, ranks, sgd, spelling
from torch import Tensor, nn

from zero_plugin.checkpoint.plain import fill_module

SIZES = [pytest.param(1, id="1 rank"), pytest.param(2, id="2 ranks", marks=pytest.mark.dist)]
ROOTS = ["lightning.fabric", "lightning_fabric"]


def make_fabric(strategy: Any, size: int, root: str = "lightning.fabric", **options: Any) -> Any:
    spelling("lightning.pytorch")  # warnings are errors
    fabric = importlib.import_module(root).Fabric(
        strategy=strategy, accelerator="cpu", devices=size, **options
    )
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    return fabric


def loss_of(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def train(
    strategy: Any,
    size: int,
    *,
    root: str = "lightning.fabric",
    clip: dict[str, Any] | None = None,
    accumulate: int = 1,
    make_optimizer: Any = sgd,
    **options: Any,
) -> tuple[list[Tensor], dict[str, Tensor], Any]:
    fabric = make_fabric(strategy, size, root, **options)
    with fabric.init_module():
        model = network()
    optimizer = make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    given = optimizer
    model, optimizer = fabric.setup(model, optimizer)
    assert optimizer.optimizer is given
    loader = fabric.setup_dataloaders(data())
    losses: list[Tensor] = []
    for _ in range(2):
        for number, batch in enumerate(loader, start=1):
            step = number % accumulate == 0
            with fabric.no_backward_sync(model, enabled=not step):
                loss = loss_of(model, batch)
                fabric.backward(loss)
            losses.append(loss.detach().clone())
            if step:
                if clip:
                    fabric.clip_gradients(model, optimizer, **clip)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    return losses, weights_of(fabric, model), fabric


def weights_of(fabric: Any, model: Any) -> dict[str, Tensor]:
    """A copy of the full weights on every rank."""
    with contextlib.ExitStack() as stack:
        for engine in getattr(fabric.strategy, "engines", ()):
            stack.enter_context(engine.full_params())
        return {name: value.clone() for name, value in model.state_dict().items()}


def close(fabric: Any) -> None:
    """What the end of the process does."""
    if hasattr(fabric.strategy, "engines"):
        fabric.strategy.teardown()


def compare(size: int, *, names: Any = NAMES, tolerance: float = 0.0, **options: Any) -> None:
    with no_group_left():
        losses, weights, _ = train("ddp", size, **options)
        for name in names:
            ours, our_weights, fabric = train(name, size, **options)
            for a, b in [
                *zip(losses, ours, strict=True),
                *zip(weights.values(), our_weights.values(), strict=True),
            ]:
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
            close(fabric)


def loops(rank: int, size: int, root: str) -> None:
    compare(size, root=root)


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("size", SIZES)
def test_same_bits_as_ddp(size: int, root: str) -> None:
    ranks(size, loops, root)


def variants(rank: int, size: int) -> None:
    exact = NAMES if size == 1 else ("zero_1",)
    compare(size, accumulate=2, names=exact)
    compare(size, accumulate=2, tolerance=1e-6)
    compare(size, clip={"clip_val": 0.015625})
    compare(size, clip={"max_norm": 0.25}, tolerance=2e-6)
    compare(size, precision="bf16-mixed")
    compare(size, make_optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), tolerance=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_accumulation_clipping_precision_and_adamw(size: int) -> None:
    ranks(size, variants)


def half(rank: int, size: int) -> None:
    for precision, dtype in (("bf16-true", torch.bfloat16), ("16-true", torch.float16)):
        losses, weights, fabric = train("zero_offload", size, precision=precision)
        assert weights["0.weight"].dtype == dtype
        assert losses[-1] < losses[0]
        assert fabric.strategy.engines[0].loss_scale == (65536.0 if dtype == torch.float16 else 1.0)
        close(fabric)


@pytest.mark.parametrize("size", SIZES)
def test_true_precisions_and_the_loss_scale(size: int) -> None:
    ranks(size, half)


# ------------------------------------------------------------------ checkpoints


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01)


def saving(rank: int, size: int, folder: Path, name: str) -> None:
    for precision in ("32-true", "bf16-true"):
        path = folder / f"{precision}.ckpt"
        fabric = make_fabric(name, size, precision=precision)
        batches = list(data(shuffle=False))

        def begin(fabric: Any = fabric) -> tuple[Any, Any]:
            model = network()
            return fabric.setup(model, adam(model.parameters()))

        def steps(
            model: Any, optimizer: Any, some: list[Any], fabric: Any = fabric
        ) -> list[Tensor]:
            losses = []
            for batch in some:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                fabric.backward(loss)
                optimizer.step()
                losses.append(loss.detach())
            return losses

        model, optimizer = begin()
        steps(model, optimizer, batches[:5])
        state = {"model": model, "optimizer": optimizer, "step": 5}
        fabric.save(path, state)
        state_dict = optimizer.state_dict()
        assert bool(state_dict) is (rank == 0)
        expected = steps(model, optimizer, batches[5:])
        weights = weights_of(fabric, model)
        fabric.strategy.teardown()

        torch.manual_seed(99)
        model, optimizer = begin()
        state = {"model": model, "optimizer": optimizer, "step": 0}
        assert fabric.load(path, state) == {}
        assert state["step"] == 5
        resumed = steps(model, optimizer, batches[5:])
        assert all(torch.equal(a, b) for a, b in zip(expected, resumed, strict=True))
        assert all(torch.equal(v, weights[k]) for k, v in weights_of(fabric, model).items())
        fabric.strategy.teardown()
        fabric.barrier()
    if rank == 0:
        plain = network()
        if (folder / "32-true.ckpt").is_dir():  # Stage 3: every rank wrote its part.
            fill_module(folder / "32-true.ckpt", plain)
            return
        checkpoint = torch.load(folder / "32-true.ckpt", weights_only=True)
        plain.load_state_dict(checkpoint["model"])
        adam(plain.parameters()).load_state_dict(checkpoint["optimizer"])


@pytest.mark.parametrize("name", ["zero_offload", "zero_3", "zero_3_offload"])
@pytest.mark.parametrize("size", SIZES)
def test_save_and_load_are_bit_exact(size: int, name: str, tmp_path: Path) -> None:
    ranks(size, saving, tmp_path, name)


# ------------------------------------------------------------------ several models, and misuse


def two_models(rank: int, size: int) -> None:
    def gan(name: str) -> dict[str, Tensor]:
        fabric = make_fabric(name, size)
        generator, critic = nn.Linear(8, 8), network()
        g, g_optimizer = fabric.setup(generator, sgd(generator.parameters()))
        c, c_optimizer = fabric.setup(critic, sgd(critic.parameters()))
        loader = fabric.setup_dataloaders(data())
        for features, labels in loader:
            loss = nn.functional.cross_entropy(c(g(features)), labels)
            g_optimizer.zero_grad()
            fabric.backward(loss)
            g_optimizer.step()
            loss = nn.functional.cross_entropy(c(g(features).detach()), 1 - labels)
            c_optimizer.zero_grad()
            fabric.backward(loss)
            c_optimizer.step()
        weights = {f"g.{k}": v for k, v in weights_of(fabric, g).items()}
        weights |= {f"c.{k}": v for k, v in weights_of(fabric, c).items()}
        close(fabric)
        return weights

    with no_group_left():
        expected = gan("ddp") if size == 1 else gan("zero_2")
        for name in NAMES:
            for key, value in gan(name).items():
                assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("size", SIZES)
def test_two_models_with_an_engine_each(size: int) -> None:
    """(At two ranks stock DDP cannot run this loop: the critic's gradients come in two backwards.)"""
    ranks(size, two_models)


def misuse(rank: int, size: int) -> None:
    from zero_plugin.errors import ConfigError, EngineStateError
    from zero_plugin.integrations.lightning import FabricZeroOffloadStrategy

    fabric = make_fabric("zero_offload", size)
    model = network()
    optimizer = sgd(model.parameters())
    inference = fabric.setup(network())
    assert torch.equal(inference(torch.ones(1, 8)), inference.module(torch.ones(1, 8)))
    with pytest.raises(EngineStateError, match=r"call fabric\.setup\(module, optimizer"):
        fabric.setup_optimizers(optimizer)
    with (
        pytest.raises(EngineStateError, match="no reduction to hold back"),
        fabric.no_backward_sync(inference),
    ):
        pass
    with pytest.raises(EngineStateError, match="has not been set up"):
        fabric.clip_gradients(inference, optimizer, max_norm=1.0)
    if size > 1:
        with pytest.raises(EngineStateError, match="nothing would average the gradients"):
            fabric.backward(inference(torch.ones(1, 8)).sum())
    model, optimizer = fabric.setup(model, optimizer)
    loss = model(torch.ones(1, 8)).sum()
    with pytest.raises(RuntimeError, match=r"fabric\.backward"):
        loss.backward()
    loss = model(torch.full((1, 8), float("inf"))).sum()
    fabric.backward(loss)
    with pytest.raises(RuntimeError, match="total norm"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    close(fabric)

    with pytest.raises(ConfigError, match="fp32"):
        make_fabric("zero_offload", size, precision="64-true")
    with pytest.raises(ConfigError, match="did you mean 'stage'"):
        FabricZeroOffloadStrategy(stages=2)
    scaled = make_fabric("zero_2", size, precision="16-true")
    first, second = network(), network()
    scaled.setup(first, sgd(first.parameters()))
    other, _ = scaled.setup(second, sgd(second.parameters()))
    scaled.strategy.engines[1].load_loss_scale_state({"scale": 4.0, "good_steps": 0})
    with pytest.raises(ConfigError, match="does not say which"):
        scaled.backward(other(torch.ones(1, 8)).sum())
    scaled.backward(other(torch.ones(1, 8)).sum(), model=other)
    close(scaled)


@pytest.mark.parametrize("size", SIZES)
def test_misuse_is_said(size: int) -> None:
    ranks(size, misuse)


def goes_away(rank: int, size: int) -> None:
    """Fabric never tears a strategy down: the engine goes with the last reference to it."""
    import gc

    losses, _, fabric = train("zero_offload", size)
    assert losses
    assert threading.active_count() > 1
    del fabric
    gc.collect()
    assert threading.active_count() == 1


def test_threads_end_with_the_fabric() -> None:
    ranks(1, goes_away)


def compiled(rank: int, size: int) -> None:
    with warnings.catch_warnings():
        fabric = make_fabric("zero_offload", size)
        warnings.simplefilter("ignore")
        model: Any = torch.compile(network(), backend="eager")
        model, optimizer = fabric.setup(model, sgd(model.parameters()))
        before = loss_of(model, next(iter(data()))).detach()
        for batch in data():
            optimizer.zero_grad()
            fabric.backward(loss_of(model, batch))
            optimizer.step()
        assert loss_of(model, next(iter(data()))) < before + 1
        close(fabric)


@pytest.mark.slow
def test_a_compiled_module_is_accepted() -> None:
    ranks(1, compiled)
