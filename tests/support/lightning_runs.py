"""Small LightningModules and one function that trains them, for either spelling and any strategy.

The usual optimizer is SGD with powers of two for learning rate and momentum: every product is then exact, so that a
run has the same bits as under DDP whatever the update fuses. Everything here is called inside a rank process.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from support.ranks import run_ranks

PRELOAD = (
    "lightning.pytorch",
    "zero_plugin.engine",
    "zero_plugin.integrations._lightning.trainer_lightning",
)
REPLICATED = ("zero_1", "zero_2", "zero_offload")
SHARDED = ("zero_3", "zero_3_offload")
NAMES = (*REPLICATED, *SHARDED)


def ranks(size: int, function: Any, *args: Any, **options: Any) -> list[Any]:
    """`run_ranks` with Lightning imported once for all tests; several ranks as torchrun would start them."""
    return run_ranks(
        size,
        function,
        *args,
        **{
            "store": "none" if size == 1 else "file",
            "env": {} if size == 1 else {"TORCHELASTIC_RUN_ID": "test"},
            "preload": PRELOAD,
            "deadline": 90.0,
            **options,
        },
    )


def data(
    *, count: int = 48, batch: int = 4, seed: int = 0, shuffle: bool = True
) -> DataLoader[Any]:
    """Batches of ([batch, 8] features, [batch] labels of two classes)."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 8, generator=generator)
    labels = (features.sum(dim=1) > 0).long()
    return DataLoader(TensorDataset(features, labels), batch_size=batch, shuffle=shuffle)


def held_out() -> DataLoader[Any]:
    """Four batches to validate on."""
    return data(count=16, seed=1, shuffle=False)


def short() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Six batches to train on, and two to validate on."""
    return data(count=24), data(count=8, seed=1, shuffle=False)


def network(*, batch_norm: bool = False) -> nn.Sequential:
    """8 -> 16 -> 2, with a frozen layer norm inside."""
    norm = nn.LayerNorm(16)
    norm.requires_grad_(False)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16) if batch_norm else norm, nn.ReLU(), nn.Linear(16, 2)
    )


def sgd(parameters: Any, lr: float = 0.125) -> torch.optim.SGD:
    """SGD whose products are exact."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.5)


def module_class(pl: Any) -> type[Any]:
    """A LightningModule class of one spelling; options say what differs from the plain case."""

    class Net(pl.LightningModule):
        def __init__(
            self, *, optimizer: str = "sgd", schedule: bool = False, batch_norm: bool = False
        ) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = network(batch_norm=batch_norm)
            self.losses: list[Tensor] = []
            self.lrs: list[float] = []

        def loss(self, batch: Any) -> Tensor:
            features, labels = batch
            return nn.functional.cross_entropy(self.net(features).float(), labels)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.losses.append(loss.detach().clone())
            self.lrs.append(self.optimizers().param_groups[0]["lr"])
            self.log("loss", loss, sync_dist=True, prog_bar=False)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            if self.hparams.optimizer == "sgd":
                optimizer: Any = sgd(self.parameters())
            else:
                optimizer = getattr(torch.optim, self.hparams.optimizer)(self.parameters(), lr=0.01)
            if not self.hparams.schedule:
                return optimizer
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    return Net


@dataclass
class Run:
    """What one `fit` left."""

    module: Any
    trainer: Any
    losses: list[Tensor] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def adamw(pl: Any) -> Any:
    """A module with AdamW and a schedule of its learning rate."""
    return module_class(pl)(optimizer="AdamW", schedule=True)


def saver(folder: Path, **options: Any) -> Any:
    """A callback that saves after every epoch, unless told otherwise."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(
        folder, filename="{epoch}", **{"save_top_k": -1, "every_n_epochs": 1, **options}
    )


def spelling(root: str) -> Any:
    """`lightning.pytorch` or `pytorch_lightning`, quiet, and loud where it would only warn."""
    pl = importlib.import_module(root)
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("error")
    for harmless in (
        ".*does not have many workers.*",
        ".*smaller than the logging interval.*",
        ".*is deprecated.*",
        ".*when using `ckpt_path`, callbacks used to create the checkpoint need to be provided.*",
        ".*to use single device strategy.*|.*it is recommended to use `Trainer\\(devices=1.*",
        ".*`isinstance\\(treespec, LeafSpec\\)`.*",
        ".*multi-threaded, use of fork.*",
    ):
        warnings.filterwarnings("ignore", message=harmless)
    return pl


def make_trainer(pl: Any, strategy: Any, size: int, **options: Any) -> Any:
    """A quiet CPU Trainer over `size` ranks."""
    return pl.Trainer(
        **{
            "strategy": strategy,
            "accelerator": "cpu",
            "devices": size,
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": True,
            "default_root_dir": tempfile.gettempdir(),
            **options,
        }
    )


def fit(
    strategy: Any,
    size: int,
    *,
    root: str = "lightning.pytorch",
    module: Any = None,
    loaders: Any = None,
    ckpt_path: Any = None,
    **options: Any,
) -> Run:
    """Seed, build, train, and collect."""
    pl = spelling(root)
    pl.seed_everything(7, verbose=False)
    made = module_class(pl)() if module is None else module(pl)
    trainer = make_trainer(pl, strategy, size, **options)
    trainer.fit(made, *(loaders or (data(), held_out())), ckpt_path=ckpt_path)
    return collect(made, trainer)


def collect(module: Any, trainer: Any) -> Run:
    """The parts of a finished run that tests compare."""
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return Run(
        module=module,
        trainer=trainer,
        losses=list(getattr(module, "losses", [])),
        lrs=list(getattr(module, "lrs", [])),
        weights=weights,
    )


def assert_same(one: Run, other: Run, *, tolerance: float = 0.0) -> None:
    """Losses, learning rates and final weights: equal bits, or within `tolerance`."""
    assert one.losses
    assert one.lrs == other.lrs
    assert len(one.losses) == len(other.losses)
    assert one.weights.keys() == other.weights.keys()
    pairs = [*zip(one.losses, other.losses, strict=True)]
    pairs += [(one.weights[name], other.weights[name]) for name in one.weights]
    for a, b in pairs:
        if tolerance:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(a, b), f"differ by {(a - b).abs().max()}"


@contextlib.contextmanager
def no_group_left() -> Any:
    """Destroy a default group that a stock strategy made in a process that had none."""
    had = torch.distributed.is_initialized()
    try:
        yield
    finally:
        if not had and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
