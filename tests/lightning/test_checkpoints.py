"""Saving and resuming through the Trainer: bit-exact, interchangeable with plain DDP, and never hanging."""

from __future__ import annotations

import math
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_runs import (
    REPLICATED,
    adamw,
    assert_same,
    data,
    fit,
    held_out,
    make_trainer,
    module_class,
    no_group_left,
    ranks,
    saver,
    short,
    spelling,
)
from support.ranks import mark

SIZES = [pytest.param(1, id="1 rank"), pytest.param(2, id="2 ranks", marks=pytest.mark.dist)]


# ------------------------------------------------------------------ resume


RESUMED = [
    ("zero_offload", "32-true"),
    ("zero_1", "bf16-true"),
    ("zero_offload", "bf16-true"),
    ("zero_2", "bf16-mixed"),
    ("zero_3", "32-true"),
    ("zero_3_offload", "bf16-true"),
]


def resume(rank: int, size: int, folder: Path) -> None:
    for name, precision in RESUMED:
        mark(f"{name}, {precision}")
        here = folder / f"{name}-{precision}"
        common: dict[str, Any] = {
            "module": adamw,
            "precision": precision,
            "loaders": short(),
            "max_epochs": 2,
            "gradient_clip_val": 0.5,
        }
        whole = fit(name, size, enable_checkpointing=True, callbacks=[saver(here)], **common)
        assert sorted(path.name for path in here.iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt"]
        second = fit(name, size, ckpt_path=here / "epoch=0.ckpt", **common)
        half = len(whole.losses) // 2
        whole.losses, whole.lrs = whole.losses[half:], whole.lrs[half:]
        assert_same(whole, second)
        assert second.trainer.global_step == whole.trainer.global_step


@pytest.mark.parametrize("size", SIZES)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(size: int, tmp_path: Path) -> None:
    """In bf16-true that takes the fp32 masters, which the module's state does not hold."""
    ranks(size, resume, tmp_path)


def interchange(rank: int, size: int, folder: Path) -> None:
    from zero_plugin.integrations.lightning import ZeroOffloadStrategy

    def strategy(name: str) -> Any:
        """Plain DDP reads files only."""
        if name != "zero_3":
            return name
        tiers: dict[str, Any] = dict.fromkeys(("params", "optimizer", "gradients"), "device")
        return ZeroOffloadStrategy(stage=3, checkpoint="file", **tiers)

    def go_on(saved: str, used: str) -> Any:
        mark(f"{used} goes on from {saved}")
        path = folder / saved / "epoch=0.ckpt"
        return fit(
            strategy(used), size, module=adamw, loaders=short(), max_epochs=2, ckpt_path=path
        )

    with no_group_left():
        for name in ("ddp", "zero_offload", "zero_3"):
            fit(
                strategy(name),
                size,
                module=adamw,
                loaders=short(),
                max_epochs=1,
                enable_checkpointing=True,
                callbacks=[saver(folder / name)],
            )
        first = go_on("ddp", "ddp")
        for other in ("zero_offload", "zero_3"):
            for saved, used in (("ddp", other), (other, "ddp"), (other, other)):
                assert_same(first, go_on(saved, used), tolerance=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_checkpoints_go_from_ddp_to_us_and_back(size: int, tmp_path: Path) -> None:
    ranks(size, interchange, tmp_path)


def other_world(rank: int, size: int, folder: Path) -> None:
    if size == 2:
        fit(
            "zero_offload",
            size,
            module=adamw,
            max_epochs=1,
            enable_checkpointing=True,
            callbacks=[saver(folder)],
        )
        return
    run = fit("zero_1", size, module=adamw, max_epochs=2, ckpt_path=folder / "epoch=0.ckpt")
    assert run.trainer.current_epoch == 2


@pytest.mark.dist
def test_a_checkpoint_of_two_ranks_resumes_on_one_under_another_name(tmp_path: Path) -> None:
    ranks(2, other_world, tmp_path)
    ranks(1, other_world, tmp_path)


# ------------------------------------------------------------------ what is in the file


def contents(rank: int, size: int, folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                seen["weights"] = sorted(checkpoint["state_dict"])
                seen["optimizer"] = any(checkpoint.get("optimizer_states", ()))
                assert checkpoint["state_dict"].keys() == self.state_dict().keys()

        return Net(optimizer="AdamW")

    run = fit("zero_offload", size, module=module, max_epochs=1)
    run.trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    run.trainer.save_checkpoint(folder / "after.ckpt")  # after the engine has gone
    if rank == 0:
        pl = spelling("lightning.pytorch")
        checkpoint = torch.load(folder / "after.ckpt", weights_only=True)
        model = module_class(pl).load_from_checkpoint(folder / "after.ckpt", optimizer="AdamW")
        for name, value in model.state_dict().items():
            assert torch.equal(value, run.weights[name])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer.load_state_dict(checkpoint["optimizer_states"][0])  # plain torch reads it
        trained = [p for p in model.parameters() if optimizer.state[p]]
        assert len(trained) == 4
        assert all(optimizer.state[p]["step"] == run.trainer.global_step for p in trained)
        assert all(optimizer.state[p]["exp_avg_sq"].shape == p.shape for p in trained)
        assert "optimizer_states" not in torch.load(folder / "weights.ckpt", weights_only=True)
    seen["files"] = sorted(path.name for path in folder.iterdir() if path.is_file())
    return seen


@pytest.mark.parametrize("size", SIZES)
def test_one_plain_file_also_after_the_fit(size: int, tmp_path: Path) -> None:
    results = ranks(size, contents, tmp_path)
    for rank, seen in enumerate(results):
        assert len(seen["weights"]) == 6
        assert seen["optimizer"] is (rank == 0)
        assert seen["files"] == ["after.ckpt", "weights.ckpt"]


def after_with_same_optimizer(rank: int, size: int, folder: Path) -> None:
    """`configure_optimizers` may return the object of the last fit: it goes on from its states, as in torch."""
    kept: list[Any] = []

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def configure_optimizers(self) -> Any:
                if not kept:
                    kept.append(torch.optim.AdamW(self.parameters(), lr=0.01))
                return kept[0]

        return Net()

    with no_group_left():
        runs = []
        for name in ("ddp", "zero_offload", "zero_3"):
            kept.clear()
            run = fit(name, size, module=module, max_epochs=1)
            trainer = run.trainer
            trainer.fit_loop.max_epochs = 2
            trainer.fit(run.module, data(), held_out())
            run.losses, run.lrs = list(run.module.losses), list(run.module.lrs)
            run.weights = {k: v.clone() for k, v in run.module.state_dict().items()}
            runs.append(run)
    for run in runs[1:]:
        assert_same(runs[0], run, tolerance=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_an_optimizer_returned_again_keeps_its_states(size: int, tmp_path: Path) -> None:
    ranks(size, after_with_same_optimizer, tmp_path)


class Note:
    """Something that `torch.load(weights_only=True)` refuses."""

    text = "hello"


def not_only_weights(rank: int, size: int, folder: Path) -> None:
    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                checkpoint["note"] = Note()

            def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                assert checkpoint["note"].text == "hello"

        return Net()

    fit(
        "zero_offload",
        size,
        module=module,
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[saver(folder)],
    )
    pl = spelling("lightning.pytorch")
    made = module(pl)
    trainer = make_trainer(pl, "zero_offload", size, max_epochs=2)
    path = folder / "epoch=0.ckpt"
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        trainer.fit(made, data(), held_out(), ckpt_path=path, weights_only=True)
    trainer = make_trainer(pl, "zero_offload", size, max_epochs=2)
    trainer.fit(made, data(), held_out(), ckpt_path=path, weights_only=False)
    assert trainer.current_epoch == 2
    trainer.test(made, held_out(), ckpt_path=path, weights_only=False, verbose=False)


def test_weights_only_reaches_the_loader_on_resume(tmp_path: Path) -> None:
    ranks(1, not_only_weights, tmp_path)


def misfits(rank: int, size: int, folder: Path) -> None:
    from zero_plugin.errors import CheckpointError

    fit(
        "zero_offload",
        size,
        module=adamw,
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[saver(folder)],
    )
    path = folder / "epoch=0.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["optimizer_states"] *= 2
    torch.save(checkpoint, folder / "two.ckpt")
    with pytest.raises(CheckpointError, match="states of 2 optimizers"):
        fit("zero_offload", size, module=adamw, ckpt_path=folder / "two.ckpt")
    with pytest.raises(CheckpointError, match="saved by another optimizer"):
        fit(
            "zero_offload",
            size,
            module=lambda pl: module_class(pl)(optimizer="Adagrad", schedule=True),
            ckpt_path=path,
        )
    assert threading.active_count() == 1


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    ranks(1, misfits, tmp_path)


# ------------------------------------------------------------------ evaluation with a checkpoint


def evaluate(rank: int, size: int, folder: Path) -> None:
    for name in ("zero_offload", "zero_3"):
        mark(name)
        run = fit(
            name,
            size,
            module=adamw,
            loaders=short(),
            enable_checkpointing=True,
            callbacks=[saver(folder / name, monitor="val_loss", save_top_k=1)],
        )
        best = run.trainer.test(run.module, short()[1], ckpt_path="best", verbose=False)
        score = float(run.trainer.checkpoint_callback.best_model_score)
        assert math.isclose(best[0]["test_loss"], score, rel_tol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_test_with_the_best_checkpoint(size: int, tmp_path: Path) -> None:
    ranks(size, evaluate, tmp_path)


# ------------------------------------------------------------------ exceptions, and collectives on one rank


def failing(rank: int, size: int, folder: Path, who: list[int]) -> str:
    from zero_plugin.errors import CheckpointError
    from zero_plugin.integrations._lightning import trainer as implementation
    from zero_plugin.integrations.lightning import ZeroOffloadStrategy

    implementation.EXCEPTION_SECONDS = 2.0

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                if batch_idx == 2 and rank in who:
                    raise ValueError("a bug on this rank")

        return Net(optimizer="AdamW")

    begin = time.monotonic()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is the question
        fit(
            ZeroOffloadStrategy(timeout_seconds=6.0),
            size,
            module=module,
            enable_checkpointing=True,
            callbacks=[saver(folder, save_on_exception=True)],
        )
    assert time.monotonic() - begin < 40
    names = [thread.name for thread in threading.enumerate()]
    assert names == ["MainThread"], f"{names} after {caught.value!r}"
    if isinstance(caught.value, CheckpointError):
        assert isinstance(caught.value.__context__, Exception)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("size", SIZES)
def test_save_on_exception_when_every_rank_fails(size: int, tmp_path: Path) -> None:
    results = ranks(size, failing, tmp_path, list(range(size)))
    assert results == ["ValueError: a bug on this rank"] * size
    (path,) = tmp_path.iterdir()
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == 3
    assert checkpoint["optimizer_states"][0]["state"][0]["step"] == 3


@pytest.mark.dist
@pytest.mark.slow
def test_save_on_exception_of_one_rank_ends_with_a_clear_error(tmp_path: Path) -> None:
    """The other rank is in a collective of the step; nobody waits for anybody for good."""
    first, second = ranks(2, failing, tmp_path, [1])
    assert second.startswith("CheckpointError: no checkpoint was saved on the exception of rank 1")
    assert first.startswith(("CheckpointError", "Collective"))
    assert not list(tmp_path.iterdir())


def saved_on_one_rank(rank: int, size: int, folder: Path) -> str:
    from zero_plugin.integrations.lightning import ZeroOffloadStrategy

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                if batch_idx == 1 and self.trainer.is_global_zero:
                    self.trainer.save_checkpoint(folder / "one.ckpt")

        return Net(optimizer="AdamW")

    begin = time.monotonic()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is the question
        fit(ZeroOffloadStrategy(timeout_seconds=5.0), size, module=module)
    assert time.monotonic() - begin < 25
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.dist
@pytest.mark.slow
def test_save_checkpoint_under_is_global_zero_ends_with_an_error(tmp_path: Path) -> None:
    """The classic mistake: under DDP it waits for half an hour."""
    first, second = ranks(2, saved_on_one_rank, tmp_path)
    assert first.startswith("Collective"), first
    # Lightning's own collectives (here of `self.log`) end when the failed rank does.
    assert second.startswith(("Collective", "RuntimeError", "DistBackendError")), second


# ------------------------------------------------------------------ callbacks that average weights


def averaging(rank: int, size: int) -> None:
    import warnings

    import lightning.pytorch.callbacks as c

    def callback(kind: str) -> Any:
        if kind == "swa":
            return c.StochasticWeightAveraging(swa_lrs=0.0625, swa_epoch_start=1)
        return c.EMAWeightAveraging(decay=0.5)

    def run(kind: str, name: str) -> Any:
        def module(pl: Any) -> Any:
            warnings.filterwarnings(
                "ignore", message=".*Swapping scheduler.*|.*SWA.*|.*lr_scheduler.*"
            )
            return module_class(pl)(batch_norm=kind == "swa")

        mark(f"{kind}, {name}")
        return fit(
            name, size, module=module, loaders=short(), max_epochs=3, callbacks=[callback(kind)]
        )

    with no_group_left():
        for kind in ("swa", "ema"):
            first = run(kind, "ddp")
            for name in REPLICATED:
                assert_same(first, run(kind, name))


@pytest.mark.parametrize("size", SIZES)
def test_weight_averaging_callbacks_work_as_under_ddp(size: int) -> None:
    """Up to stage 2 every rank has whole weights, so what these callbacks copy is right."""
    ranks(size, averaging)


def learning_rate_finder(rank: int, size: int, folder: Path) -> None:
    import tqdm
    from lightning.pytorch.callbacks import LearningRateFinder

    tqdm.tqdm.monitor_interval = 0  # the finder's progress bar would leave a thread behind

    def module(pl: Any) -> Any:
        import warnings

        warnings.simplefilter("ignore")

        class Net(module_class(pl)):
            def __init__(self) -> None:
                super().__init__()
                self.lr = 0.125

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=self.lr)

        return Net()

    with no_group_left():
        runs = [
            fit(
                name,
                size,
                module=module,
                max_epochs=1,
                callbacks=[LearningRateFinder(num_training_steps=20, update_attr=False)],
                default_root_dir=folder,
                enable_checkpointing=True,
            )
            for name in ("ddp", "zero_offload", "zero_3_offload")
        ]
    for run in runs[1:]:
        assert_same(runs[0], run, tolerance=1e-6)


def test_the_learning_rate_finder_restores_what_it_found(tmp_path: Path) -> None:
    """It saves, trains on, and loads in the middle of a fit."""
    ranks(1, learning_rate_finder, tmp_path)
