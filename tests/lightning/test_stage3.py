"""Sharded parameters under the Trainer: what a user's module, callbacks and checkpoints see of them.

That losses and weights are those of DDP is in `test_fit.py` and `test_precision.py`, which run these names too.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_runs import (
    SHARDED,
    assert_same,
    data,
    fit,
    held_out,
    make_trainer,
    module_class,
    network,
    ranks,
    spelling,
)
from torch import Tensor, nn

SIZES = [pytest.param(1, id="1 rank"), pytest.param(2, id="2 ranks", marks=pytest.mark.dist)]


def compare_with_stage_2(size: int, *, names: Any = SHARDED, **options: Any) -> None:
    """Train under zero_2 and under each name; all must have the same bits."""
    expected = fit("zero_2", size, **options)
    for name in names:
        assert_same(expected, fit(name, size, **options))


# ------------------------------------------------------------------ the step


def variants(rank: int, size: int) -> None:
    compare_with_stage_2(size, accumulate_grad_batches=4, gradient_clip_val=0.1)
    compare_with_stage_2(size, module=lambda pl: module_class(pl)(optimizer="AdamW", schedule=True))
    compare_with_stage_2(size, precision="bf16-true", gradient_clip_val=0.5)
    compare_with_stage_2(size, inference_mode=False, detect_anomaly=True, names=("zero_3",))


@pytest.mark.parametrize("size", SIZES)
def test_accumulation_clipping_adamw_and_precision_have_the_bits_of_stage_2(size: int) -> None:
    ranks(size, variants)


def outside_class(pl: Any) -> Any:
    class Net(module_class(pl)):
        """Uses weights outside their modules, and the module's own ones, in every kind of step."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.head = nn.Linear(2, 2)

        def loss(self, batch: Any) -> Tensor:
            features, labels = batch
            hidden = self.net[2](self.net[0](features * self.scale))
            mixed = nn.functional.linear(self.net[3](hidden), self.head.weight, self.head.bias)
            return nn.functional.cross_entropy(mixed, labels) + self.net[1].weight.mean()

    return Net()


def outside(rank: int, size: int) -> None:
    compare_with_stage_2(size, module=outside_class)


@pytest.mark.parametrize("size", SIZES)
def test_steps_may_use_weights_outside_their_modules(size: int) -> None:
    """Also without gradients at two ranks, where the engine alone could not know that both take part."""
    ranks(size, outside)


def really_sharded(rank: int, size: int, name: str) -> None:
    seen: list[int] = []

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                weight = self.net[0].weight
                assert type(weight) is not nn.Parameter
                assert (weight.shape, weight.numel(), weight.dtype) == ((16, 8), 128, torch.float32)
                memory = self.trainer.strategy.engine.memory()
                seen.append(sum(tier["params"] for tier in memory.values()))

        return Net()

    run = fit(name, size, module=module)
    assert type(run.module.net[0].weight) is nn.Parameter
    whole = sum(p.numel() * p.element_size() for p in run.module.parameters())
    assert whole / size <= seen[0] < whole / size + 1024


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("size", SIZES)
def test_each_rank_holds_its_part_between_steps(size: int, name: str) -> None:
    ranks(size, really_sharded, name)


def writes(rank: int, size: int) -> None:
    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                engine = self.trainer.strategy.engine
                with engine.full_params(writeback=True), torch.no_grad():
                    self.net[0].weight.clamp_(-0.25, 0.25)

        return Net(optimizer="AdamW")

    compare_with_stage_2(size, module=module)
    compare_with_stage_2(size, module=module, precision="bf16-true")


@pytest.mark.parametrize("size", SIZES)
def test_a_hook_may_write_weights_inside_full_params(size: int) -> None:
    ranks(size, writes)


def forbidden(rank: int, size: int) -> list[str]:
    import copy

    from zero_plugin.errors import ParameterError

    messages: list[str] = []

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                def write() -> None:
                    with torch.no_grad():
                        self.net[0].weight.clamp_(-0.25, 0.25)

                for action in (write, self.state_dict, lambda: copy.deepcopy(self.net)):
                    with pytest.raises(ParameterError, match=r"net\.0\.weight") as caught:
                        action()
                    messages.append(str(caught.value))

        return Net()

    fit("zero_3", size, module=module, max_steps=1)
    return messages


@pytest.mark.parametrize("size", SIZES)
def test_a_hook_that_touches_sharded_weights_is_told_what_to_do(size: int) -> None:
    for messages in ranks(size, forbidden):
        assert len(messages) == 3
        assert all("full_params(" in message for message in messages)


# ------------------------------------------------------------------ validation


def uneven(rank: int, size: int) -> list[str]:
    loaders = (data(), data(count=8 + 8 * rank, seed=1, shuffle=False))
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    def module(pl: Any) -> Any:
        class Net(outside_class(pl).__class__):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.losses.append(self.loss(batch).detach().clone())
                self.lrs.append(0.0)

        return Net()

    ear = Ear()
    logging.getLogger("zero_plugin").addHandler(ear)
    compare_with_stage_2(
        size, module=module, loaders=loaders, use_distributed_sampler=False, num_sanity_val_steps=-1
    )
    logging.getLogger("zero_plugin").removeHandler(ear)
    return heard


@pytest.mark.dist
def test_ranks_may_validate_on_different_numbers_of_batches() -> None:
    """2 batches on rank 0, 4 on rank 1: gathers module by module would not meet."""
    for heard in ranks(2, uneven):
        assert len(heard) == 2 * 3  # two names; the sanity check and two epochs
        assert all("different numbers of batches" in message for message in heard)


def failing_validation(rank: int, size: int) -> None:
    loaders = (data(), data(count=8 + 8 * rank, seed=1, shuffle=False))

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                raise ValueError("a bug in validation")

        return Net()

    with pytest.raises(ValueError, match="a bug in validation"):
        fit("zero_3", size, module=module, loaders=loaders, use_distributed_sampler=False)
    assert threading.active_count() == 1
    fit("zero_3", size)


@pytest.mark.dist
def test_an_exception_in_such_a_validation_is_raised_as_it_is() -> None:
    ranks(2, failing_validation)


# ------------------------------------------------------------------ the end


def after_an_exception(rank: int, size: int) -> list[str]:
    from zero_plugin.errors import ParameterError

    pl = spelling("lightning.pytorch")

    class Net(module_class(pl)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise ValueError("a bug in the step")
            return super().training_step(batch, batch_idx)

    module = Net()
    with pytest.raises(ValueError, match="a bug in the step"):
        make_trainer(pl, "zero_3", size).fit(module, data(), held_out())
    if size == 1:
        assert module.net[0].weight.norm() > 0
        return []
    messages = []
    for action in (module.net[0].weight.norm, module.state_dict, module.half):
        with pytest.raises(ParameterError, match="sharded") as caught:
            action()
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("size", SIZES)
def test_after_an_exception_weights_are_whole_or_say_why_not(size: int) -> None:
    """Of several ranks one may have failed alone, so that nothing can be gathered."""
    for messages in ranks(size, after_an_exception):
        assert len(messages) == (0 if size == 1 else 3)
        assert all("full_state_dict()" in message for message in messages)


def too_large(rank: int, size: int) -> list[str]:
    from zero_plugin.errors import ParameterError
    from zero_plugin.integrations._lightning import common

    # Rank 1 finds memory for half of them; ranks must agree.
    common.available_host_bytes = lambda: 100 if rank else 1 << 40
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logging.getLogger("zero_plugin").addHandler(Ear())
    pl = spelling("lightning.pytorch")
    module = module_class(pl)()
    make_trainer(pl, "zero_3", size).fit(module, data(), held_out())
    with pytest.raises(ParameterError, match="sharded"):
        module.net[0].weight.norm()
    assert threading.active_count() == 1
    return heard


@pytest.mark.dist
def test_weights_stay_sharded_where_memory_does_not_hold_them() -> None:
    for heard in ranks(2, too_large):
        assert len(heard) == 1
        assert "host memory does not hold all of them for each of 2 local processes" in heard[0]


# ------------------------------------------------------------------ checkpoints


def saving_files(name: str) -> Any:
    """A strategy by its name that writes files at stage 3 too."""
    from zero_plugin.integrations.lightning import ZeroOffloadStrategy
    from zero_plugin.integrations.registration import STRATEGIES

    return ZeroOffloadStrategy(checkpoint="file", **STRATEGIES[name])


def files(rank: int, size: int, folder: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    runs = {}
    for name in ("zero_2", *SHARDED):
        runs[name] = fit(
            saving_files(name),
            size,
            module=lambda pl: module_class(pl)(optimizer="AdamW", batch_norm=True),
            precision="bf16-true",
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(folder / name, filename="{epoch}", save_top_k=-1)],
        )
        runs[name].trainer.save_checkpoint(folder / name / "after.ckpt")
    if rank:
        return
    for file in ("epoch=0.ckpt", "epoch=1.ckpt", "after.ckpt"):
        expected = torch.load(folder / "zero_2" / file, weights_only=True)
        for name in SHARDED:
            found = torch.load(folder / name / file, weights_only=True)
            assert found.keys() == expected.keys()
            assert list(found["state_dict"]) == list(expected["state_dict"])
            for key, value in expected["state_dict"].items():
                assert torch.equal(value, found["state_dict"][key]), key
            (ours,), (theirs,) = found["optimizer_states"], expected["optimizer_states"]
            assert ours["param_groups"] == theirs["param_groups"]
            assert ours["state"].keys() == theirs["state"].keys()
            for number, states in theirs["state"].items():
                assert states.keys() == ours["state"][number].keys()
                assert all(torch.equal(v, ours["state"][number][k]) for k, v in states.items())
    model = module_class(spelling("lightning.pytorch")).load_from_checkpoint(
        folder / "zero_3" / "epoch=1.ckpt", map_location="cpu"
    )
    for key, value in runs["zero_3"].weights.items():
        assert torch.equal(value, model.state_dict()[key].to(value.dtype))


@pytest.mark.parametrize("size", SIZES)
def test_a_checkpoint_is_the_file_that_stage_2_writes(size: int, tmp_path: Path) -> None:
    ranks(size, files, tmp_path)


def evaluated(rank: int, size: int, folder: Path) -> None:
    """Checkpoints in a Trainer that never fits, and one that has fitted something else."""
    results = []
    for name in ("zero_2", "zero_3"):
        run = fit(name, size)
        # A file at stage 2, a folder at stage 3.
        path = folder / f"{name}.ckpt"
        run.trainer.save_checkpoint(path)
        pl = spelling("lightning.pytorch")
        module, trainer = module_class(pl)(), make_trainer(pl, name, size)
        found = [
            trainer.test(module, held_out(), ckpt_path=path, verbose=False),
            trainer.validate(module, held_out(), ckpt_path=path, verbose=False),
        ]
        trainer.fit(module, data(), held_out())
        found.append(trainer.test(module, held_out(), ckpt_path=path, verbose=False))
        assert found[0] == found[2]
        results.append(found)
    assert results[0] == results[1]


@pytest.mark.parametrize("size", SIZES)
def test_evaluation_with_a_checkpoint(size: int, tmp_path: Path) -> None:
    ranks(size, evaluated, tmp_path)


def loads_in_the_middle(rank: int, size: int, folder: Path) -> None:
    """As the learning rate finder does, at any number of ranks."""

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                # A file at stage 2, a folder at stage 3.
                path = folder / f"middle-{self.trainer.strategy.config.stage}.ckpt"
                if (self.current_epoch, batch_idx) == (0, 2):
                    self.trainer.save_checkpoint(path)
                if (self.current_epoch, batch_idx) == (1, 1):
                    trainer = self.trainer
                    checkpoint = trainer.strategy.load_checkpoint(path, weights_only=True)
                    trainer.strategy.load_model_state_dict(checkpoint)
                    trainer.strategy.load_optimizer_state_dict(checkpoint)

        return Net(optimizer="AdamW")

    compare_with_stage_2(size, module=module)
    compare_with_stage_2(size, module=module, precision="bf16-true", names=("zero_3_offload",))


@pytest.mark.parametrize("size", SIZES)
def test_weights_and_states_can_be_loaded_while_they_are_sharded(size: int, tmp_path: Path) -> None:
    ranks(size, loads_in_the_middle, tmp_path)


# ------------------------------------------------------------------ callbacks and summaries


def averaging(rank: int, size: int) -> list[str]:
    import lightning.pytorch.callbacks as c

    from zero_plugin.errors import ConfigError

    messages = []
    for callback in (
        c.StochasticWeightAveraging(swa_lrs=0.0625),
        c.EMAWeightAveraging(),
        c.WeightAveraging(),
    ):
        with pytest.raises(ConfigError, match=type(callback).__name__) as caught:
            fit("zero_3", size, callbacks=[callback])
        messages.append(str(caught.value))
    assert threading.active_count() == 1
    return messages


@pytest.mark.parametrize("size", SIZES)
def test_callbacks_that_copy_the_module_are_refused_with_a_cure(size: int) -> None:
    for messages in ranks(size, averaging):
        assert all("strategy='zero_2'" in m and "full_params(" in m for m in messages)


def own_average(rank: int, size: int) -> None:
    """The cure that the message names."""

    def callbacks() -> list[Any]:
        import lightning.pytorch.callbacks as c

        class Average(c.Callback):
            def __init__(self) -> None:
                self.average: list[Tensor] = []

            def on_train_batch_end(
                self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
            ) -> None:
                with trainer.strategy.engine.full_params(), torch.no_grad():
                    weights = [p.detach().clone() for p in pl_module.parameters()]
                pairs = zip(self.average or weights, weights, strict=True)
                self.average = [torch.lerp(a, b, 0.5) for a, b in pairs]

            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                engine = trainer.strategy.engine
                with engine.full_params(writeback=True), torch.no_grad():
                    for parameter, value in zip(pl_module.parameters(), self.average, strict=True):
                        parameter.copy_(value)

        return [Average()]

    expected = fit("zero_2", size, callbacks=callbacks())
    for name in SHARDED:
        assert_same(expected, fit(name, size, callbacks=callbacks()))


@pytest.mark.parametrize("size", SIZES)
def test_averaging_inside_full_params_has_the_bits_of_stage_2(size: int) -> None:
    ranks(size, own_average)


def lightnings_average(rank: int, size: int) -> None:
    def callbacks() -> list[Any]:
        import lightning.pytorch.callbacks as c

        class Average(c.EMAWeightAveraging):
            def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
                with trainer.strategy.engine.full_params():
                    super().on_train_batch_end(trainer, *args, **kwargs)

            def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
                self._swapped(trainer, super().on_validation_epoch_start, pl_module)

            def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                self._swapped(trainer, super().on_validation_epoch_end, pl_module)

            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                self._swapped(trainer, super().on_train_end, pl_module)

            @staticmethod
            def _swapped(trainer: Any, hook: Any, module: Any) -> None:
                engine = trainer.strategy.engine
                with engine.full_params(writeback=True):
                    hook(trainer, module)

        return [Average(decay=0.5)]

    expected = fit("zero_2", size, callbacks=callbacks())
    for name in SHARDED:
        assert_same(expected, fit(name, size, callbacks=callbacks()))


@pytest.mark.parametrize("size", SIZES)
def test_lightnings_own_averaging_inside_full_params(size: int) -> None:
    ranks(size, lightnings_average)


def summaries(rank: int, size: int) -> None:
    from lightning.pytorch.callbacks import ModelSummary
    from lightning.pytorch.utilities.model_summary import summarize

    texts: dict[str, list[str]] = {}

    class Summary(ModelSummary):
        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            found = summarize(pl_module, max_depth=-1)
            texts.setdefault(trainer.strategy_name, []).append(
                f"{found} {found.total_parameters} {found.trainable_parameters} {found.model_size}"
            )

        @staticmethod
        def summarize(summary_data: Any, *args: Any, **kwargs: Any) -> None:
            texts.setdefault("printed", []).append(str(summary_data))

    for name in ("zero_2", "zero_3"):
        pl = spelling("lightning.pytorch")
        trainer = make_trainer(pl, name, size, max_steps=2, callbacks=[Summary()])
        trainer.strategy_name = name
        trainer.fit(module_class(pl)(), data(), held_out())
    assert len(texts["zero_2"]) == 2
    assert texts["zero_2"] == texts["zero_3"]
    assert "210 178" in texts["zero_3"][0]
    if rank == 0:
        first, second = texts["printed"]
        assert first == second


@pytest.mark.parametrize("size", SIZES)
def test_summaries_count_true_sizes(size: int) -> None:
    ranks(size, summaries)


# ------------------------------------------------------------------ how the module is made


def made_late(rank: int, size: int, folder: Path) -> None:
    pl = spelling("lightning.pytorch")

    class Late(module_class(pl)):
        def __init__(self) -> None:
            super().__init__()
            del self.net
            self.net: Any = None

        def configure_model(self) -> None:
            if self.net is None:
                self.net = module_class(pl)().net

    results = []
    for name in ("zero_2", "zero_3"):
        path = folder / f"{name}.ckpt"
        fit(name, size, module=lambda pl: Late()).trainer.save_checkpoint(path)
        resumed = fit(name, size, module=lambda pl: Late(), max_epochs=3, ckpt_path=path)
        pl.seed_everything(7, verbose=False)
        trainer = make_trainer(pl, name, size, precision="bf16-true")
        with trainer.init_module(empty_init=True):
            module = module_class(pl)()
        assert module.net[0].weight.dtype == torch.bfloat16
        trainer.validate(module, held_out(), ckpt_path=path, verbose=False)
        trainer.fit(module, data(), held_out())
        resumed.losses += module.losses
        results.append(resumed)
    assert_same(*results)


@pytest.mark.parametrize("size", SIZES)
def test_configure_model_and_empty_init(size: int, tmp_path: Path) -> None:
    ranks(size, made_late, tmp_path)


def built_in_shards(rank: int, size: int, folder: Path) -> None:
    from zero_plugin import init_context

    pl = spelling("lightning.pytorch")

    class Late(module_class(pl)):
        def __init__(self) -> None:
            super().__init__()
            del self.net
            self.net: Any = None

        def configure_model(self) -> None:
            if self.net is None:
                config = self.trainer.strategy.config
                with init_context(config) if config.stage == 3 else contextlib.nullcontext():
                    self.net = network()

    runs = {name: fit(name, size, module=lambda pl: Late()) for name in ("zero_2", *SHARDED)}
    runs["zero_2"].trainer.save_checkpoint(folder / "late.ckpt")
    for name in SHARDED:
        assert_same(runs["zero_2"], runs[name])
    options: dict[str, Any] = {"max_epochs": 3, "ckpt_path": folder / "late.ckpt"}
    compare_with_stage_2(size, module=lambda pl: Late(), **options)


@pytest.mark.parametrize("size", SIZES)
def test_configure_model_may_build_straight_into_shards(size: int, tmp_path: Path) -> None:
    ranks(size, built_in_shards, tmp_path)


# ------------------------------------------------------------------ files


def infinity(rank: int, size: int, folder: str) -> None:
    """All states in files: the bits of stage 2, and a checkpoint that is saved after the fit, when the engine is gone."""
    from zero_plugin.integrations.lightning import ZeroOffloadStrategy

    def strategy() -> Any:
        tiers: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"}
        return ZeroOffloadStrategy(stage=3, **tiers, nvme_path=folder, checkpoint="file")

    module = module_class_of_adamw
    expected, found = (
        fit(chosen, size, module=module, accumulate_grad_batches=2, gradient_clip_val=0.1)
        for chosen in ("zero_2", strategy())
    )
    assert_same(expected, found)
    paths = [Path(folder) / name for name in ("two.ckpt", "infinity.ckpt")]
    run: Any = None
    for path, run in zip(paths, (expected, found), strict=True):
        run.trainer.save_checkpoint(path)
    if rank == 0:
        two, infinite = (torch.load(path, weights_only=False) for path in paths)
        for one, other in zip(two["optimizer_states"], infinite["optimizer_states"], strict=True):
            for number, state in one["state"].items():
                for key, value in state.items():
                    assert torch.equal(value, other["state"][number][key]), key
    # The files go with the last reference to the states that were kept.
    del expected, found, run
    gc.collect()
    if rank == 0:
        assert not any("rank0" in path.name for path in Path(folder).iterdir())


def module_class_of_adamw(pl: Any) -> Any:
    return module_class(pl)(optimizer="AdamW")


@pytest.mark.parametrize("size", SIZES)
def test_states_in_files_have_the_bits_of_stage_2(size: int, tmp_path: Path) -> None:
    ranks(size, infinity, str(tmp_path))
