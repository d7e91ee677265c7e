"""Every key of DeepSpeed's and FSDP's configs is translated or named with a reason, and stands in docs/from-deepspeed.md."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from support.sources import REPOSITORY

from zero_plugin.integrations._huggingface import deepspeed_keys
from zero_plugin.integrations._huggingface.deepspeed import translate


def words(text: str) -> list[str]:
    return text.split()


# The fields of the config classes of DeepSpeed 0.19.8, and the top-level keys that its `DeepSpeedConfig` reads or refuses as removed.
ZERO = words(
    """
stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size
overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size
cpu_offload_param cpu_offload_use_pin_memory cpu_offload stage3_prefetch_bucket_size stage3_param_persistence_threshold
stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save
stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment
zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear
pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory
leaf_module mics_shard_size mics_hierarchical_params_gather zeropp_loco_param
"""
)
OFFLOAD = {
    "offload_param": words("buffer_count buffer_size max_in_cpu pin_memory"),
    "offload_optimizer": words(
        "buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload cpuadam_cores_perc"
    ),
}
BLOCKS = {
    "fp16": words("""auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale
        fp16_master_weights_and_grads"""),
    "bf16": words(
        "immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
    ),
    "data_types": words("grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules"),
    "torch_autocast": ["dtype", "lower_precision_safe_modules"],
}
TOP = words(
    """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation steps_per_print dump_state
disable_python_gc disable_allgather communication_data_type seq_parallel_communication_data_type prescale_gradients
gradient_predivide_factor gradient_allreduce_op zero_optimization activation_checkpointing comms_logger tensorboard wandb csv_monitor
comet gradient_clipping fp16 bf16 bfloat16 torch_autocast optimizer zero_allow_untested_optimizer zero_force_ds_cpu_optimizer scheduler
flops_profiler wall_clock_breakdown memory_breakdown autotuning use_data_before_expert_parallelism hybrid_engine pipeline
data_efficiency checkpoint data_types aio dataloader_drop_last log_level datastates_ckpt weight_quantization compile timers
tensor_parallel expert_parallel vocabulary_size
nebula compression_training amp quantize_training sparse_gradients eigenvalue sparse_attention elasticity graph_harvesting
curriculum_learning progressive_layer_drop
"""
)
# What `TrainingArguments(fsdp_config=...)` documents beside FSDP's own.
FSDP_OF_TRAINER = ["version", "xla", "xla_fsdp_settings", "xla_fsdp_grad_ckpt", "xla_fsdp_v2"]


def named_in(text: str) -> set[str]:
    """The keys in backticks; of `key: value` the key. FSDP's stand with the prefix of the YAML."""
    quoted = {item.partition(":")[0].strip() for item in re.findall(r"`([^`\n]+)`", text)}
    return quoted | {item.removeprefix("fsdp_") for item in quoted}


@pytest.fixture
def page() -> set[str]:
    return named_in((REPOSITORY / "docs" / "from-deepspeed.md").read_text())


def test_every_key_of_deepspeed_stands_on_the_page(page: set[str]) -> None:
    groups = [ZERO, TOP, *OFFLOAD.values(), *BLOCKS.values()]
    assert sorted({key for keys in groups for key in keys} - page) == []
    tables = {k: v for k, v in vars(deepspeed_keys).items() if isinstance(v, dict) and k.isupper()}
    unprefixed = {key.removeprefix("stage3_") for key in ZERO}
    for name, table in tables.items():
        if not name.startswith("__"):
            assert set(table) - page - unprefixed == set(), name


def test_every_field_of_accelerates_plugins_stands_on_the_page(page: set[str]) -> None:
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    fields = [
        field.name
        for plugin in (DeepSpeedPlugin, FullyShardedDataParallelPlugin)
        for field in dataclasses.fields(plugin)
    ]
    assert len(fields) > 25
    titles = ("DeepSpeed Arguments", "FSDP Arguments")
    arguments = [
        action.dest
        for group in launch_command_parser()._action_groups
        if group.title in titles
        for action in group._group_actions
    ]
    assert len(arguments) > 25
    missing = {*fields, *arguments, *FSDP_OF_TRAINER} - page - {"reshard_after_forward"}
    assert sorted(missing) == []


def test_a_key_that_is_missing_is_seen() -> None:
    assert named_in("| `stage` | `params: host`, `fsdp_version` |") == {
        *("stage", "params", "fsdp_version", "version")
    }
    assert "stage3_max_live_parameters" not in named_in("`stage3_max_*`")


def unknown(config: dict[str, Any]) -> list[str]:
    return [note for note in translate(config).notes if "known here" in note]


def turned_on(key: str) -> Any:
    special: dict[str, Any] = {
        "stage": 3,
        "ratio": 0.5,
        "overlap_comm": False,
        "loss_scale": 128,
        "dtype": "bfloat16",
        "communication_data_type": "bf16",
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
    }
    number = key.endswith(("_size", "_threshold", "_parameters", "_distance"))
    return special.get(key, 128 if number else True)


def test_every_key_is_a_setting_or_has_a_reason() -> None:
    for key in ZERO:
        assert unknown({"zero_optimization": {"stage": 3, key: turned_on(key)}}) == [], key
    for block, keys in OFFLOAD.items():
        for key in keys:
            values = {"stage": 3, block: {"device": "cpu", key: turned_on(key)}}
            assert unknown({"zero_optimization": values}) == [], key
    for block, keys in BLOCKS.items():
        for key in keys:
            assert (
                unknown(
                    {block: {"enabled": True, key: turned_on(key)}}
                    if block != "data_types"
                    else {block: {key: "fp32"}}
                )
                == []
            ), key
    for key in TOP:
        blocks = (*BLOCKS, "zero_optimization", "bfloat16")
        assert unknown({key: {} if key in blocks else turned_on(key)}) == [], key
    assert unknown({"brand_new": 1}) == [
        "brand_new: no equal in zero-plugin (not a key that is known here; value 1), left out"
    ]


def test_what_precision_becomes() -> None:
    found = translate({"bf16": {"enabled": True, "bf16_optimizer_states": True}})
    assert found.settings == {"moment_dtype": "bf16"}
    assert found.mixed_precision == "bf16"
    found = translate({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}})
    assert "split_master" in found.notes[0]
    assert (
        translate({"torch_autocast": {"enabled": True, "dtype": "float16"}}).mixed_precision
        == "fp16"
    )
    assert translate({"bfloat16": {"enabled": True}}).mixed_precision == "bf16"
    quantized = {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}
    assert any("quantized weight gathers" in note for note in translate(quantized).notes)
    assert translate({"gradient_allreduce_op": "mean", "tensor_parallel": {}}).notes == []
    found = translate({"zero_optimization": {"stage": 3, "cpu_offload_param": True}})
    assert found.settings["params"] == "host"
