"""Checkpoints of Lightning and Fabric that are folders: what the engine saves, with the framework's own state beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from zero_plugin.checkpoint.plain import fill_module, folder_of, read_extra, read_state_dict
from zero_plugin.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from zero_plugin.config import ZeroConfig
    from zero_plugin.engine import ZeroEngine

CheckpointForm = Literal["auto", "file", "folder"]
"""`file`: one file that `torch.load` and other strategies read. `folder`: every rank writes its part. `auto`: folders at stage 3 and
with a delayed update."""

_WEIGHTS, _OPTIMIZERS = "state_dict", "optimizer_states"

DELAYED_KEY = "zero_plugin_delayed_update"
"""Where a file says how the delayed update stood."""

ENGINE_KEYS = (_WEIGHTS, _OPTIMIZERS)
"""What stands for the engine's part in Lightning's own state."""


class Folders:
    """Decides between file and folder, and remembers the folder that a load is in the middle of.

    Args:
        form: the strategy's argument.
        config: the settings, as far as they are known.

    Raises:
        ConfigError: the form is unknown, or cannot hold what these settings keep.
    """

    def __init__(self, form: CheckpointForm, config: ZeroConfig) -> None:
        if form not in get_args(CheckpointForm):
            raise ConfigError(
                f"checkpoint={form!r} is not one of {', '.join(map(repr, get_args(CheckpointForm)))}"
            )
        if form == "file" and config.shards_parameters and config.delayed_update:
            raise ConfigError(
                "checkpoint='file' cannot hold the second set of weights of delayed_update=True at stage 3: use 'folder' or 'auto'"
            )
        self._form = form
        self._loading: Path | None = None
        self._strict = True
        self._done = False

    def wants(self, engine: ZeroEngine | None) -> bool:
        """Whether an engine's saves are folders; without an engine they are files."""
        if engine is None:
            return False
        by_itself = engine.config.shards_parameters or engine.config.delayed_update
        return self._form == "folder" or (self._form == "auto" and by_itself)

    def save(self, engine: ZeroEngine, checkpoint: Mapping[str, Any], path: str | Path) -> None:
        """Save what Lightning gathered, without the weights and optimizer states, which the engine has.

        All ranks call it.
        """
        extra = {k: v for k, v in checkpoint.items() if k not in (_WEIGHTS, _OPTIMIZERS)}
        engine.save_checkpoint(path, extra=extra, weights_only=_OPTIMIZERS not in checkpoint)

    @staticmethod
    def save_ended(
        checkpoint: Mapping[str, Any],
        path: str | Path,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
    ) -> None:
        """Save what Lightning gathered after a fit, when there is no engine any more; rank 0 calls it.

        Args:
            checkpoint: with full weights and states.
            path: the folder.
            module: whose names the weights have.
            optimizers: whose states are there.

        Raises:
            CheckpointError: there are several optimizers.
        """
        from zero_plugin.checkpoint.foreign import Found, write_found
        from zero_plugin.checkpoint.imports import take_optimizer

        found = Found(weights=dict(checkpoint[_WEIGHTS]))
        states = checkpoint.get(_OPTIMIZERS, ())
        if len(states) > 1:
            raise CheckpointError(
                f"{path}: a folder saved after the fit holds one optimizer, here are {len(states)}: save during the fit "
                "(ModelCheckpoint, or trainer.save_checkpoint in on_train_end), or give the strategy checkpoint='file'"
            )
        for optimizer, state in zip(optimizers, states, strict=True):
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            groups = [
                {**saved, "param_names": [names[id(p)] for p in group["params"]]}
                for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
            ]
            take_optimizer(found, {**state, "param_groups": groups}, Path(path))
            found.optimizer = type(optimizer).__name__
        found.buffers = {name for name, _ in module.named_buffers() if name in found.weights}
        found.extra = {key: value for key, value in checkpoint.items() if key not in ENGINE_KEYS}
        write_found(found, Path(path))

    @staticmethod
    def note_delay(engine: ZeroEngine, checkpoint: dict[str, Any]) -> None:
        """Complete what goes into a file while an update may be pending; all ranks call it."""
        if _OPTIMIZERS in checkpoint:
            checkpoint[DELAYED_KEY] = engine.delayed_update_state()
        else:
            checkpoint[_WEIGHTS] = (
                engine.full_state_dict()
            )  # Weights alone are those after every update.

    def open(self, path: str | Path) -> dict[str, Any] | None:
        """Begin to load: Lightning's own state, with nothing where weights and optimizer states are; None for a file."""
        self._loading = folder_of(path)
        self._done = False
        if self._loading is None:
            if Path(path).is_dir():
                raise CheckpointError(
                    f"{path} is a folder and not a checkpoint of zero-plugin: name a file that Lightning saved, or a folder "
                    "that a zero_* strategy saved"
                )
            return None
        from zero_plugin.checkpoint.index import Catalog

        extra = read_extra(self._loading)
        found: dict[str, Any] = {**(extra if isinstance(extra, dict) else {}), _WEIGHTS: {}}
        if Catalog.open(self._loading).has_optimizer:
            found[_OPTIMIZERS] = []
        return found

    @property
    def is_loading(self) -> bool:
        """Whether the checkpoint that is being loaded is a folder."""
        return self._loading is not None

    def load_model(self, module: nn.Module, engine: ZeroEngine | None, *, strict: bool) -> None:
        """Load the weights; with an engine everything else as well."""
        if self._loading is None:
            return
        self._strict = strict
        if engine is None:
            fill_module(self._loading, module, strict=strict)
        else:
            self.load_engine(engine)

    def load_engine(self, engine: ZeroEngine) -> None:
        """Load weights, masters, moments, loss scale and random states, unless they are loaded already."""
        if self._loading is not None and not self._done:
            engine.load_checkpoint(self._loading, strict=self._strict)
            self._done = True


def read_folder(path: str | Path) -> dict[str, Any] | None:
    """What a file of Lightning's would hold, without optimizer states, from one of our folders; None if it is none."""
    folder = folder_of(path)
    if folder is None:
        return None
    extra = read_extra(folder)
    return {**(extra if isinstance(extra, dict) else {}), _WEIGHTS: read_state_dict(folder)}
