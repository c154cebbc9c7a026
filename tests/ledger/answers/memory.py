"""Bytes on a rank, and layouts: kinds `memory_states`, `memory_activation` and `layout`."""

from __future__ import annotations

import math

from stateroom.ledger.derive import derive
from stateroom.ledger.goodput.storage import checkpoint_bytes, transfer_seconds
from stateroom.ledger.memory import (
    StateSizes,
    activation_ratio,
    core_factor,
    deepspeed_zero2,
    deepspeed_zero3,
    embedding_activations,
    layer_activations,
    megatron_activation_bytes,
    megatron_weight_bytes,
    mixed_precision,
    model_activations,
    state_bytes,
    tensor_bytes,
    zero_states,
)
from stateroom.ledger.memory.activations import core_share, kept_outputs, kv_cache_bytes, recompute_time_overhead, selective_extra_flops
from stateroom.ledger.memory.megatron import in_flight_factor
from stateroom.ledger.memory.tensors import LayerOptions, layer_tensors
from stateroom.ledger.shapes import ModelShape, count_parameters, layer_parameters, read_shape
from stateroom.ledger.units import dtype_bytes

from .case import Case, Unanswered, in_bytes, in_seconds, is_bytes, is_seconds, is_share, leading_number, unit_word


def answer_states(case: Case) -> float:
    i = case.inputs
    if is_seconds(case.unit):
        size = case.first("checkpoint_bytes", "bytes")
        if size is None:
            size = checkpoint_bytes(i["params"], i.get("bytes_per_param", 12))
        return transfer_seconds(size, case.first("bandwidth", "bytes_per_s")) / in_seconds(case.unit)
    if unit_word(case.unit).startswith("bytes/param") or (case.has("param", "grad") and not case.has("params")):
        return _bytes_per_parameter(case)
    if unit_word(case.unit).lower() in ("gpus", "chips", "devices", "cards", "tpus"):
        return _devices_needed(case)
    scale = in_bytes(case.unit)
    if case.has("num_layers", "hidden_size"):
        weights = megatron_weight_bytes(i).total
        if "total" in case.words:
            return (weights + _megatron_activations(case)) / scale
        return weights / scale
    if case.has("largest_layer_params") or case.has("gpus_per_node"):
        return _deepspeed(case) / scale
    params = i.get("params")
    if params is None and "model" in i:
        params = count_parameters(read_shape(str(i["model"]))).total
    if params is None:
        raise Unanswered("states without params")
    if case.has("zero_stage"):
        return _zero(case, params).total / scale
    if case.has("bytes_per_param"):
        return checkpoint_bytes(params, i["bytes_per_param"]) / (i.get("tp", 1) * i.get("pp", 1) * i.get("devices", 1)) / scale
    each = sum(value for key, value in i.items() if key.endswith("_bytes"))
    if each:
        return checkpoint_bytes(params, each) / scale
    if case.has("dtype"):
        return checkpoint_bytes(params, dtype_bytes(i["dtype"])) / scale
    if "dp" in i:
        return _zero(case, params).total / scale
    raise Unanswered("states")


def _devices_needed(case: Case) -> float:
    """Return how many devices' memory a total fills."""
    i = case.inputs
    total = case.first("total_bytes", "bytes_total", "state_bytes")
    if total is None:
        total = checkpoint_bytes(i["params"], i.get("bytes_per_param", 16))
    each = case.first("hbm_bytes", "hbm", default=case.first("hbm_gb", "memory_gb", default=80) * 1e9)
    return math.ceil(total / each) if case.formula_has("ceil", "+1") else total / each


def _sizes(case: Case) -> StateSizes:
    given = case.get("bytes")
    if isinstance(given, dict):
        return StateSizes(given.get("param", 2), given.get("grad", 2), 0.0, given.get("opt", given.get("optimizer", 12)), 0.0, 0.0)
    return StateSizes(2.0, case.get("grad_bytes", 2))


def _zero(case: Case, params: float):
    return zero_states(
        params, case.first("dp", "gpus", "ranks", default=1), case.get("zero_stage", case.get("zero", 0)), _sizes(case),
        tp=case.get("tp", 1), pp=case.get("pp", 1), gathered=case.first("gathered_layer_params", "largest_layer_params", default=0),
    )  # fmt: skip


def _bytes_per_parameter(case: Case) -> float:
    if "param" not in case.inputs:
        return _zero(case, 1.0).total
    sizes = mixed_precision(case["param"], case["grad"])
    sharded = bool(case.first("dist_opt", "distributed_optimizer", "use_distributed_optimizer", default=False))
    return state_bytes(sizes, sharded_optimizer=sharded, world=case.first("dp", "d", default=1))


def _deepspeed(case: Case) -> float:
    """One set of inputs has a figure for the accelerator and one for the host; the name says `cpu` where it is the host's."""
    i = case.inputs
    buffer = i.get("buffer", 1.5)
    if case.has("largest_layer_params"):
        found = deepspeed_zero3(
            i["params"], i["largest_layer_params"], i["gpus_per_node"], i.get("nodes", 1), offload_param=i.get("offload_param", False),
            offload_optimizer=i.get("offload_optimizer", i.get("cpu_offload", False)), zero_init=i.get("zero_init", True), buffer=buffer,
        )  # fmt: skip
    else:
        found = deepspeed_zero2(
            i["params"], i["gpus_per_node"], i.get("nodes", 1), cpu_offload=i.get("cpu_offload", i.get("offload_optimizer", False)),
                buffer=buffer,
            as_documented=bool(i.get("legacy_docs_formula")),
        )  # fmt: skip
    return found.host if {"cpu", "host"} & case.words and "gpu" not in case.words else found.device


def answer_activations(case: Case) -> float:
    i = case.inputs
    if case.has("num_layers", "hidden_size"):
        return _megatron_activations(case) / in_bytes(case.unit)
    if is_bytes(case.unit):
        return _activation_bytes(case) / in_bytes(case.unit)
    if is_share(case.unit):
        return 100 * _activation_share(case)
    if case.has("ratio"):
        return _ratio(case)
    if case.has("pp") and case.first("vp", "v", "interleave") is not None:
        return in_flight_factor(i["pp"], case.first("vp", "v", "interleave"))
    if case.has("heads", "seq", "hidden"):
        return core_factor(i["heads"], i["seq"], i["hidden"])
    raise Unanswered("activations")


def _megatron_activations(case: Case) -> float:
    """Megatron-LM has two functions; the source, the formula or the name says which one was run."""
    without = case.says("without_sp", "without sp") or bool({"nosp", "without"} & case.words) or case.formula_has("10+24/t")
    sequence_parallel = case.get("sequence_parallel", not without)
    return megatron_activation_bytes(case.inputs, case.get("num_microbatches"), sequence_parallel=sequence_parallel).total


def _ratio(case: Case) -> float:
    one, _, other = case["ratio"].partition("/")
    return activation_ratio(one, other, case["seq"], case["hidden"], case["heads"], case.get("tp", 1))


def _activation_share(case: Case) -> float:
    i = case.inputs
    if case.has("ratio"):
        return _ratio(case)
    if len(i) == 2 and all(key.endswith(("_ms", "_s")) for key in i):
        return recompute_time_overhead(min(i.values()), 0.0, max(i.values()), 0.0)
    if case.has("fwd_ms", "bwd_ms"):
        forward = next((value for key, value in i.items() if key.endswith("fwd_ms") and key != "fwd_ms"), i["fwd_ms"])
        backward = next(value for key, value in i.items() if key.endswith("bwd_ms") and key != "bwd_ms")
        return recompute_time_overhead(i["fwd_ms"], i["bwd_ms"], forward, backward)
    if case.has("heads", "seq", "hidden"):
        return core_share(i["seq"], i["hidden"], i["heads"])
    if case.has("seq", "hidden"):
        return selective_extra_flops(i["seq"], i["hidden"])
    raise Unanswered("share of activations")


def _activation_bytes(case: Case) -> float:
    i = case.inputs
    micro = case.first("micro_batch", "batch", default=1)
    tp, cp = i.get("tp", 1), i.get("cp", 1)
    if case.has("layers", "kv_heads", "head_dim") and not case.has("hidden"):
        return kv_cache_bytes(i["layers"], i["kv_heads"], i["head_dim"], i["seq"] * micro, i.get("bytes", 2))
    if case.has("vocab") and not case.has("hidden"):
        shards = case.first("chunks", "shards", "tiles", default=1)
        return tensor_bytes(i["seq"] * micro / shards, i["vocab"], case.first("bytes", "bytes_per_element", default=4), tp=tp)
    if case.has("vocab", "hidden") and not case.has("mode"):
        return embedding_activations(i["seq"], micro, i["hidden"], i["vocab"], tp=tp, pp=i.get("pp", 1), interleave=i.get("vp", 1))
    if case.has("bytes"):
        if case.has("layers"):
            return tensor_bytes(i["seq"] * micro, i["hidden"], i["bytes"], count=i["layers"], tp=tp)
        return kept_outputs(i["seq"], micro, i["hidden"], i.get("pp", 1), i["bytes"])
    if i.get("swiglu") or i.get("gqa"):
        return _by_tensors(case) * i.get("layers", 1)
    mode = i.get("mode") or "none"
    flash = bool(i.get("flash"))
    if case.has("layers"):
        return model_activations(
            i["seq"], micro, i["hidden"], i.get("heads", 0), i["layers"], tp=tp, cp=cp, mode=mode, flash=flash, pp=i.get("pp", 1),
            interleave=case.first("vp", "interleave", default=1),
        )  # fmt: skip
    return layer_activations(i["seq"], micro, i["hidden"], i.get("heads", 0), tp=tp, cp=cp, mode=mode, flash=flash)


def _by_tensors(case: Case) -> float:
    i = case.inputs
    if "model" in i:
        shape = read_shape(str(i["model"]))
    else:
        shape = ModelShape("case", 1, i["hidden"], 1, i["heads"], i["ffn"], kv_heads=i.get("kv_heads"), gated=bool(i.get("swiglu", True)))
    options = LayerOptions(
        tp=i.get("tp", 1), sequence_parallel=bool(i.get("sp", True)), cp=i.get("cp", 1), dropout=bool(i.get("dropout")), statistics=False
    )
    return layer_tensors(shape, i["seq"], i.get("micro_batch", 1), options).total


def answer_layout(case: Case) -> float:
    i = case.inputs
    if is_bytes(case.unit):
        return _layout_bytes(case) / in_bytes(case.unit)
    unit = case.unit.lower()
    for many, parts in (("layers", "pp"), ("heads", "tp"), ("experts", "ep")):
        if case.has(many, parts) and unit.startswith(many):
            return i[many] / i[parts]
    given = {key: value for key, value in i.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}
    if unit.startswith("tokens per") and any(word in unit for word in ("gpu", "chip", "device")):
        return case.first("tokens", "batch_tokens") / case.first("gpus", "chips", "devices")
    if unit.startswith("gpus") and set(given) <= {"tp", "pp", "cp"}:
        return math.prod(given.values())
    return derive(_degree(case), given).value / leading_number(case.unit)


def _degree(case: Case) -> str:
    """Return the quantity that the unit asks for."""
    unit = case.unit.lower()
    rules = (
        ("expert", "expert_dp"), ("fsdp", "dp"), ("dp", "dp"), ("replica", "dp"), ("data-parallel", "dp"), ("tokens per batch",
         "step_tokens"),
        ("tokens", "step_tokens"), ("microbatch", "accumulation"), ("micro-batch", "accumulation"), ("accumulation", "accumulation"),
        ("gpu", "devices"), ("chips", "devices"), ("devices", "devices"), ("ranks", "devices"),
        ("sequences per", "rank_batch"), ("sequences", "batch"), ("samples", "batch"), ("batch", "batch"), ("tp", "tp"), ("pp", "pp"),
    )  # fmt: skip
    found = next((name for word, name in rules if word in unit), None)
    if found is None:
        raise Unanswered(f"no degree in {case.unit!r}")
    return found


def _layout_bytes(case: Case) -> float:
    """States and activations of the first stage: by published forms (mode), or tensor by tensor for a known model."""
    i = case.inputs
    shape = read_shape(str(i["model"])) if "model" in i else None
    params = i.get("params") or count_parameters(shape).total
    gathered = i.get("gathered_layer_params", 0)
    if i.get("zero_stage") == 3 and not gathered and shape is not None:
        gathered = layer_parameters(shape)
    layers = i.get("layers_on_stage0") or (-(-shape.layers // i.get("pp", 1)) if shape else 0)
    if not {"dp", "zero", "zero_stage", "grad_bytes"} & i.keys() and "seq" in i and shape is not None:
        return layers * i.get("in_flight", i.get("pp", 1)) * _by_tensors(case)
    states = zero_states(
        params, i.get("dp", 1), i.get("zero_stage", i.get("zero", 0)), _sizes(case), tp=i.get("tp", 1), pp=i.get("pp", 1), gathered=gathered
    ).total
    if "mode" in i:
        kept = model_activations(
            case.first("seq_per_rank", "seq"), i.get("micro_batch", 1), _hidden(case, shape), _heads(case, shape), i["layers"],
                tp=i.get("tp", 1),
            cp=1 if "seq_per_rank" in i else i.get("cp", 1), mode=i["mode"],
        )  # fmt: skip
        return states + kept
    if "seq" not in i:
        return states
    return states + layers * i.get("in_flight", i.get("pp", 1)) * _by_tensors(case)


def _known(case: Case) -> ModelShape | None:
    """A case that gives only a count of parameters and layers speaks of the model of the table with both."""
    from stateroom.ledger.shapes.catalogue import catalogue

    for entry in catalogue().values():
        if entry.shape.layers == case.get("layers") and count_parameters(entry.shape).total == case.get("params"):
            return entry.shape
    return None


def _hidden(case: Case, shape: ModelShape | None) -> int:
    found = case.get("hidden") or getattr(shape or _known(case), "hidden", None)
    if found is None:
        raise Unanswered("hidden is not known")
    return found


def _heads(case: Case, shape: ModelShape | None) -> int:
    found = case.get("heads") or getattr(shape or _known(case), "heads", None)
    return found or 0
