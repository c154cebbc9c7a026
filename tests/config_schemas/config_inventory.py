"""Every key that a config may hold, written down by hand: the yardstick for the typed sections."""

from __future__ import annotations

TOP = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation gradient_clipping
steps_per_print wall_clock_breakdown memory_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
prescale_gradients gradient_predivide_factor gradient_allreduce_op communication_data_type
seq_parallel_communication_data_type sequence_parallel_size data_parallel_size disable_allgather dump_state
disable_python_gc dataloader_drop_last log_level vocabulary_size use_data_before_expert_parallelism
run_dir seed deterministic weight_quantization datastates_ckpt
"""

SECTIONS = {
    "optimizer": "type params legacy_fusion no_decay",
    "scheduler": "type params",
    "fp16": "enabled loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale auto_cast"
    " fp16_master_weights_and_grads",
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "zero_optimization": "stage overlap_comm contiguous_gradients reduce_bucket_size allgather_bucket_size allgather_partitions"
    " reduce_scatter use_multi_rank_bucket_allreduce round_robin_gradients ignore_unused_parameters load_from_fp32_weights"
    " elastic_checkpoint compute_grad_norm parameter_alignment sub_group_size stage3_prefetch_bucket_size"
    " stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance"
    " stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params"
    " stage3_allgather_sequential leaf_module memory_efficient_linear zero_hpz_partition_size zero_quantized_weights"
    " zero_quantized_nontrainable_weights zero_quantized_gradients pipeline_loading_checkpoint override_module_apply"
    " log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory offload_optimizer offload_param zenflow",
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "zero_optimization.offload_optimizer": "device pin_memory nvme_path buffer_count pipeline_read pipeline_write fast_init ratio"
    " super_offload cpuadam_cores_perc",
    "zero_optimization.offload_param": "device pin_memory nvme_path buffer_count buffer_size max_in_cpu",
    "zero_optimization.zenflow": "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio"
    " full_warm_up_rounds pt_reserved_cores_perc",
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    "activation_checkpointing": "partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints"
    " synchronize_checkpoint_boundary profile policy every",
    "pipeline": "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned use_reentrant"
    " schedule chunks split dynamic_shape",
    "tensor_parallel": "autotp_size dtype tp_overlap_comm tp partition_config preset_model injection_policy_tuple"
    " keep_module_on_host replace_with_kernel_inject vocab_parallel_lm_head vocab_parallel_ce_backend",
    "tensor_parallel.tp": "tp_size tp_grain_size mpu tp_group",
    "tensor_parallel.partition_config": "use_default_specs layer_specs",
    "tensor_parallel.partition_config.layer_specs.0": "patterns partition_type shape partition_dim model_types gather_output"
    " grad_allreduce",
    "expert_parallel": "enabled autoep_size expert_tensor_parallel_size preset_model moe_layer_pattern expert_pattern router_pattern"
    " shared_experts_pattern shared_experts_gate_pattern route_norm route_scale score_func score_apply top_k num_expert_groups"
    " num_limited_groups routed_scaling_factor use_grouped_mm disable_triton_grouped_mm gate_up_impl combine_impl"
    " row_weighting_impl comm_backend comm_num_sm comm_qp_margin comm_max_tokens_per_rank expert_w1 expert_w2 expert_w3"
    " num_experts_attr top_k_attr has_shared_experts expert_activation validate_folding_routing async_split_plan load_balance_coeff",
    "compile": "deepcompile passes free_activation free_activation_threshold offload_activation offload_activation_pin_memory"
    " offload_opt_states offload_parameters double_buffer symmetric_memory sync_before_reduce sync_after_reduce"
    " sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors autoep_non_moe debug_log"
    " enabled backend mode fullgraph dynamic",
    "hybrid_engine": "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size"
    " enable_cuda_graph",
    "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write checkpoint_serialization writer async"
    " keep_last keep_every save_every_steps save_every_minutes auto_interval mtbf_hours save_on_sigterm dir",
    "checkpoint.parallel_write": "pipeline_stage",
    "checkpoint.writer": "type decoupled io_buffer_size io_buffer_double data_parallel io_multiplier show_statistics",
    "flops_profiler": "enabled profile_step module_depth top_modules detailed output_file recompute_fwd_factor",
    "comms_logger": "enabled verbose prof_all prof_ops debug",
    "tensorboard": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "csv_monitor": "enabled output_path job_name",
    "comet": "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    "timers.throughput": "enabled synchronized",
    "autotuning": "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path tuner_type"
    " tuner_early_stopping tuner_num_trials arg_mappings model_info model_info_path mp_size max_train_batch_size"
    " min_train_batch_size max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes",
    "autotuning.model_info": "profile num_params hidden_size num_layers",
    "data_efficiency": "enabled seed",
    "data_efficiency.data_sampling": "enabled num_epochs num_workers pin_memory",
    "data_efficiency.data_sampling.curriculum_learning": "enabled data_cluster_path curriculum_metrics",
    "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.any": "index_to_sample_path index_to_metric_path"
    " difficulty_type clustering_type min_difficulty max_difficulty schedule_type schedule_config",
    "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.any.schedule_config": "total_curriculum_step"
    " difficulty_step root_degree difficulty max_step",
    "data_efficiency.data_sampling.dynamic_batching": "enabled metrics_path lr_scaling_method min_batch_size max_batch_size"
    " sequence_picking_order max_tokens verbose",
    "data_efficiency.data_routing": "enabled random_ltd",
    "data_efficiency.data_routing.random_ltd": "enabled total_layer_num random_ltd_layer_num random_ltd_layer_id model_mask_name"
    " model_type hidden_state_order random_ltd_schedule layer_token_lr_schedule",
    "data_efficiency.data_routing.random_ltd.random_ltd_schedule": "min_value max_value schedule_type schedule_config",
    "data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config": "require_steps seq_per_step",
    "units": "classes min_numel max_numel",
    "mesh": "pp dp_replicate dp_shard cp tp ep",
}

SCHEDULES = {
    "WarmupLR": "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type",
    "WarmupDecayLR": "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps",
    "WarmupCosineLR": "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type",
    "LRRangeTest": "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase",
    "OneCycle": "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count"
    " cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate",
}

# removed features: key -> (a value that means on, a value that means off or None when there is none)
DEAD = {
    "amp": ({"enabled": True, "opt_level": "O2"}, {"enabled": False}),
    "nebula": ({"enabled": True}, {"enabled": False, "persistent_time_interval": 100}),
    "compression_training": (
        {"weight_quantization": {"shared_parameters": {"enabled": True}}},
        {"weight_quantization": {"shared_parameters": {"enabled": False}}},
    ),
    "quantize_training": ({"enabled": True}, {"enabled": False}),
    "sparse_gradients": (True, False),
    "eigenvalue": ({"enabled": True}, {"enabled": False, "verbose": False}),
    "sparse_attention": ({"mode": "fixed"}, None),
    "elasticity": ({"enabled": True, "micro_batch_sizes": [2, 4]}, {"enabled": False}),
    "graph_harvesting": (True, False),
    "curriculum_learning": ({"enabled": True, "curriculum_type": "seqlen"}, {"enabled": False, "curriculum_type": "seqlen"}),
    "progressive_layer_drop": ({"enabled": True, "theta": 0.5}, {"enabled": False}),
    "zero_optimization.mics_shard_size": (8, -1),
    "zero_optimization.mics_hierarchical_params_gather": (True, False),
    "zero_optimization.zeropp_loco_param": ({"err_beta": 0.8}, None),
    "zero_optimization.legacy_stage1": (True, False),
}

# old spelling -> (its value, present key, the value it has there)
DEPRECATED = {
    "bfloat16.enabled": (True, "bf16.enabled", True),
    "zero_optimization": (True, "zero_optimization.stage", 1),
    "zero_optimization.cpu_offload": (True, "zero_optimization.offload_optimizer.device", "cpu"),
    "zero_optimization.cpu_offload_param": (True, "zero_optimization.offload_param.device", "cpu"),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        True,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        True,
    ),
    "zero_optimization.gather_16bit_weights_on_model_save": (
        True,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        True,
    ),
    "zero_optimization.max_live_parameters": (7e8, "zero_optimization.stage3_max_live_parameters", 700_000_000),
    "zero_optimization.max_reuse_distance": (5, "zero_optimization.stage3_max_reuse_distance", 5),
    "zero_optimization.prefetch_bucket_size": (5, "zero_optimization.stage3_prefetch_bucket_size", 5),
    "zero_optimization.param_persistence_threshold": (5, "zero_optimization.stage3_param_persistence_threshold", 5),
    "zero_optimization.model_persistence_threshold": (5, "zero_optimization.stage3_model_persistence_threshold", 5),
    "aio.thread_count": (3, "aio.intra_op_parallelism", 3),
    "compile.disable": (False, "compile.enabled", True),
    "compile.deepcompile": (True, "compile.enabled", True),
    "tensor_parallel.kernel_inject": (True, "tensor_parallel.replace_with_kernel_inject", True),
}

# defaults that surprise, or that scripts rely on
DEFAULTS = {
    "gradient_clipping": 1.0,
    "steps_per_print": None,
    "managed_gradient_accumulation": True,
    "gradient_allreduce_op": "mean",
    "gradient_predivide_factor": 1.0,
    "seq_parallel_communication_data_type": "fp32",
    "communication_data_type": None,
    "fp16.enabled": False,
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.min_loss_scale": 1,
    "bf16.check_grad_overflow": True,
    "zero_optimization.stage": 0,
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.reduce_bucket_size": 500_000_000,
    "zero_optimization.allgather_bucket_size": 500_000_000,
    "zero_optimization.sub_group_size": 1_000_000_000,
    "zero_optimization.stage3_prefetch_bucket_size": 50_000_000,
    "zero_optimization.stage3_param_persistence_threshold": 100_000,
    "zero_optimization.stage3_model_persistence_threshold": 2**63 - 1,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    "zero_optimization.ignore_unused_parameters": True,
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_optimizer.pin_memory": True,
    "zero_optimization.offload_optimizer.buffer_count": 4,
    "zero_optimization.offload_param.buffer_count": 5,
    "zero_optimization.offload_param.buffer_size": 100_000_000,
    "aio.block_size": 1_048_576,
    "aio.queue_depth": 8,
    "flops_profiler.module_depth": -1,
    "tensorboard.job_name": "DeepSpeedJobName",
    "autotuning.tuner_num_trials": 50,
    "data_efficiency.seed": 1234,
    "data_efficiency.data_sampling.num_epochs": 1000,
    "hybrid_engine.max_out_tokens": 512,
    "checkpoint.tag_validation": "Warn",
    "compile.enabled": False,
    "compile.backend": "inductor",
    "activation_checkpointing.policy": "none",
    "units.min_numel": "auto",
    "mesh.tp": 1,
}


def keys() -> list[str]:
    """Return every dotted key of the inventory that is still alive."""
    nested = [f"{section}.{name}" for section, names in SECTIONS.items() for name in names.split()]
    return [*TOP.split(), *nested]


def nest(path: str, value: object) -> dict[str, object]:
    """Return {"a": {"b": value}} for "a.b"; a numeric part makes a list of one."""
    for part in reversed(path.split(".")):
        value = [value] if part.isdigit() else {part: value}
    assert isinstance(value, dict)
    return value
