"""What selects zero-plugin in Accelerate: a plugin object, or two environment variables."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any, Literal, get_args

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import ConfigError
from zero_plugin.integrations._huggingface.selection import SETTINGS, SWITCH

if TYPE_CHECKING:
    from collections.abc import Mapping

CheckpointForm = Literal["auto", "file", "folder"]
"""`file`: the library's own files with full tensors, which a stock run reads. `folder`: every rank writes its part, in a folder of ours
beside the library's other files. `auto`: folders at stage 3 and with a delayed update."""


_OF_A_PLAN = frozenset(
    {"batch", "seq", "accumulate", "nvme", "nvme_size", "gpu", "host", "hardware", "checkpointing"}
)
"""Options of a plan that are no settings."""


class ZeroOffloadPlugin:
    """Selects zero-plugin: `Accelerator(zero_plugin=ZeroOffloadPlugin(stage=2))`.

    Args:
        config: all settings in one value,
        checkpoint: what `save_state` and the Trainer's checkpoints hold: `file` for full tensors in the library's own files,
            `folder` for shards, which every rank writes and any number of ranks reads; `auto` for shards at stage 3 and with a
            delayed update.
        auto: choose the placement when a model and its optimizers are prepared, by what this machine measures; every setting
            that is given is fixed, and options of `zero_plugin.plan` (batch, seq, accumulate, nvme, limits) may be among them.
        **settings: or the fields of `ZeroConfig`.

    Raises:
        ConfigError: both are given, or a setting is unknown or wrong.

    Example:
        >>> accelerator = Accelerator(zero_plugin=ZeroOffloadPlugin(stage=3, params="host"))
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    def __init__(
        self,
        config: ZeroConfig | None = None,
        *,
        checkpoint: CheckpointForm = "auto",
        auto: bool = False,
        **settings: Any,
    ) -> None:
        if config is not None and settings:
            raise ConfigError(
                f"a whole config and single settings ({', '.join(settings)}) were given: pass one or the other"
            )
        if auto and config is not None:
            raise ConfigError("auto=True and a whole config were given: pass one or the other")
        self.options: dict[str, Any] | None = dict(settings) if auto else None
        """Of the plan; None where nothing is planned."""
        if auto:
            settings = {key: value for key, value in settings.items() if key not in _OF_A_PLAN}
            if "nvme" in settings.values():
                settings.setdefault("nvme_path", self.options.get("nvme") if self.options else None)
        self.config = ZeroConfig.from_dict(settings) if config is None else config
        if not isinstance(self.config, ZeroConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"config is a {type(config).__name__}: give a ZeroConfig, or its fields by name"
            )
        self.checkpoint: CheckpointForm = check_form(checkpoint, self.config)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> ZeroOffloadPlugin:
        """The plugin that `ZERO_PLUGIN_CONFIG` describes; without it, ZeroConfig's defaults.

        Raises:
            ConfigError: it is not a JSON object of `ZeroConfig` fields.
        """
        text = (os.environ if environment is None else environment).get(SETTINGS, "").strip()
        if not text:
            return cls()
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"{SETTINGS}={text!r} is not JSON ({error}): write it as '{{\"stage\": 3}}'"
            ) from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"{SETTINGS}={text!r} is a JSON {type(values).__name__}: give an object of ZeroConfig fields, "
                "such as '{\"stage\": 3}'"
            )
        try:
            return cls(**as_settings(values))
        except ConfigError as error:
            raise type(error)(f"in {SETTINGS}: {error}") from error

    def to_environment(self) -> dict[str, str]:
        """The variables that select this plugin in a process that is started with them."""
        return {SWITCH: "true", SETTINGS: json.dumps(self.settings())}

    def settings(self) -> dict[str, Any]:
        """The stage and everything that is not at its default, as plain JSON values."""
        form = {} if self.checkpoint == "auto" else {"checkpoint": self.checkpoint}
        if self.options is not None:
            return {"auto": True, **self.options, **form}
        return {**changed_settings(self.config), **form}

    def __repr__(self) -> str:
        listed = ", ".join(f"{k}={v!r}" for k, v in self.settings().items())
        return f"{type(self).__name__}({listed})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZeroOffloadPlugin) and other.settings() == self.settings()

    def __hash__(self) -> int:
        return hash((self.config, self.checkpoint))


def check_form(form: object, config: ZeroConfig) -> CheckpointForm:
    """A form that can hold what these settings keep.

    Raises:
        ConfigError: it is unknown, or full tensors are asked for and an update may be delayed.
    """
    if form not in get_args(CheckpointForm):
        raise ConfigError(
            f"checkpoint={form!r} is not one of {', '.join(map(repr, get_args(CheckpointForm)))}"
        )
    if form == "file" and config.delayed_update:
        raise ConfigError(
            "checkpoint='file' cannot hold an update that is delayed (delayed_update=True): use 'folder' or 'auto'"
        )
    return form  # pyright: ignore[reportReturnType]


def as_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """`ZeroConfig` fields and `checkpoint` from JSON or YAML, which have lists where a field takes a tuple."""
    return {
        str(name): tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
    }


def changed_settings(config: ZeroConfig) -> dict[str, Any]:
    """The stage and every field that is not at its default, as plain JSON values."""
    found: dict[str, Any] = {"stage": config.stage}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default:
            continue
        if isinstance(value, (tuple, list)):
            found[field.name] = [os.fspath(item) for item in value]
        elif isinstance(value, os.PathLike):
            found[field.name] = os.fspath(value)
        else:
            found[field.name] = value
    return found
