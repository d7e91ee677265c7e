"""Weights read from Accelerate's own checkpoint files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME

from zero_plugin.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

_WRAPPED = "module."
"""DistributedDataParallel puts this before every name."""


def load_weights(model: nn.Module, folder: str | Path, number: int, *, strict: bool = True) -> None:
    """Load the weights of a model from `accelerator.save_state`'s folder, ours or a stock run's.

    Args:
        model: holds its full weights.
        folder: the checkpoint.
        number: which of the Accelerator's models this is.
        strict: refuse names that are missing or unexpected.

    Raises:
        CheckpointError: there is no file, or its names are not the model's.
    """
    ending = f"_{number}" if number else ""
    safe = Path(folder, f"{SAFE_MODEL_NAME}{ending}.safetensors")
    plain = Path(folder, f"{MODEL_NAME}{ending}.bin")
    if safe.is_file():
        from safetensors.torch import load_file

        state: dict[str, Any] = load_file(safe)
    elif plain.is_file():
        state = torch.load(plain, map_location="cpu", weights_only=True)
    else:
        raise CheckpointError(
            f"{folder} holds neither {safe.name} nor {plain.name}: give the folder that accelerator.save_state wrote"
        )
    if state and all(name.startswith(_WRAPPED) for name in state):
        state = {name.removeprefix(_WRAPPED): value for name, value in state.items()}
    load_state(model, state, strict=strict, source=safe if safe.is_file() else plain)


def load_state(model: nn.Module, state: dict[str, Any], *, strict: bool, source: object) -> None:
    """Load a state dict in which tied weights may stand under one of their names.

    Raises:
        CheckpointError: `strict`, and its names are not the model's.
    """
    found = model.load_state_dict(state, strict=False)
    if not strict:
        return
    held = model.state_dict(keep_vars=True)
    loaded = {id(held[name]) for name in state if name in held}
    missing = [name for name in found.missing_keys if id(held.get(name)) not in loaded]
    if missing or found.unexpected_keys:
        raise CheckpointError(
            f"{source} does not fit {type(model).__name__}: missing {_some(missing)}, unexpected "
            f"{_some(found.unexpected_keys)}; load it into the model it was saved from, or pass strict=False"
        )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    shown = ", ".join(listed[:3]) or "nothing"
    return f"{shown} and {len(listed) - 3} more" if len(listed) > 3 else shown
