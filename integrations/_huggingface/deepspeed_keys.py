"""DeepSpeed's config keys that have no setting of ours, each with the reason. Those that do are in `deepspeed`.

The keys are those of DeepSpeed 0.19.8, with ones that it has removed and older files still have.
"""

from __future__ import annotations

from collections.abc import Mapping

NOT_NEEDED: Mapping[str, str] = {
    "train_batch_size": "the script's data loader decides",
    "train_micro_batch_size_per_gpu": "the script's data loader decides",
    "gradient_accumulation_steps": "set it in Accelerate or TrainingArguments",
    "managed_gradient_accumulation": "accelerator.accumulate, or TrainingArguments, counts micro-batches",
    "gradient_clipping": "call accelerator.clip_grad_norm_, or set TrainingArguments(max_grad_norm=...)",
    "steps_per_print": "logging is the script's",
    "wall_clock_breakdown": "use the trace setting",
    "timers": "use the trace setting",
    "memory_breakdown": "engine.memory() gives the bytes of each tier and kind",
    "log_level": "logging is the script's",
    "dump_state": "print accelerator.zero_plugin",
    "disable_python_gc": "Python's collector is the script's",
    "vocabulary_size": "only a check of shapes there",
    "dataloader_drop_last": "the script's data loader decides",
    "optimizer": "build a torch optimizer in the script; Adam, AdamW, Adagrad, Lion and SGD run compiled",
    "scheduler": "build a scheduler in the script",
    "zero_allow_untested_optimizer": "every element-wise torch optimizer is allowed",
    "zero_force_ds_cpu_optimizer": "the optimizer given is the one that runs",
    "activation_checkpointing": "use torch.utils.checkpoint or gradient_checkpointing=True; activations= places them",
    "flops_profiler": "use the trace setting",
    "tensorboard": "logging is the script's",
    "comet": "logging is the script's",
    "wandb": "logging is the script's",
    "csv_monitor": "logging is the script's",
    "comms_logger": "engine.ledger() counts bytes by collective",
    "disable_allgather": "weights are always all-gathered",
    "sparse_gradients": "sparse gradients are refused: sparse=False",
    "prescale_gradients": "gradients are summed in fp32, then divided",
    "gradient_predivide_factor": "gradients are summed in fp32, then divided",
    "compile": "use torch.compile, or torch_compile=True of TrainingArguments",
    "autotuning": "zero-plugin plan, or auto: true, chooses the placement",
    "datastates_ckpt": "checkpoints may be written beside the training: save_checkpoint(..., asynchronous=True)",
    "checkpoint": "checkpoints hold full tensors by name and load on any number of processes",
    "nebula": "checkpoints may be written beside the training",
    "elasticity": "checkpoints load on any number of processes",
    "seed": "seeding is the script's",
}
"""At the top: why each is not needed."""

NO_EQUAL: Mapping[str, str] = {
    "seq_parallel_communication_data_type": "sequence parallelism",
    "gradient_allreduce_op": "gradients are averaged over the ranks; for a sum, multiply the loss by their number",
    "hybrid_engine": "an inference engine inside training; generate runs on the sharded weights",
    "pipeline": "pipeline parallelism",
    "tensor_parallel": "tensor parallelism",
    "expert_parallel": "expert parallelism; experts are sharded as all weights",
    "use_data_before_expert_parallelism": "expert parallelism",
    "weight_quantization": "quantized weights",
    "data_efficiency": "curricula and random token dropping: the script's data loader",
    "curriculum_learning": "a curriculum: the script's data loader",
    "sparse_attention": "sparse attention kernels",
    "progressive_layer_drop": "layers dropped at random",
    "eigenvalue": "quantization by eigenvalues",
    "quantize_training": "quantization during training",
    "compression_training": "compression during training",
    "graph_harvesting": "CUDA graphs of the step",
    "amp": "Apex; use Accelerate's mixed_precision",
}
"""At the top: features that we do not have."""

NOT_NEEDED_ZERO: Mapping[str, str] = {
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
    "model_persistence_threshold": "persist_below decides alone",
    "max_live_parameters": "prefetch_units and prefetch_bytes bound what is gathered",
    "max_reuse_distance": "a unit is released after its use",
    "gather_16bit_weights_on_model_save": "saving always gathers, one unit at a time",
    "module_granularity_threshold": "units are transformer blocks",
    "use_all_reduce_for_fetch_params": "weights are all-gathered",
    "allgather_sequential": "weights are gathered unit by unit",
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
"""Of `zero_optimization`: why each is not needed."""

NO_EQUAL_ZERO: Mapping[str, str] = {
    "zero_hpz_partition_size": "a second copy of the shards in each node",
    "zero_quantized_weights": "quantized weight gathers",
    "zero_quantized_nontrainable_weights": "quantized gathers of frozen weights",
    "zero_quantized_gradients": "quantized gradient reductions (reduce_dtype='bf16' halves the bytes)",
    "mics_shard_size": "sharding within groups of ranks",
    "mics_hierarchical_params_gather": "sharding within groups of ranks",
    "zeropp_loco_param": "quantized gradient reductions with error feedback",
    "zenflow": "ZenFlow's selective asynchronous updates",
}
"""Of `zero_optimization`: features that we do not have. A config that turns one on is not translated in silence."""

_SCALE = "the loss scale follows torch's GradScaler"

NOT_NEEDED_PRECISION: Mapping[str, str] = {
    "initial_scale_power": f"{_SCALE}, which begins at 2^16",
    "loss_scale_window": f"{_SCALE}, which doubles it after 2000 good steps",
    "hysteresis": f"{_SCALE}, which halves it at once",
    "consecutive_hysteresis": f"{_SCALE}, which halves it at once",
    "min_loss_scale": f"{_SCALE}; nonfinite_patience ends a run that skips every step",
    "auto_cast": "Accelerate's mixed_precision casts",
    "immediate_grad_update": "gradients are always reduced while backward runs",
    "check_grad_overflow": "every step is checked: nonfinite",
}
"""Of `fp16` and `bf16`."""

NO_EQUAL_PRECISION: Mapping[str, str] = {
    "fp16_master_weights_and_grads": "masters and gradients below fp32",
    "bf16_master_weights_and_grads": "masters and gradients below fp32; split_master keeps exact masters in 2 bytes beside bf16 weights",
}

NOT_NEEDED_DATA_TYPES: Mapping[str, str] = {
    "grad_accum_dtype": "gradients are always accumulated in fp32",
    "param_dtype": "weights keep the dtype that the model was loaded with",
    "buffer_dtype": "buffers keep the dtype that the model was loaded with",
    "keep_in_fp32_modules": "weights keep the dtype that the model was loaded with",
}
"""Of `data_types`."""

NOT_NEEDED_OFFLOAD: Mapping[str, str] = {
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
"""Of `offload_optimizer` and `offload_param`."""
