"""Reports against Lightning with sharded states; the numbers are those of docs/differences.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_runs import (
    assert_same,
    data,
    fit,
    make_trainer,
    no_group_left,
    ranks,
    saver,
    sgd,
    short,
    spelling,
)
from torch import nn


def odd(pl: Any) -> Any:
    """A student with a branch that is never used and a weight that is tied, and a frozen teacher."""

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[torch.Tensor] = []
            self.lrs: list[float] = []
            self.first = nn.Linear(8, 8)
            self.unused = nn.Linear(8, 8)
            self.last = nn.Linear(8, 8)
            self.last.weight = self.first.weight
            self.teacher = nn.Linear(8, 8).requires_grad_(requires_grad=False)

        def loss(self, batch: Any) -> torch.Tensor:
            features, _ = batch
            return nn.functional.mse_loss(
                self.last(torch.tanh(self.first(features))), self.teacher(features)
            )

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.losses.append(loss.detach().clone())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return sgd([p for p in self.parameters() if p.requires_grad])

    return Net()


def trained(rank: int, size: int, folder: Path) -> None:
    """Under DDP, which has to be told of the branch, and under us, which is not; then from a file that both can read."""
    options: dict[str, Any] = {"module": odd, "loaders": short()}
    with no_group_left():
        expected = fit("ddp_find_unused_parameters_true", size, **options)
    for name in ("zero_offload", "zero_3"):
        from zero_plugin.integrations.lightning import ZeroOffloadStrategy

        stage = 3 if name == "zero_3" else 2
        run = fit(
            ZeroOffloadStrategy(stage=stage, checkpoint="file"),
            size,
            enable_checkpointing=True,
            callbacks=[saver(folder / name)],
            **options,
        )
        assert_same(expected, run)
        state = torch.load(folder / name / "epoch=1.ckpt", weights_only=True)["state_dict"]
        assert torch.equal(state["first.weight"], state["last.weight"])
        assert state.keys() == expected.weights.keys()
        pl = spelling("lightning.pytorch")
        # an optimizer is not needed to evaluate at stage 3
        trainer = make_trainer(pl, name, size)
        (found,) = trainer.validate(
            odd(pl),
            data(count=8, seed=1, shuffle=False),
            folder / name / "epoch=1.ckpt",
            verbose=False,
        )
        assert found["val_loss"] > 0


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
def test_27_38_42_and_67_an_unused_branch_a_tied_weight_and_a_teacher(
    size: int, tmp_path: Path
) -> None:
    ranks(size, trained, tmp_path)


def offloaded(_rank: int, size: int) -> None:
    """ "stage_1_offload", which was asked for: stage 1, or none, with the states in host memory."""
    from zero_plugin.integrations.lightning import ZeroOffloadStrategy

    with no_group_left():
        expected = fit("ddp", size, loaders=short())
    for stage in (1, 0):
        strategy = ZeroOffloadStrategy(stage=stage, optimizer="host", gradients="host")
        assert_same(expected, fit(strategy, size, loaders=short()))


def test_69_offload_without_sharded_gradients() -> None:
    ranks(1, offloaded)
