"""A DeepSpeed config file in our words: every key is translated, or named with the reason why it has no equal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import ConfigError
from zero_plugin.integrations._huggingface.deepspeed_keys import (
    NO_EQUAL,
    NO_EQUAL_PRECISION,
    NO_EQUAL_ZERO,
    NOT_NEEDED,
    NOT_NEEDED_DATA_TYPES,
    NOT_NEEDED_OFFLOAD,
    NOT_NEEDED_PRECISION,
    NOT_NEEDED_ZERO,
)

_OFF: tuple[Any, ...] = (None, False, 0, 1, -1, {}, "mean")
"""The defaults of features that we do not have, which leave them out; True is none of them, though it equals 1."""

_TIERS = {"none": "device", "cpu": "host", "nvme": "nvme"}


@dataclass
class Translation:
    """A translated config.

    Attributes:
        settings: `ZeroConfig` fields.
        mixed_precision: for Accelerate.
        notes: one line for each key that is not a setting.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    mixed_precision: str = "no"
    notes: list[str] = field(default_factory=list)

    def as_yaml(self) -> str:
        """An Accelerate config file; set the number of processes in it."""
        lines = [
            "compute_environment: LOCAL_MACHINE",
            "distributed_type: MULTI_GPU",
            "num_machines: 1",
            "num_processes: 2",
            f"mixed_precision: '{self.mixed_precision}'",
            "zero_plugin_config:",
            *(f"  {name}: {json.dumps(value)}" for name, value in self.settings.items()),
        ]
        return "\n".join(lines) + "\n"


def translate(values: Mapping[str, Any]) -> Translation:
    """Translate a DeepSpeed config.

    Args:
        values: the file's content. `"auto"`, which the HF Trainer fills in, means our default.

    Raises:
        ConfigError: a key is none of DeepSpeed's, or the result is not one of our configs.
    """
    found = Translation()
    for key, value in values.items():
        if key == "zero_optimization":
            _zero(value, found)
        elif key in ("fp16", "bf16", "bfloat16"):
            _precision("fp16" if key == "fp16" else "bf16", value, found)
        elif key == "torch_autocast":
            _autocast(value, found)
        elif key == "communication_data_type":
            if not _is_auto(value):
                found.settings["reduce_dtype"] = _dtype(key, value)
        elif key == "data_types":
            _data_types(value, found)
        elif key == "aio":
            _note(found, key, "files are read and written by nvme_engine='auto'", value)
        elif key in NOT_NEEDED:
            _note(found, key, NOT_NEEDED[key], value)
        else:
            _without_equal(found, key, NO_EQUAL.get(key), value)
    ZeroConfig.from_dict(found.settings)
    return found


def _zero(values: Any, found: Translation) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(f"zero_optimization is {values!r}: it must be an object")
    stage = values.get("stage", 0)
    stage = 3 if _is_auto(stage) else stage
    found.settings.update(stage=stage, optimizer="device", gradients="device")
    for key, value in values.items():
        name = f"zero_optimization.{key}"
        if key == "stage":
            continue
        if key in _ZERO_KEYS:
            if not _is_auto(value):
                _ZERO_KEYS[key](name, value, found)
        elif key in NOT_NEEDED_ZERO:
            _note(found, name, NOT_NEEDED_ZERO[key], value)
        else:
            _without_equal(found, name, NO_EQUAL_ZERO.get(key), value)
    _check_offload(stage, found)


def _check_offload(stage: Any, found: Translation) -> None:
    """DeepSpeed ignores offloaded parameters below stage 3; we say so."""
    if stage != 3 and found.settings.pop("params", "device") != "device":
        found.notes.append(
            f"zero_optimization.offload_param: DeepSpeed ignores it at stage {stage}, and so does the translation; use "
            "stage 3 to place parameters"
        )


def _offload_optimizer(name: str, values: Any, found: Translation) -> None:
    tier = _place(name, values, found)
    found.settings["optimizer"] = tier
    found.settings["gradients"] = "host" if tier == "nvme" else tier
    _offload_rest(name, values, found)


def _offload_param(name: str, values: Any, found: Translation) -> None:
    found.settings["params"] = _place(name, values, found)
    _offload_rest(name, values, found)


def _place(name: str, values: Any, found: Translation) -> str:
    device = str((values or {}).get("device") or "none")
    if device not in _TIERS:
        raise ConfigError(f"{name}.device is {device!r}: it must be one of {', '.join(_TIERS)}")
    if device == "nvme":
        path = values.get("nvme_path")
        if not path:
            raise ConfigError(f"{name}.device is 'nvme' without nvme_path: name a folder")
        found.settings["nvme_path"] = str(path)
    return _TIERS[device]


def _offload_rest(name: str, values: Any, found: Translation) -> None:
    for key, value in (values or {}).items():
        if key in ("device", "nvme_path"):
            continue
        if key == "ratio":
            _ratio(f"{name}.ratio", value, found)
        elif key in NOT_NEEDED_OFFLOAD:
            _note(found, f"{name}.{key}", NOT_NEEDED_OFFLOAD[key], value)
        else:
            _without_equal(found, f"{name}.{key}", None, value)


def _ratio(name: str, value: Any, found: Translation) -> None:
    """Theirs is the part that is offloaded, ours the part that is not."""
    if value == 1.0:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ConfigError(f"{name} is {value!r}: it must be a number from 0 to 1")
    if "offload_optimizer" in name and found.settings.get("optimizer") == "host":
        found.settings["device_fraction"] = round(1 - value, 9)
        found.notes.append(f"{name}: {value!r} became device_fraction, what stays on the device")
    else:
        found.notes.append(f"{name}: no equal here (value {value!r}), left out: all is offloaded")


def _cpu_offload(_name: str, value: Any, found: Translation) -> None:
    if value:
        found.settings.update(optimizer="host", gradients="host")


def _cpu_offload_params(_name: str, value: Any, found: Translation) -> None:
    if value:
        found.settings["params"] = "host"


def _bucket(name: str, value: Any, found: Translation) -> None:
    found.settings["bucket_bytes"] = max(64, int(value) * 4)
    found.notes.append(f"{name}: {value} elements became bucket_bytes={int(value) * 4} (fp32)")


def _overlap(_name: str, value: Any, found: Translation) -> None:
    if value is False:
        found.settings["overlap"] = False


def _persistence(_name: str, value: Any, found: Translation) -> None:
    if found.settings["stage"] == 3:
        found.settings["persist_below"] = int(value) + 1


def _prefetch(name: str, value: Any, found: Translation) -> None:
    if found.settings["stage"] == 3:
        found.settings["prefetch_bytes"] = int(value) * 4
        found.notes.append(f"{name}: {value} elements became prefetch_bytes={int(value) * 4}")


_ZERO_KEYS = {
    "offload_optimizer": _offload_optimizer,
    "offload_param": _offload_param,
    "cpu_offload": _cpu_offload,
    "cpu_offload_param": _cpu_offload_params,
    "cpu_offload_params": _cpu_offload_params,
    "reduce_bucket_size": _bucket,
    "overlap_comm": _overlap,
    "stage3_param_persistence_threshold": _persistence,
    "param_persistence_threshold": _persistence,
    "stage3_prefetch_bucket_size": _prefetch,
    "prefetch_bucket_size": _prefetch,
}


def _precision(key: str, values: Any, found: Translation) -> None:
    enabled = values.get("enabled", False) if isinstance(values, Mapping) else bool(values)
    if _is_auto(enabled):
        found.notes.append(f"{key}.enabled: auto; set mixed_precision in the file that is written")
        return
    if not enabled:
        return
    found.mixed_precision = key
    scale = values.get("loss_scale", 0) if isinstance(values, Mapping) else 0
    if key == "fp16" and scale and not _is_auto(scale):
        found.settings["loss_scale"] = float(scale)
    for name, value in values.items() if isinstance(values, Mapping) else ():
        if name == "bf16_optimizer_states":
            if value:
                found.settings["moment_dtype"] = "bf16"
                found.notes.append(f"{key}.{name}: became moment_dtype, rounded stochastically")
        elif name in NOT_NEEDED_PRECISION:
            _note(found, f"{key}.{name}", NOT_NEEDED_PRECISION[name], value)
        elif name not in ("enabled", "loss_scale"):
            _without_equal(found, f"{key}.{name}", NO_EQUAL_PRECISION.get(name), value)


def _autocast(values: Any, found: Translation) -> None:
    if not isinstance(values, Mapping) or not values.get("enabled"):
        return
    names = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16"}
    dtype = str(values.get("dtype", "bfloat16")).removeprefix("torch.")
    if dtype not in names:
        raise ConfigError(
            f"torch_autocast.dtype is {dtype!r}: it must be one of {', '.join(names)}"
        )
    found.mixed_precision = names[dtype]
    if "lower_precision_safe_modules" in values:
        _note(
            found,
            "torch_autocast.lower_precision_safe_modules",
            "torch.autocast chooses by operation",
            values["lower_precision_safe_modules"],
        )


def _data_types(values: Any, found: Translation) -> None:
    for key, value in (values or {}).items():
        if key in NOT_NEEDED_DATA_TYPES:
            _note(found, f"data_types.{key}", NOT_NEEDED_DATA_TYPES[key], value)
        else:
            _without_equal(found, f"data_types.{key}", None, value)


def _dtype(key: str, value: Any) -> str:
    names = {"fp32": "fp32", "float32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}
    if str(value) not in names:
        raise ConfigError(f"{key} is {value!r}: it must be one of {', '.join(names)}")
    return names[str(value)]


def _note(found: Translation, key: str, reason: str, value: Any) -> None:
    shown = json.dumps(value)
    found.notes.append(f"{key}: not needed ({reason}); was {shown[:60]}")


def _without_equal(found: Translation, key: str, feature: str | None, value: Any) -> None:
    """Say so of a feature that is turned on, and of a key that is not one of DeepSpeed's that we know."""
    if feature is None:
        found.notes.append(
            f"{key}: no equal in zero-plugin (not a key that is known here; value {value!r}), left out"
        )
    elif value is True or not (
        value in _OFF or (isinstance(value, Mapping) and value.get("enabled") is False)
    ):
        found.notes.append(f"{key}: no equal in zero-plugin ({feature}), left out")


def _is_auto(value: Any) -> bool:
    return value == "auto"
