"""Who shares what with whom: the mesh, tensor and expert parallelism."""

from __future__ import annotations

from typing import Any, Literal

from .fields import HONOURED, Bool, Dtype, Float, Int, Section, Str, key, later, no_effect, section


class Mesh(Section):
    """The grid of ranks: the product of the axes pp, dp_replicate, dp_shard, cp and tp is the number of ranks."""

    pp: Int = key(1, "Pipeline stages.", effect=HONOURED, ge=1)
    dp_replicate: Int = key(1, "Copies of the sharded states.", effect=later("states are sharded over all ranks"), alters="placement", ge=1)
    dp_shard: Int | None = key(None, "Ranks over which states are sharded; absent means all that are left.", effect=HONOURED, ge=1)
    cp: Int = key(1, "Ranks that share one sequence.", effect=later("sequences stay whole"), alters="result", ge=1)
    tp: Int = key(1, "Ranks that share one matrix.", effect=later("matrices stay whole in compute"), alters="result", ge=1)
    ep: Int = key(
        1, "Ranks that share the experts; laid over part of the other axes.", effect=later("experts stay together"), alters="result", ge=1
    )


class TpGroup(Section):
    """The older form of the tensor-parallel size."""

    tp_size: Int = key(1, "Ranks that share one matrix.", alters="result", ge=1)
    tp_grain_size: Int = key(1, "Smallest share of a matrix, in elements.", ge=1)
    mpu: Any = key(None, "Object of the script that knows the groups.")
    tp_group: Any = key(None, "Process group of the script.")


class LayerSpec(Section):
    """How the matrices whose names match are cut."""

    patterns: list[Str] = key([], "Patterns of parameter names.")
    partition_type: Literal["column", "row", "skip"] = key("column", "column, row or skip.")
    shape: Any = key(None, "Logical shape of a fused matrix.")
    partition_dim: Int | None = key(None, "Dimension of that shape that is cut.")
    model_types: list[Str] | None = key(None, "Only for these model types.")
    gather_output: Bool = key(False, "Gather the output of a column cut.")
    grad_allreduce: Bool = key(True, "Sum the input's gradient over the ranks.")


class PartitionConfig(Section):
    """The table of cuts."""

    use_default_specs: Bool = key(True, "Start from the cuts known for the model.")
    layer_specs: list[LayerSpec] = key([], "Own cuts, first match wins.")


class TensorParallel(Section):
    """Matrices shared by several ranks."""

    autotp_size: Int = key(0, "Ranks that share one matrix of an unmodified model; 0 and 1 mean off.", alters="result", ge=0)
    dtype: Dtype = key("fp16", "Dtype of the sharded weights.")
    tp_overlap_comm: Bool = key(False, "Overlap the reduction with compute.")
    tp: TpGroup = section("Size and groups.")
    partition_config: PartitionConfig | None = key(None, "Own table of cuts.")
    preset_model: Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None = key(
        None, "A known table of cuts."
    )
    injection_policy_tuple: Any = key(None, "Older table of cuts.")
    keep_module_on_host: Bool = key(False, "Cut the model in host memory.")
    replace_with_kernel_inject: Bool = key(False, "Swap modules for fused ones.")
    vocab_parallel_lm_head: Bool | None = key(None, "Cut the output head over the vocabulary.")
    vocab_parallel_ce_backend: Literal["torch", "liger"] = key("torch", "Cross entropy over a cut vocabulary.")


class ExpertParallel(Section):
    """Experts of a mixture shared by several ranks."""

    enabled: Bool = key(False, "Cut the experts over ranks.", alters="result")
    autoep_size: Int = key(1, "Ranks that share the experts.", ge=1)
    expert_tensor_parallel_size: Int = key(1, "Ranks that share one expert's matrices.", ge=1)
    preset_model: Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"] | None = key(
        None, "A known set of patterns."
    )
    moe_layer_pattern: Str | None = key(None, "Name pattern of mixture layers.")
    expert_pattern: Str | None = key(None, "Name pattern of experts.")
    router_pattern: Str | None = key(None, "Name pattern of routers.")
    shared_experts_pattern: Str | None = key(None, "Name pattern of shared experts.")
    shared_experts_gate_pattern: Str | None = key(None, "Name pattern of the shared experts' gate.")
    route_norm: Bool | None = key(None, "Normalise the chosen weights.")
    route_scale: Float | None = key(None, "Factor on the chosen weights.")
    score_func: Str | None = key(None, "Function from logits to scores.")
    score_apply: Str | None = key(None, "Where the score is applied.")
    top_k: Int | None = key(None, "Experts of a token.", ge=1)
    num_expert_groups: Int | None = key(None, "Groups of experts.", ge=1)
    num_limited_groups: Int | None = key(None, "Groups a token may use.", ge=1)
    routed_scaling_factor: Float | None = key(None, "Factor on the routed output.")
    use_grouped_mm: Bool = key(True, "One grouped multiplication for all experts.")
    disable_triton_grouped_mm: Bool = key(False, "Keep off the Triton kernel.")
    gate_up_impl: Str | None = key(None, "Implementation of gate and up.")
    combine_impl: Str | None = key(None, "Implementation of the combine.")
    row_weighting_impl: Str | None = key(None, "Implementation of the weighting.")
    comm_backend: Literal["comm", "deepep"] = key("comm", "Who carries tokens between ranks.")
    comm_num_sm: Int = key(12, "Multiprocessors given to communication.", ge=1)
    comm_qp_margin: Int = key(4, "Spare queue pairs.", ge=0)
    comm_max_tokens_per_rank: Int = key(0, "Cap on tokens sent to a rank; 0 means none.", ge=0)
    expert_w1: Str | None = key(None, "Name of the gate matrix.")
    expert_w2: Str | None = key(None, "Name of the down matrix.")
    expert_w3: Str | None = key(None, "Name of the up matrix.")
    num_experts_attr: Str | None = key(None, "Attribute with the number of experts.")
    top_k_attr: Str | None = key(None, "Attribute with the experts of a token.")
    has_shared_experts: Bool | None = key(None, "Whether shared experts exist.")
    expert_activation: Str | None = key(None, "Activation inside an expert.")
    validate_folding_routing: Bool = key(False, "Check the routing of folded groups.")
    async_split_plan: Bool = key(False, "Plan the exchange beside compute.")
    load_balance_coeff: Float | None = key(
        None, "Weight of the balancing loss.", effect=no_effect("the balancing loss belongs to the model")
    )
