"""A DeepSpeed config file in our words: every key is translated, or named with the reason why it has no equal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import ConfigError

_TIERS = {"none": "device", "cpu": "host", "nvme": "nvme"}

# Keys that say nothing about the engine's arithmetic or memory here: why each is not needed.
_NOT_NEEDED: Mapping[str, str] = {
    "train_batch_size": "the script's data loader decides",
    "train_micro_batch_size_per_gpu": "the script's data loader decides",
    "gradient_accumulation_steps": "set it in Accelerate or TrainingArguments",
    "gradient_clipping": "call accelerator.clip_grad_norm_, or set TrainingArguments(max_grad_norm=...)",
    "steps_per_print": "logging is the script's",
    "wall_clock_breakdown": "use the trace setting",
    "dump_state": "print accelerator.zero_plugin",
    "optimizer": "build a torch optimizer in the script; Adam, AdamW, Adagrad, Lion and SGD run compiled",
    "scheduler": "build a scheduler in the script",
    "zero_allow_untested_optimizer": "every element-wise torch optimizer is allowed",
    "zero_force_ds_cpu_optimizer": "the optimizer given is the one that runs",
    "activation_checkpointing": "use torch.utils.checkpoint or gradient_checkpointing=True; activations= places them",
    "flops_profiler": "use the trace setting",
    "tensorboard": "logging is the script's",
    "wandb": "logging is the script's",
    "csv_monitor": "logging is the script's",
    "comms_logger": "engine.ledger() counts bytes by collective",
    "prescale_gradients": "gradients are summed in fp32, then divided",
    "gradient_predivide_factor": "gradients are summed in fp32, then divided",
    "checkpoint": "checkpoints hold full tensors by name and load on any number of processes",
    "seed": "seeding is the script's",
}

_NOT_NEEDED_ZERO: Mapping[str, str] = {
    "contiguous_gradients": "gradients are always in contiguous buckets",
    "reduce_scatter": "gradients are always reduce-scattered",
    "use_multi_rank_bucket_allreduce": "gradients are always reduce-scattered",
    "allgather_partitions": "weights are always all-gathered",
    "allgather_bucket_size": "weights are gathered unit by unit, or block by block after a step",
    "round_robin_gradients": "every parameter is cut over all ranks",
    "sub_group_size": "the update runs in blocks of bucket_bytes",
    "load_from_fp32_weights": "checkpoints hold the fp32 weights",
    "elastic_checkpoint": "checkpoints load on any number of processes",
    "ignore_unused_parameters": "a parameter without a gradient keeps its weight and moments, as in torch",
    "stage3_max_live_parameters": "prefetch_units and prefetch_bytes bound what is gathered",
    "stage3_max_reuse_distance": "a unit is released after its use",
    "stage3_model_persistence_threshold": "persist_below decides alone",
    "stage3_gather_16bit_weights_on_model_save": "saving always gathers, one unit at a time",
    "stage3_gather_fp16_weights_on_model_save": "saving always gathers, one unit at a time",
    "stage3_module_granularity_threshold": "units are transformer blocks",
    "leaf_module": "units are transformer blocks, gathered whole",
    "stage3_use_all_reduce_for_fetch_params": "weights are all-gathered",
    "stage3_allgather_sequential": "weights are gathered unit by unit",
    "pipeline_loading_checkpoint": "loading needs one unit at a time",
    "memory_efficient_linear": "torch's own functions are left alone",
    "override_module_apply": "torch's own methods are left alone",
    "legacy_stage1": "there is one stage 1",
    "compute_grad_norm": "the norm costs no pass of its own",
    "parameter_alignment": "parameters are always aligned",
    "cpu_offload_use_pin_memory": "host memory is pinned where it fits, under pinned_limit",
    "log_trace_cache_warnings": "a debugging switch of DeepSpeed's",
    "enable_sanity_checks": "the checks are always on",
    "save_muon_momentum_buffer_in_memory": "Muon is not an element-wise optimizer",
}

# Features that we do not have: their numbers or memory would differ, so a config that turns one on is not translated
# in silence.
_NO_EQUAL_ZERO: Mapping[str, str] = {
    "zero_hpz_partition_size": "a second copy of the shards in each node",
    "zero_quantized_weights": "quantized weight gathers",
    "zero_quantized_nontrainable_weights": "quantized gathers of frozen weights",
    "zero_quantized_gradients": "quantized gradient reductions (reduce_dtype='bf16' halves the bytes)",
    "mics_shard_size": "sharding within groups of ranks",
    "mics_hierarchical_params_gather": "sharding within groups of ranks",
    "zenflow": "ZenFlow's selective asynchronous updates",
}


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
        elif key in ("fp16", "bf16"):
            _precision(key, value, found)
        elif key == "communication_data_type":
            if not _is_auto(value):
                found.settings["reduce_dtype"] = _dtype(key, value)
        elif key == "data_types":
            _data_types(value, found)
        elif key == "aio":
            _note(found, key, "files are read and written by nvme_engine='auto'", value)
        elif key in _NOT_NEEDED:
            _note(found, key, _NOT_NEEDED[key], value)
        else:
            found.notes.append(f"{key}: no equal in zero-plugin (value {value!r}), left out")
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
        elif key in _NOT_NEEDED_ZERO:
            _note(found, name, _NOT_NEEDED_ZERO[key], value)
        elif key in _NO_EQUAL_ZERO:
            if value not in (None, False, 0, 1, -1):
                found.notes.append(
                    f"{name}: no equal in zero-plugin ({_NO_EQUAL_ZERO[key]}), left out"
                )
        else:
            found.notes.append(f"{name}: no equal in zero-plugin (value {value!r}), left out")
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
    reasons = {
        "pin_memory": "host memory is pinned where it fits, under pinned_limit",
        "buffer_count": "nvme_buffer_bytes sets the buffers",
        "buffer_size": "nvme_buffer_bytes sets the buffers",
        "max_in_cpu": "nvme_cache_bytes keeps states in host memory",
        "pipeline_read": "reads always run ahead",
        "pipeline_write": "writes always run behind",
        "fast_init": "states are made in their place",
        "super_offload": "the update is compiled and overlapped already",
        "cpuadam_cores_perc": "threads sets the cores",
    }
    for key, value in (values or {}).items():
        if key in ("device", "nvme_path"):
            continue
        if key == "ratio":
            _ratio(f"{name}.ratio", value, found)
        elif key in reasons:
            _note(found, f"{name}.{key}", reasons[key], value)
        else:
            found.notes.append(f"{name}.{key}: no equal in zero-plugin (value {value!r}), left out")


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
        if name not in ("enabled", "loss_scale"):
            _note(found, f"{key}.{name}", "the loss scale follows torch's GradScaler", value)


def _data_types(values: Any, found: Translation) -> None:
    for key, value in (values or {}).items():
        if key == "grad_accum_dtype":
            _note(found, f"data_types.{key}", "gradients are always accumulated in fp32", value)
        else:
            found.notes.append(f"data_types.{key}: no equal in zero-plugin, left out")


def _dtype(key: str, value: Any) -> str:
    names = {"fp32": "fp32", "float32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}
    if str(value) not in names:
        raise ConfigError(f"{key} is {value!r}: it must be one of {', '.join(names)}")
    return names[str(value)]


def _note(found: Translation, key: str, reason: str, value: Any) -> None:
    shown = json.dumps(value)
    found.notes.append(f"{key}: not needed ({reason}); was {shown[:60]}")


def _is_auto(value: Any) -> bool:
    return value == "auto"
