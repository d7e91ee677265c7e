"""`Trainer.fit` under our strategies against plain DDP: losses, learning rates and weights, at 1 and 2 processes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.lightning_runs import (
    NAMES,
    Run,
    assert_same,
    collect,
    data,
    fit,
    held_out,
    make_trainer,
    module_class,
    network,
    no_group_left,
    ranks,
    sgd,
    spelling,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

SIZES = [pytest.param(1, id="1 rank"), pytest.param(2, id="2 ranks", marks=pytest.mark.dist)]
# Stage 2 reduces every micro-batch, and so sums over ranks and micro-batches in another order than DDP.
EXACT_WHEN_ACCUMULATING = {1: NAMES, 2: ("zero_1",)}
ROOTS = ["lightning.pytorch", "pytorch_lightning"]


def compare_with_ddp(
    size: int, *, tolerance: float = 0.0, names: Any = NAMES, **options: Any
) -> list[Run]:
    """Train under DDP and under each name; all must agree. Returns our runs."""
    with no_group_left():
        expected = fit("ddp", size, **options)
        runs = [fit(name, size, **options) for name in names]
        for run in runs:
            assert_same(expected, run, tolerance=tolerance)
        return runs


# ------------------------------------------------------------------ the plain case


def plain(rank: int, size: int, root: str) -> None:
    compare_with_ddp(size, root=root)


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("size", SIZES)
def test_same_bits_as_ddp(size: int, root: str) -> None:
    ranks(size, plain, root)


def adamw(rank: int, size: int) -> None:
    compare_with_ddp(
        size,
        module=lambda pl: module_class(pl)(optimizer="AdamW", schedule=True),
        tolerance=1e-6,
    )


@pytest.mark.parametrize("size", SIZES)
def test_adamw_with_a_schedule_follows_ddp(size: int) -> None:
    """The compiled AdamW is within an ulp of torch's; the learning rates are exactly equal."""
    ranks(size, adamw)


def no_group_at_one_rank(rank: int, size: int) -> list[str]:
    run = fit("zero_offload", 1)
    assert not torch.distributed.is_initialized()
    assert run.trainer.world_size == 1
    assert isinstance(run.trainer.strategy.all_gather(torch.ones(2)), torch.Tensor)
    return [thread.name for thread in threading.enumerate()]


def test_one_process_needs_no_process_group() -> None:
    assert ranks(1, no_group_at_one_rank) == [["MainThread"]]


def group_under_torchrun(rank: int, size: int) -> None:
    with no_group_left():
        fit("zero_offload", 1, max_epochs=1)
        assert torch.distributed.get_world_size() == 1


def test_one_process_of_torchrun_has_the_group_that_torchrun_promises() -> None:
    ranks(1, group_under_torchrun, env={"TORCHELASTIC_RUN_ID": "test"})


# ------------------------------------------------------------------ accumulation and clipping


def accumulation(rank: int, size: int) -> None:
    # 12 or 6 batches an epoch, windows of 5: the last window of each epoch is short and must still step.
    for run in compare_with_ddp(size, accumulate_grad_batches=5, max_epochs=2, tolerance=1e-6):
        assert run.trainer.global_step == 2 * (3 if size == 1 else 2)
    compare_with_ddp(
        size, accumulate_grad_batches=4, max_epochs=1, names=EXACT_WHEN_ACCUMULATING[size]
    )


@pytest.mark.parametrize("size", SIZES)
def test_accumulation_with_a_short_last_window(size: int) -> None:
    """Divided by 4 everything is exact; divided by 5, DDP rounds in another order."""
    ranks(size, accumulation)


def clipping(rank: int, size: int) -> None:
    compare_with_ddp(size, gradient_clip_val=0.015625, gradient_clip_algorithm="value")
    compare_with_ddp(size, gradient_clip_val=0.1, tolerance=2e-6)
    # A bound that no gradient reaches changes nothing, not even by rounding.
    compare_with_ddp(size, gradient_clip_val=1e6)


@pytest.mark.parametrize("size", SIZES)
def test_clipping_by_value_and_by_norm(size: int) -> None:
    ranks(size, clipping)


def own_clipping(rank: int, size: int) -> None:
    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def configure_gradient_clipping(
                self,
                optimizer: Any,
                gradient_clip_val: Any = None,
                gradient_clip_algorithm: Any = None,
            ) -> None:
                if self.global_step % 2:
                    self.clip_gradients(
                        optimizer, gradient_clip_val=0.015625, gradient_clip_algorithm="value"
                    )

        return Net()

    compare_with_ddp(size, module=module)


@pytest.mark.parametrize("size", SIZES)
def test_configure_gradient_clipping_is_the_users(size: int) -> None:
    ranks(size, own_clipping)


# ------------------------------------------------------------------ manual optimization


def gan_class(pl: Any, *, toggle: bool, clip: bool = False) -> Any:
    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Linear(8, 8)
            self.critic = network()
            self.losses: list[torch.Tensor] = []
            self.lrs: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            features, labels = batch
            if toggle:
                self.toggle_optimizer(first)
            loss = nn.functional.cross_entropy(self.critic(self.generator(features)), labels)
            first.zero_grad()
            self.manual_backward(loss)
            if clip:
                self.clip_gradients(
                    first, gradient_clip_val=0.03125, gradient_clip_algorithm="value"
                )
            first.step()
            if toggle:
                self.untoggle_optimizer(first)
                self.toggle_optimizer(second)
            other = nn.functional.cross_entropy(
                self.critic(self.generator(features).detach()), 1 - labels
            )
            second.zero_grad()
            self.manual_backward(other)
            second.step()
            if toggle:
                self.untoggle_optimizer(second)
            for scheduler in self.lr_schedulers():
                scheduler.step()
            self.losses += [loss.detach(), other.detach()]
            self.lrs += [first.param_groups[0]["lr"], second.param_groups[0]["lr"]]

        def configure_optimizers(self) -> Any:
            optimizers = [sgd(self.generator.parameters()), sgd(self.critic.parameters(), lr=0.25)]
            schedulers = [
                torch.optim.lr_scheduler.StepLR(o, step_size=3, gamma=0.5) for o in optimizers
            ]
            return optimizers, schedulers

    return Gan()


def gan_in_plain_torch(*, clip: bool) -> dict[str, torch.Tensor]:
    """What the module above does, on the whole batch in one process. (DDP cannot run it.)"""
    pl = spelling("lightning.pytorch")
    pl.seed_everything(7, verbose=False)
    gan = gan_class(pl, toggle=False)
    (first, second), schedulers = gan.configure_optimizers()
    for _ in range(2):
        for features, labels in data(batch=8, shuffle=False):
            loss = nn.functional.cross_entropy(gan.critic(gan.generator(features)), labels)
            first.zero_grad()
            loss.backward()
            if clip:
                nn.utils.clip_grad_value_(gan.generator.parameters(), 0.03125)
            first.step()
            fake = gan.generator(features).detach()
            loss = nn.functional.cross_entropy(gan.critic(fake), 1 - labels)
            second.zero_grad()
            loss.backward()
            second.step()
            for scheduler in schedulers:
                scheduler.step()
    return gan.state_dict()


def manual(rank: int, size: int) -> None:
    whole = data().dataset
    own = torch.utils.data.Subset(whole, range(rank, 48, size))
    loaders = (torch.utils.data.DataLoader(own, batch_size=8 // size),)
    for toggle in (True, False):
        # Without toggling, the generator's loss leaves gradients in the critic, whose own zero_grad clears them.
        expected = gan_in_plain_torch(clip=toggle)
        for name in NAMES:
            run = fit(
                name,
                size,
                module=lambda pl, toggle=toggle: gan_class(pl, toggle=toggle, clip=toggle),
                loaders=loaders,
                use_distributed_sampler=False,
            )
            tolerance = 0.0 if size == 1 else 1e-6
            for key, value in expected.items():
                torch.testing.assert_close(run.weights[key], value, rtol=tolerance, atol=tolerance)
            assert run.lrs[-2:] == [0.125 * 0.5**4, 0.25 * 0.5**4]


@pytest.mark.parametrize("size", SIZES)
def test_manual_optimization_with_two_optimizers_and_schedulers(size: int) -> None:
    ranks(size, manual)


def manual_accumulation(rank: int, size: int) -> None:
    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False

            def training_step(self, batch: Any, batch_idx: int) -> None:
                optimizer = self.optimizers()
                last = batch_idx % 2 == 1
                loss = self.loss(batch) / 2

                def closure() -> torch.Tensor:
                    self.manual_backward(loss)
                    return loss

                with optimizer.toggle_model(sync_grad=last):
                    if last:
                        optimizer.step(closure=closure)
                        optimizer.zero_grad()
                    else:
                        closure()
                self.losses.append(loss.detach())
                self.lrs.append(0.0)

        return Net()

    compare_with_ddp(size, module=module, names=EXACT_WHEN_ACCUMULATING[size])
    compare_with_ddp(size, module=module, tolerance=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_manual_accumulation_with_toggle_model_and_closures(size: int) -> None:
    ranks(size, manual_accumulation)


# ------------------------------------------------------------------ optimizers and schedulers


def scheduler_stays_right(rank: int, size: int) -> None:
    class Seen:
        optimizer: Any = None
        scheduler: Any = None

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def configure_optimizers(self) -> Any:
                Seen.optimizer = sgd(self.parameters())
                Seen.scheduler = torch.optim.lr_scheduler.LambdaLR(
                    Seen.optimizer, lambda step: 0.5**step
                )
                return [Seen.optimizer], [{"scheduler": Seen.scheduler, "interval": "step"}]

        return Net()

    # Warnings are errors here, so "lr_scheduler.step() before optimizer.step()" would fail the fit.
    run = fit("zero_offload", size, module=module, max_epochs=1)
    assert run.trainer.optimizers == [Seen.optimizer]
    assert Seen.scheduler.optimizer is Seen.optimizer
    assert Seen.optimizer._opt_called
    assert run.lrs == [0.125 * 0.5**step for step in range(len(run.lrs))]
    assert isinstance(Seen.optimizer, torch.optim.SGD)


@pytest.mark.parametrize("size", SIZES)
def test_the_scheduler_keeps_the_users_optimizer(size: int) -> None:
    ranks(size, scheduler_stays_right)


def reduce_on_plateau(rank: int, size: int) -> None:
    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def configure_optimizers(self) -> Any:
                optimizer = sgd(self.parameters())
                scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                    optimizer, factor=0.5, patience=0, threshold=0.3
                )
                return {
                    "optimizer": optimizer,
                    "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
                }

        return Net()

    runs = compare_with_ddp(size, module=module, max_epochs=6)
    assert len(set(runs[0].lrs)) > 1


@pytest.mark.parametrize("size", SIZES)
def test_reduce_on_plateau_sees_the_same_synchronised_loss(size: int) -> None:
    ranks(size, reduce_on_plateau)


def no_optimizer(rank: int, size: int) -> None:
    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            """Steps by hand on what backward left."""

            def configure_optimizers(self) -> None:
                return None

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.losses.append(self.loss(batch).detach())
                self.lrs.append(0.0)
                return self.loss(batch)

            def on_after_backward(self) -> None:
                with torch.no_grad():
                    for parameter in self.parameters():
                        if parameter.grad is not None:
                            parameter.sub_(0.125 * parameter.grad)
                            parameter.grad = None

        import warnings

        warnings.filterwarnings(
            "ignore", message=".*returned `None`, this fit will run with no optimizer.*"
        )
        return Net()

    for run in compare_with_ddp(size, module=module):
        assert run.trainer.strategy.engine is None


@pytest.mark.parametrize("size", SIZES)
def test_configure_optimizers_may_return_none(size: int) -> None:
    """Nothing is sharded, and gradients are still averaged."""
    ranks(size, no_optimizer)


def refused_optimizers(rank: int, size: int) -> list[str]:
    messages: list[str] = []
    for name in ("LBFGS",):
        with pytest.raises(Exception, match=name) as caught:
            fit("zero_offload", size, module=lambda pl, name=name: module_class(pl)(optimizer=name))
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    assert threading.active_count() == 1
    return messages


def test_lbfgs_is_refused_clearly() -> None:
    ((message,),) = ranks(1, refused_optimizers)
    assert message.startswith("OptimizerError: ")
    assert "LBFGS" in message


def step_arguments(rank: int, size: int) -> None:
    seen: list[Any] = []

    class Extra(torch.optim.SGD):
        def step(self, closure: Any = None, *, extra: int = 0) -> Any:
            seen.append(extra)
            return super().step(closure)

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.125)

            def optimizer_step(
                self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None
            ) -> None:
                optimizer.step(closure=closure, extra=batch_idx)

        return Net()

    with no_group_left():
        for strategy in ("ddp", "zero_offload"):
            with pytest.raises(TypeError, match="extra"):
                fit(strategy, size, module=module)


def test_an_unknown_step_argument_raises_as_in_torch() -> None:
    ranks(1, step_arguments)


# ------------------------------------------------------------------ hooks


def own_steps(rank: int, size: int) -> None:
    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            """Warm-up inside optimizer_step, an own backward, and a loss hook."""

            def optimizer_step(
                self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None
            ) -> None:
                for group in optimizer.param_groups:
                    group["lr"] = 0.125 if batch_idx % 2 else 0.0625
                optimizer.step(closure=closure)

            def backward(self, loss: torch.Tensor) -> None:
                loss.backward(torch.tensor(0.5))

            def on_before_backward(self, loss: torch.Tensor) -> None:
                assert torch.equal(loss.detach(), self.losses[-1])

            def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
                optimizer.zero_grad(set_to_none=False)

        return Net()

    compare_with_ddp(size, module=module)


@pytest.mark.parametrize("size", SIZES)
def test_overridden_step_backward_and_zero_grad(size: int) -> None:
    ranks(size, own_steps)


def gradients_in_hooks(rank: int, size: int, name: str) -> None:
    from zero_plugin.errors import GradientAccessError

    seen: dict[str, list[torch.Tensor]] = {}
    refused: list[str] = []

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def look(self, hook: str) -> None:
                strategy = self.trainer.strategy
                engine = getattr(strategy, "engine", None)
                if engine is None:
                    seen.setdefault(f"ddp {hook}", []).append(self.net[0].weight.grad.clone())
                    return
                with pytest.raises(GradientAccessError, match=r"net\.0\.weight") as caught:
                    self.net[0].weight.grad.norm()
                refused.append(str(caught.value))
                with engine.full_grads():
                    seen.setdefault(f"zero {hook}", []).append(self.net[0].weight.grad.clone())
                with pytest.raises(GradientAccessError):
                    torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

            def on_after_backward(self) -> None:
                self.look("after backward")

            def on_before_optimizer_step(self, optimizer: Any) -> None:
                self.look("before step")

        return Net()

    compare_with_ddp(size, module=module, names=(name,), max_epochs=1)
    for hook in ("after backward", "before step"):
        for ddp, zero in zip(seen[f"ddp {hook}"], seen[f"zero {hook}"], strict=True):
            assert torch.equal(ddp, zero)
    assert all("full_grads" in text and "clip_grad_norm_" in text for text in refused)


@pytest.mark.parametrize("name", ["zero_offload", "zero_3"])
@pytest.mark.parametrize("size", SIZES)
def test_hooks_see_averaged_gradients_or_a_clear_error(size: int, name: str) -> None:
    ranks(size, gradients_in_hooks, name)


def skipped_step(rank: int, size: int) -> None:
    """`training_step` may return None at one process: nothing is updated in that step."""

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = super().training_step(batch, batch_idx)
                return None if batch_idx % 3 == 1 else loss

        import warnings

        warnings.filterwarnings("ignore", message=".*training_step` returned `None`.*")
        return Net()

    compare_with_ddp(size, module=module)


def test_training_step_may_return_none() -> None:
    ranks(1, skipped_step)


# ------------------------------------------------------------------ the Trainer's stages


def stages(rank: int, size: int) -> dict[str, Any]:
    pl = spelling("lightning.pytorch")
    results: dict[str, Any] = {}
    with no_group_left():
        for strategy in ("ddp", "zero_offload", "zero_3"):
            pl.seed_everything(7, verbose=False)
            module = module_class(pl)(optimizer="sgd", schedule=True)
            trainer = make_trainer(pl, strategy, size, max_epochs=1)
            seen = [trainer.validate(module, held_out(), verbose=False)]
            assert getattr(trainer.strategy, "engine", None) is None
            assert trainer.optimizers == []
            seen.append(trainer.test(module, held_out(), verbose=False))
            trainer.fit(module, data(), held_out())
            seen.append(trainer.test(module, held_out(), verbose=False))
            trainer.fit_loop.max_epochs = 2
            trainer.fit(module, data(), held_out())
            seen.append(trainer.validate(module, held_out(), verbose=False))
            predictions = trainer.predict(module, held_out())
            run = collect(module, trainer)
            results[strategy] = (run, seen, torch.cat(predictions))
            assert not module.net[0].weight._backward_hooks
            assert not module.net[0].weight._post_accumulate_grad_hooks
    for name in ("zero_offload", "zero_3"):
        assert_same(results["ddp"][0], results[name][0])
        assert results["ddp"][1] == results[name][1]
        assert torch.equal(results["ddp"][2], results[name][2])
    return {"threads": threading.active_count()}


@pytest.mark.parametrize("size", SIZES)
def test_validate_test_fit_test_fit_validate_predict(size: int) -> None:
    assert all(result == {"threads": 1} for result in ranks(size, stages))


def after_the_fit(rank: int, size: int, name: str) -> None:
    run = fit(name, size)
    module = run.module
    assert run.trainer.strategy.engine is None
    features, labels = next(iter(data()))
    nn.functional.cross_entropy(module.net(features), labels).backward()
    assert module.net[0].weight.grad.shape == (16, 8)  # a plain gradient of a plain module
    module.zero_grad()
    plain_optimizer = sgd(module.parameters())
    plain_optimizer.step()


@pytest.mark.parametrize("name", ["zero_offload", "zero_3", "zero_3_offload"])
@pytest.mark.parametrize("size", SIZES)
def test_the_module_is_plain_after_the_fit(size: int, name: str) -> None:
    ranks(size, after_the_fit, name)


def configure_model(rank: int, size: int) -> None:
    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def __init__(self) -> None:
                super().__init__()
                del self.net
                self.net: Any = None

            def configure_model(self) -> None:
                if self.net is None:
                    self.net = network()

        return Net()

    compare_with_ddp(size, module=module)
    pl = spelling("lightning.pytorch")
    trainer = make_trainer(pl, "zero_offload", size)
    with trainer.init_module():  # warnings are errors: it does not claim to need configure_model
        assert module_class(pl)().net[0].weight.device.type == "cpu"


@pytest.mark.parametrize("size", SIZES)
def test_configure_model_and_init_module(size: int) -> None:
    ranks(size, configure_model)


def sampler(rank: int, size: int) -> list[int]:
    rows: list[int] = []

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                rows.extend(batch[0][:, 0].mul(1e6).int().tolist())
                return super().training_step(batch, batch_idx)

        return Net()

    run = fit("zero_2", size, module=module, max_epochs=1)
    loader = run.trainer.train_dataloader
    assert isinstance(loader.sampler, torch.utils.data.DistributedSampler)
    assert (loader.sampler.num_replicas, loader.sampler.rank) == (size, rank)
    return rows


@pytest.mark.dist
def test_each_rank_gets_its_own_part_of_the_data() -> None:
    first, second = ranks(2, sampler)
    assert len(first) == len(second) == 24
    assert not set(first) & set(second)


def metrics(rank: int, size: int) -> dict[str, float]:
    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                value = torch.tensor(float(rank + 1))
                self.log("mean", value, sync_dist=True)
                self.log("sum", value, sync_dist=True, reduce_fx="sum")
                self.log("max", value, sync_dist=True, reduce_fx="max")
                self.log("alone", value)
                return super().training_step(batch, batch_idx)

        return Net()

    run = fit("zero_offload", size, module=module, max_steps=1, limit_val_batches=0)
    strategy = run.trainer.strategy
    from torch.distributed import ReduceOp

    assert strategy.reduce(torch.tensor(float(rank)), reduce_op=ReduceOp.SUM).item() == 1.0
    assert strategy.reduce("text") == "text"
    assert strategy.broadcast([rank]) == [0]
    assert strategy.reduce_boolean_decision(rank == 0, all=False)
    assert not strategy.reduce_boolean_decision(rank == 0)
    return {name: float(value) for name, value in run.trainer.logged_metrics.items()}


@pytest.mark.dist
def test_sync_dist_logging() -> None:
    first, second = ranks(2, metrics)
    assert (first["mean"], first["sum"], first["max"]) == (1.5, 3.0, 2.0)
    assert (second["mean"], second["sum"], second["max"]) == (1.5, 3.0, 2.0)
    assert (first["alone"], second["alone"]) == (1.0, 2.0)


def early_stopping(rank: int, size: int) -> None:
    def callbacks() -> list[Any]:
        from lightning.pytorch.callbacks import EarlyStopping

        return [EarlyStopping("val_loss", patience=1, min_delta=0.02)]

    with no_group_left():
        expected = fit("ddp", size, max_epochs=20, callbacks=callbacks())
        run = fit("zero_offload", size, max_epochs=20, callbacks=callbacks())
    assert_same(expected, run)
    assert 1 < run.trainer.current_epoch == expected.trainer.current_epoch < 20


@pytest.mark.parametrize("size", SIZES)
def test_early_stopping_stops_at_the_same_epoch(size: int) -> None:
    ranks(size, early_stopping)


# ------------------------------------------------------------------ modules of special kinds


def batch_norm(rank: int, size: int) -> None:
    compare_with_ddp(size, module=lambda pl: module_class(pl)(batch_norm=True))
    compare_with_ddp(
        size,
        module=lambda pl: module_class(pl)(batch_norm=True),
        accumulate_grad_batches=2,
        limit_val_batches=0,
        names=EXACT_WHEN_ACCUMULATING[size],
    )


@pytest.mark.parametrize("size", SIZES)
def test_buffers_are_rank_0s_before_each_step(size: int) -> None:
    """`training_step` is not the module's forward, so a forward hook alone would not see it begin."""
    ranks(size, batch_norm)


def sync_batchnorm(rank: int, size: int, name: str) -> list[str]:
    kinds: list[str] = []

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                kinds.append(type(self.net[1]).__name__)
                self.net[
                    1
                ].eval()  # torch's SyncBatchNorm trains on GPUs only, and DDP refuses it elsewhere
                return super().training_step(batch, batch_idx)

        return Net(batch_norm=True)

    run = fit(name, size, module=module, sync_batchnorm=True)
    assert not isinstance(run.module.net[1], nn.SyncBatchNorm)  # taken back at the end
    return sorted(set(kinds))


@pytest.mark.parametrize("name", ["zero_offload", "zero_3"])
@pytest.mark.parametrize("size", SIZES)
def test_sync_batchnorm_is_applied_and_taken_back(size: int, name: str) -> None:
    assert ranks(size, sync_batchnorm, name) == [["SyncBatchNorm"]] * size


def compiled(rank: int, size: int) -> None:
    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.loss(batch)

            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                self.losses.append(outputs["loss"].clone())

        return torch.compile(Net(), backend="eager")

    pl = spelling("lightning.pytorch")
    import warnings

    warnings.simplefilter("ignore")
    with no_group_left():
        runs = []
        for strategy in ("ddp", "zero_offload", "zero_3"):
            pl.seed_everything(7, verbose=False)
            made = module(pl)
            trainer = make_trainer(pl, strategy, size, max_epochs=1)
            trainer.fit(made, data(), held_out())
            runs.append(collect(trainer.lightning_module, trainer))
    for run in runs[1:]:
        assert_same(runs[0], run)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_a_compiled_module_is_accepted(size: int) -> None:
    ranks(size, compiled)


# ------------------------------------------------------------------ failures


def failing_step(rank: int, size: int, name: str) -> None:
    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = super().training_step(batch, batch_idx)
                if batch_idx == 2:
                    raise ValueError("a bug in the step")
                return loss

            def on_after_backward(self) -> None:
                if len(self.losses) == 2 and self.trainer.max_epochs == 9:
                    raise RuntimeError("a bug in a hook")

        return Net()

    with pytest.raises(ValueError, match="a bug in the step"):
        fit(name, size, module=module)
    with pytest.raises(RuntimeError, match="a bug in a hook"):
        fit(name, size, module=module, max_epochs=9)
    assert threading.active_count() == 1
    compare_with_ddp(size, names=(name,))  # and the process can train again


@pytest.mark.parametrize("name", ["zero_offload", "zero_3"])
@pytest.mark.parametrize("size", SIZES)
def test_an_exception_is_raised_as_it_is_and_leaves_nothing(size: int, name: str) -> None:
    ranks(size, failing_step, name)


def interrupted(rank: int, size: int) -> None:
    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if batch_idx == 2:
                    raise KeyboardInterrupt
                return super().training_step(batch, batch_idx)

        return Net()

    with pytest.raises(SystemExit):
        fit("zero_offload", size, module=module)
    assert threading.active_count() == 1


def test_keyboard_interrupt_ends_the_run_and_leaves_nothing() -> None:
    ranks(1, interrupted)


def wrong_settings(rank: int, size: int) -> None:
    from zero_plugin import ZeroConfig
    from zero_plugin.errors import ConfigError
    from zero_plugin.integrations.lightning import ZeroOffloadStrategy

    with pytest.raises(ConfigError, match="did you mean 'optimizer'"):
        ZeroOffloadStrategy(optimiser="host")
    with pytest.raises(ConfigError, match="pass one or the other"):
        ZeroOffloadStrategy(ZeroConfig(), stage=2)
    with pytest.raises(ConfigError, match="find_unused_parameters"):
        ZeroOffloadStrategy(find_unused_parameters=True)
    assert ZeroOffloadStrategy(ZeroConfig(stage=1)).config == ZeroConfig(stage=1)
    assert ZeroOffloadStrategy(stage=1, threads=2).config == ZeroConfig(stage=1, threads=2)


def test_wrong_settings_are_refused_at_once() -> None:
    ranks(1, wrong_settings)


def checkpoints_in_the_step(rank: int, size: int) -> None:
    """`checkpoint` called in `training_step` itself, outside of every module's forward."""
    seen: list[int] = []
    rows = 4096

    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def loss(self, batch: Any) -> Any:
                inputs = batch[0].repeat(rows // len(batch[0]), 1)
                hidden = checkpoint(self.net, inputs, use_reentrant=False)
                if torch.is_grad_enabled():
                    seen.append(self.trainer.strategy.engine.memory()["host"]["activations"])
                return hidden.square().mean()

        return Net()

    from zero_plugin.integrations.lightning import ZeroOffloadStrategy

    expected = fit("zero_2", size, module=module)
    seen.clear()
    assert_same(
        expected, fit(ZeroOffloadStrategy(stage=2, activations="host"), size, module=module)
    )
    assert min(seen) >= rows * 8 * 4


def test_checkpoints_in_a_training_step_are_offloaded() -> None:
    ranks(1, checkpoints_in_the_step)
