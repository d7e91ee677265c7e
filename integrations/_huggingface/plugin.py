"""What selects zero-plugin in Accelerate: a plugin object, or two environment variables."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import ConfigError
from zero_plugin.integrations._huggingface.selection import SETTINGS, SWITCH

if TYPE_CHECKING:
    from collections.abc import Mapping


class ZeroOffloadPlugin:
    """Selects zero-plugin: `Accelerator(zero_plugin=ZeroOffloadPlugin(stage=2))`.

    Args:
        config: all settings in one value,
        **settings: or the fields of `ZeroConfig`.

    Raises:
        ConfigError: both are given, or a setting is unknown or wrong.

    Example:
        >>> accelerator = Accelerator(zero_plugin=ZeroOffloadPlugin(stage=3, params="host"))
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    def __init__(self, config: ZeroConfig | None = None, **settings: Any) -> None:
        if config is not None and settings:
            raise ConfigError(
                f"a whole config and single settings ({', '.join(settings)}) were given: pass one or the other"
            )
        self.config = ZeroConfig.from_dict(settings) if config is None else config
        if not isinstance(self.config, ZeroConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"config is a {type(config).__name__}: give a ZeroConfig, or its fields by name"
            )

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
            return cls(ZeroConfig.from_dict(as_settings(values)))
        except ConfigError as error:
            raise type(error)(f"in {SETTINGS}: {error}") from error

    def to_environment(self) -> dict[str, str]:
        """The variables that select this plugin in a process that is started with them."""
        return {SWITCH: "true", SETTINGS: json.dumps(changed_settings(self.config))}

    def __repr__(self) -> str:
        listed = ", ".join(f"{k}={v!r}" for k, v in changed_settings(self.config).items())
        return f"{type(self).__name__}({listed})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZeroOffloadPlugin) and other.config == self.config

    def __hash__(self) -> int:
        return hash(self.config)


def as_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """`ZeroConfig` fields from JSON or YAML, which have lists where a field takes a tuple."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
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
