"""Sharded checkpoints inside the folders that Accelerate and the Trainer save to."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import MODEL_NAME, OPTIMIZER_NAME, SAFE_MODEL_NAME

from zero_plugin.checkpoint.folder import remove
from zero_plugin.checkpoint.plain import folder_of
from zero_plugin.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from zero_plugin.config import ZeroConfig
    from zero_plugin.engine import ZeroEngine
    from zero_plugin.integrations._huggingface.plugin import CheckpointForm

NAME = "zero_plugin"
"""The folder of the first engine; further ones get a number, as Accelerate's own files do."""


def wants_folder(form: CheckpointForm, config: ZeroConfig, *, full_because: str = "") -> bool:
    """Whether a save is sharded.

    Args:
        form: the plugin's.
        config: of the engines.
        full_because: why full tensors are needed, if they are.

    Raises:
        ConfigError: they are, and the form or a delayed update needs shards.
    """
    must = form == "folder" or config.delayed_update
    if full_because and must:
        asked = "checkpoint='folder'" if form == "folder" else "delayed_update=True"
        raise ConfigError(
            f"{asked} saves shards, and full tensors are needed since {full_because}: choose one"
        )
    return must or (form == "auto" and config.shards_parameters and not full_because)


def holds_shards(folder: str | Path) -> bool:
    """Whether a checkpoint of Accelerate or the Trainer holds a sharded one of ours."""
    return folder_of(_place(folder, 0)) is not None


def save(engines: Sequence[ZeroEngine], folder: str | Path, *, first: bool) -> None:
    """Save the states of engines; all ranks call it.

    Args:
        engines: in the order in which they were made.
        folder: the checkpoint.
        first: whether this process removes what an earlier save of full tensors left there.
    """
    for number, engine in enumerate(engines):
        engine.save_checkpoint(_place(folder, number))
    if first:
        for name in (f"{SAFE_MODEL_NAME}*.safetensors", f"{MODEL_NAME}*.bin", f"{OPTIMIZER_NAME}*"):
            for stale in Path(folder).glob(name):
                stale.unlink()


def load(
    engines: Sequence[ZeroEngine],
    folder: str | Path,
    *,
    strict: bool = True,
    weights_only: bool = False,
) -> None:
    """Load what `save` saved, at any number of ranks; all ranks call it.

    Random states are the library's business, which saves them too.

    Raises:
        CheckpointError: it was saved with another number of engines, or does not fit.
    """
    if folder_of(_place(folder, len(engines))) is not None:
        raise CheckpointError(
            f"{_place(folder, len(engines))} is there, and only {len(engines)} of the saved models and optimizers are "
            "prepared here: prepare all of them before loading"
        )
    for number, engine in enumerate(engines):
        engine.load_checkpoint(
            _place(folder, number), strict=strict, random_states=False, weights_only=weights_only
        )


def forget(folder: str | Path) -> None:
    """Remove what an earlier sharded save left in a checkpoint that holds full tensors now; rank 0 calls it."""
    number = 0
    while (place := _place(folder, number)).is_dir():
        with suppress(CheckpointError):
            if folder_of(place) is not None:
                remove(place)
        number += 1


@contextmanager
def without(items: list[Any], held: Sequence[Any]) -> Generator[None]:
    """Inside, a list lacks what an engine saves or loads itself; the list object stays, since Accelerate hands it on."""
    before = list(items)
    items[:] = [item for item in items if not any(item is one for one in held)]
    try:
        yield
    finally:
        items[:] = before


def _place(folder: str | Path, number: int) -> Path:
    return Path(folder, f"{NAME}_{number}" if number else NAME)
