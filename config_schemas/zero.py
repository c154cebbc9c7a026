"""The zero_optimization section: which states are sharded, and how the traffic for them is tuned."""

from __future__ import annotations

from .fields import HONOURED, Bool, Int, Section, Str, key, later, no_effect, section
from .offload import OffloadOptimizer, OffloadParam, ZenFlow

_BUCKET = no_effect("a unit's flat buffer is the bucket")
_MAX_INT = 2**63 - 1
_QUANTIZED = later("weights and gradients travel unquantized")


class LeafModule(Section):
    """Modules that are gathered as a whole: each becomes one unit."""

    classes: list[Str] = key(
        [
            "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
            "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
            "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        ],
        "Classes, by name or by full path.",
    )
    names: list[Str] = key([], "Modules by full name in the model.")
    name_suffixes: list[Str] = key([], "Modules by the end of their name.")


class ZeroOptimization(Section):
    """Which of parameters, gradients and optimizer states are sharded, and how."""

    stage: Int = key(
        0, "0 replicates everything, 1 shards optimizer states, 2 gradients too, 3 parameters too.", effect=HONOURED, ge=0, le=3
    )
    overlap_comm: Bool | None = key(
        None, "Prefetch and reduce while the model computes; only an explicit false turns it off.", effect=HONOURED
    )
    contiguous_gradients: Bool = key(
        True, "Copy gradients into one buffer.", effect=no_effect("gradients are born inside the unit's flat buffer, already contiguous")
    )
    reduce_bucket_size: Int = key(500_000_000, "Elements reduced at once.", effect=_BUCKET, gt=0)
    allgather_bucket_size: Int = key(500_000_000, "Elements gathered at once in stages 1 and 2.", effect=_BUCKET, gt=0)
    allgather_partitions: Bool = key(
        True, "Gather updated weights with all-gather, not broadcasts.", effect=no_effect("updated weights always travel by all-gather")
    )
    reduce_scatter: Bool = key(
        True,
        "Reduce gradients with reduce-scatter, not all-reduce.",
        effect=no_effect("the stage decides: sharded gradients are reduce-scattered, replicated ones all-reduced"),
    )
    use_multi_rank_bucket_allreduce: Bool = key(
        True, "Let a bucket span owner ranks.", effect=no_effect("every unit is cut over all ranks, so no bucket has one owner")
    )
    round_robin_gradients: Bool = key(
        False,
        "Reorder parameters so that copies to the host run in parallel.",
        effect=no_effect("every rank owns an equal slice of every unit"),
    )
    ignore_unused_parameters: Bool = key(True, "Accept parameters without a gradient; false makes them an error.", effect=HONOURED)
    load_from_fp32_weights: Bool = key(
        True, "On load take the fp32 master weights, not the 16-bit ones.", effect=later("it comes with checkpoint loading")
    )
    elastic_checkpoint: Bool = key(
        False, "Save stages 1 and 2 for other rank counts.", effect=no_effect("every checkpoint can be loaded with another number of ranks")
    )
    compute_grad_norm: Bool = key(
        True,
        "Compute the gradient norm even if nothing clips.",
        effect=no_effect("the norm is always computed; it costs one scalar reduction"),
    )
    parameter_alignment: Bool = key(
        False,
        "Align every parameter to 16 bytes.",
        effect=no_effect("a unit is padded once at its end and its layout is part of no file format"),
    )
    sub_group_size: Int = key(
        1_000_000_000,
        "Elements that are updated together where states are offloaded; left open: 8 Mi; at least 4096.",
        effect=HONOURED,
        gt=0,
    )
    stage3_prefetch_bucket_size: Int = key(50_000_000, "Elements gathered ahead of their use.", effect=HONOURED, ge=0)
    stage3_param_persistence_threshold: Int = key(
        100_000,
        "Parameters below this size stay whole.",
        effect=no_effect("small parameters travel inside their unit, at no extra call"),
        ge=0,
    )
    stage3_model_persistence_threshold: Int = key(
        _MAX_INT, "Cap on the sum of parameters that stay whole.", effect=no_effect("no parameter stays whole in stage 3"), ge=0
    )
    stage3_max_live_parameters: Int = key(
        1_000_000_000,
        "Cap on gathered elements.",
        effect=no_effect("only the running unit and those prefetched are whole; stage3_prefetch_bucket_size bounds them"),
        ge=0,
    )
    stage3_max_reuse_distance: Int = key(
        1_000_000_000,
        "Keep a parameter whole if it is used again this soon.",
        effect=no_effect("a unit is released when its forward ends"),
        ge=0,
    )
    stage3_gather_16bit_weights_on_model_save: Bool = key(False, "Allow a consolidated 16-bit save in stage 3.", effect=HONOURED)
    stage3_module_granularity_threshold: Int = key(
        0, "Fetch modules with small parameters as one.", effect=no_effect("whole units are gathered, never single small modules"), ge=0
    )
    stage3_use_all_reduce_for_fetch_params: Bool = key(
        False, "Gather by all-reduce.", effect=no_effect("a unit is gathered by one all-gather into its buffer")
    )
    stage3_allgather_sequential: Bool = key(False, "Gather parameters one at a time.", effect=no_effect("a unit is one gather already"))
    leaf_module: LeafModule = section("Modules that are gathered as a whole.", effect=HONOURED)
    memory_efficient_linear: Bool = key(
        True,
        "Save less for backward in Linear.",
        effect=no_effect("saved weights are views of the unit's buffer and take no memory of their own"),
    )
    zero_hpz_partition_size: Int = key(
        1,
        "ZeRO++: ranks of the second shard inside a node.",
        effect=later("parameters are sharded over all ranks"),
        alters="placement",
        ge=1,
    )
    zero_quantized_weights: Bool = key(False, "ZeRO++: gather weights in int8.", effect=_QUANTIZED, alters="result")
    zero_quantized_nontrainable_weights: Bool = key(False, "The same for frozen weights.", effect=_QUANTIZED, alters="result")
    zero_quantized_gradients: Bool = key(False, "ZeRO++: reduce gradients in int4.", effect=_QUANTIZED, alters="result")
    pipeline_loading_checkpoint: Bool = key(
        False, "Load stage 3 checkpoints in steps.", effect=no_effect("each rank reads only its own slices")
    )
    override_module_apply: Bool = key(
        True, "Gather inside module.apply.", effect=no_effect("nothing of torch is patched; use zero.GatheredParameters around apply")
    )
    log_trace_cache_warnings: Bool = key(
        False,
        "Warn when the order of modules changes.",
        effect=no_effect("a changed order only turns prefetch off, and the ledger shows it"),
    )
    enable_sanity_checks: Bool = key(
        False, "Check across ranks that sizes agree.", effect=no_effect("layouts are compared across ranks once, at start")
    )
    save_muon_momentum_buffer_in_memory: Bool = key(
        False,
        "Keep Muon's momentum beside the weights in stage 3.",
        effect=no_effect("optimizer states live with their shard in every stage"),
    )
    offload_optimizer: OffloadOptimizer = section("Where optimizer states rest.", effect=HONOURED)
    offload_param: OffloadParam = section("Where parameters rest; stage 3.", effect=HONOURED)
    zenflow: ZenFlow | None = key(
        None, "Split updates between accelerator and host.", effect=later("every update runs at once"), alters="result"
    )
