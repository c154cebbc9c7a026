"""Traffic: kind `comm`."""

from __future__ import annotations

import re

from stateroom.ledger.comm import (
    bus_factor,
    causal_pairs,
    collective_seconds,
    context_parallel_elements,
    data_parallel_bytes,
    expert_bytes,
    minimum_block_tokens,
    minimum_sequence_tokens,
    mixed_minimum_batch,
    moved_share,
    optimal_fsdp,
    pipeline_elements,
    ring_bytes,
    strategy_factor,
    tensor_parallel_bytes,
    tensor_parallel_limit,
)
from stateroom.ledger.comm.bounds import data_parallel_minimum_batch, intensity, largest_fsdp
from stateroom.ledger.flops import six_n_d, training_seconds
from stateroom.ledger.goodput.storage import transfer_seconds
from stateroom.ledger.memory import tensor_bytes

from . import throughput
from .case import Case, Unanswered, in_bytes, in_seconds, is_bytes, is_seconds, leading_number, unit_word


def answer(case: Case) -> float:
    for ask in (_collective, _ratio, _bounds, _experts, _sequence, _data_parallel, _tensor_parallel, _time):
        found = ask(case)
        if found is not None:
            return found
    raise Unanswered(f"traffic of {', '.join(case.inputs)}")


def _scale(case: Case) -> float:
    if is_bytes(case.unit):
        return in_bytes(case.unit)
    return in_seconds(case.unit) if is_seconds(case.unit) else leading_number(case.unit)


def _bandwidth(case: Case) -> float | None:
    """Return bytes a second from any of the ways to write it."""
    factors = {"bandwidth": 1.0, "bytes_per_s": 1.0, "bandwidth_gbytes": 1e9, "bandwidth_gb_s": 1e9, "gbytes_per_s": 1e9, "gb_per_s": 1e9,
               "throughput_gbytes": 1e9, "bandwidth_gbps": 1e9 / 8, "gbps": 1e9 / 8, "network_gbps": 1e9 / 8,
                "bandwidth_gbits": 1e9 / 8}  # fmt: skip
    for name, factor in factors.items():
        if name in case.inputs:
            return case[name] * factor
    for name, value in case.inputs.items():  # such as net_gbps or bw_gbytes_s
        if "gbps" in name or "gbit" in name:
            return value * 1e9 / 8
        if "gbyte" in name or name.endswith(("_gb_s", "_gbs", "_gbs_s")):
            return value * 1e9
        if "bandwidth" in name or name.startswith("bw"):
            return value
    return None


def _params(case: Case) -> float | None:
    return case["params_b"] * 1e9 if "params_b" in case.inputs else case.get("params")


def _itemsize(case: Case) -> float:
    return case.first("bytes", "itemsize", "n_bytes", "bytes_per_param", "param_bytes", default=2)


def _collective(case: Case) -> float | None:
    if not case.has("collective"):
        return None
    kind, ranks = str(case["collective"]), int(case.first("ranks", "n", "gpus"))
    size, speed = case.first("bytes", "size", "size_bytes"), _bandwidth(case)
    if size is not None and speed is not None and is_seconds(case.unit):
        return collective_seconds(kind, size, ranks, speed) / in_seconds(case.unit)
    if size is not None and is_bytes(case.unit):
        return moved_share(kind, ranks) * size / in_bytes(case.unit)
    if case.get("in_network"):
        return bus_factor(kind, ranks, in_network=True)
    return bus_factor(kind, ranks) if "bus" in case.unit else moved_share(kind, ranks)


def _ratio(case: Case) -> float | None:
    if not case.has("ratio"):
        return throughput._ratio(case)
    text = str(case["ratio"])
    if re.search(r"\b(AG|RS|AR)\b", text):  # collectives of a layer, such as (4 AG + 4 RS)/(4 AR)
        one, other = (_sum_of_collectives(part, int(case.first("tp", "ranks", default=2))) for part in text.split("/"))
        return one / other
    one, _, other = text.partition("/")
    names = {"ulysses", "megatron"}
    if {one.strip(), other.strip()} & names:
        seq, hidden, ranks = case.get("seq", 1), case.get("hidden", 1), case.first("sp", "ranks", default=1)
        first, second = (context_parallel_elements(seq, hidden, ranks, method=name.strip()) for name in (one, other))
        return first / second
    return strategy_factor(one.strip()) / strategy_factor(other.strip())


def _sum_of_collectives(text: str, ranks: int) -> float:
    kinds = {"AG": "all_gather", "RS": "reduce_scatter", "AR": "all_reduce"}
    return sum(float(count or 1) * moved_share(kinds[kind], ranks) for count, kind in re.findall(r"(\d*)\s*(AG|RS|AR)", text))


def _bounds(case: Case) -> float | None:
    i = case.inputs
    scale = leading_number(case.unit)
    speed = _bandwidth(case)
    if case.has("peak_tflops") and speed is not None:
        flops = i["peak_tflops"] * 1e12
        least = minimum_sequence_tokens if "seq" in case.unit else minimum_block_tokens
        return (least(flops, speed) if "token" in case.unit else intensity(flops, speed)) / scale
    if case.has("alpha", "ffn") and not case.has("batch_tokens"):
        if "way" in case.unit or "rank" in case.unit or "TP" in case.unit:
            return tensor_parallel_limit(i["alpha"], i["ffn"], case.first("axes", "my", "n_axes", default=1))
        return mixed_minimum_batch(i["alpha"], i["ffn"], i.get("mx", 2), i.get("my", 1))
    if case.has("alpha") and not case.has("batch_tokens"):
        return data_parallel_minimum_batch(i["alpha"], case.first("axes", "n_axes", "mx", default=1))
    if case.has("flops") and speed is not None and "token" in case.unit:
        return intensity(i["flops"], speed) / case.first("axes", "n_axes", default=1)
    if case.has("batch_tokens", "chips", "ffn"):
        mesh = (i.get("mx", 2), i.get("my", 1))
        if "alpha" in i:
            fsdp = largest_fsdp(i["batch_tokens"], i["chips"], i["ffn"], i["alpha"], *mesh)
        else:
            fsdp = optimal_fsdp(i["batch_tokens"], i["chips"], i["ffn"], *mesh)
        return i["chips"] / fsdp if "tensor" in case.unit.lower() or "TP" in case.unit or "model" in case.unit else fsdp
    if case.has("batch_tokens") and case.first("chips", "gpus") is not None:
        return i["batch_tokens"] / case.first("chips", "gpus") / scale
    return None


def _experts(case: Case) -> float | None:
    i = case.inputs
    if case.has("per_stage_us"):
        return i["per_stage_us"] * 1e-6 * i.get("stages", 1) / in_seconds(case.unit)
    if case.has("layers", "per_layer_us"):
        return i["layers"] * i["per_layer_us"] * 1e-6 / in_seconds(case.unit)
    if case.has("tpot_ms"):
        return 1000 / i["tpot_ms"]
    copies = case.first("top_k", "experts", "copies")
    if not case.has("tokens", "hidden") or copies is None:
        return None
    if case.has("dispatch_bytes", "combine_bytes"):
        moved = sum(expert_bytes(i["tokens"], i["hidden"], copies, i[way]) for way in ("dispatch_bytes", "combine_bytes"))
    else:
        moved = expert_bytes(i["tokens"], i["hidden"], copies, i.get("bytes", 2), i.get("scale_bytes_per_128", 0))
    if case.has("time_us"):
        return moved / (i["time_us"] * 1e-6) / in_bytes(case.unit)
    speed = _bandwidth(case)
    return transfer_seconds(moved, speed) / in_seconds(case.unit) if speed and is_seconds(case.unit) else moved / _scale(case)


def _sequence(case: Case) -> float | None:
    i = case.inputs
    if case.has("split", "cp"):
        return causal_pairs(i["seq"], i["cp"], case.first("rank", default=_rank_in(case)), str(i["split"]))
    ranks = case.first("sp", "cp")
    if ranks is not None and case.has("seq", "hidden"):
        method = str(i.get("method") or ("ulysses" if case.formula_has("/P") else "megatron"))
        return context_parallel_elements(i["seq"], i["hidden"], ranks, i.get("batch", 1), method=method) * _item(case) / _scale(case)
    return None


def _rank_in(case: Case) -> int:
    """Return the rank that a name or unit speaks of (`rank1`, `rank 1`); zigzag chunks are equal on all, so 0 will do."""
    found = re.search(r"rank[ _]?(\d+)", f"{case.id} {case.unit}")
    return int(found[1]) if found else 0


def _item(case: Case) -> float:
    """A figure in elements has no item size; one in bytes has that of 16 bits unless it is given."""
    return float(case.get("bytes", 2)) if is_bytes(case.unit) else 1.0


def _data_parallel(case: Case) -> float | None:
    i = case.inputs
    params = _params(case)
    if params is None:
        return None
    if case.has("strategy") or case.first("transmissions", "n_transmissions") is not None:
        times = case.first("transmissions", "n_transmissions") or strategy_factor(str(i["strategy"]))
        if not is_bytes(case.unit) and not is_seconds(case.unit):
            return times * params / leading_number(case.unit)
        moved = data_parallel_bytes(params, _itemsize(case), str(i["strategy"])) if "strategy" in i else (
            times * params * _itemsize(case)
        )  # fmt: skip
        speed = _bandwidth(case)
        return transfer_seconds(moved, speed) / in_seconds(case.unit) if speed and is_seconds(case.unit) else moved / in_bytes(case.unit)
    if case.has("dp"):
        kinds = [("param_bytes", "all_gather"), ("grad_bytes", "reduce_scatter"), ("bytes", "all_gather")]
        given = [(i[name], kind) for name, kind in kinds if name in i] or [(2, "all_gather")]
        both = case.formula_has("2*(2*P") or case.says("reduce-scatter plus", "reduce-scatter + all-gather")
        moved = sum(ring_bytes(params, item, i["dp"], tp=i.get("tp", 1), pp=i.get("pp", 1), kind=kind) for item, kind in given)
        return moved * (2 if both and len(given) == 1 else 1) / _scale(case)
    tokens = case.first("tokens_per_seq", "seq", "seqlen")
    rate = case.first("tflops", "tflops_per_gpu")
    if tokens is not None and rate is not None and is_seconds(case.unit):
        passes = case.first("passes", "n_passes", default=3 if i.get("recompute") == "none" or case.formula_has("3*2") else 4)
        work = six_n_d(params, tokens * case.first("gbs", "global_batch_size", default=1), 2.0 * passes)
        return training_seconds(work, rate * 1e12, case.first("gpus", "total_gpus", default=1)) / in_seconds(case.unit)
    speed = _bandwidth(case)
    if speed is not None and is_seconds(case.unit):
        times = case.first("n_transmissions", default=3)
        return transfer_seconds(times * params * case.first("bytes", "n_bytes", default=2), speed) / in_seconds(case.unit)
    return None


def _tensor_parallel(case: Case) -> float | None:
    i = case.inputs
    tokens = case.first("tokens_per_dp_rank", "tokens")
    if case.has("scatter_gather") or (case.has("seq", "hidden", "micro_batch") and "boundary" in case.unit):
        scatter = bool(i.get("scatter_gather"))
        found = pipeline_elements(i["seq"], i["hidden"], i["micro_batch"], tp=i.get("tp", 1), scatter=scatter)
        return found * _item(case) / _scale(case)
    if tokens is not None and case.has("hidden") and not case.has("tp"):
        times = 2 if case.formula_has("2*msg", "2msg", "2message") else 1
        return tensor_bytes(tokens, i["hidden"], i.get("bytes", 2), count=times) / _scale(case)
    if not case.has("tp", "hidden"):
        return None
    if tokens is None:
        tokens = i["seq"] * i.get("micro_batch", 1)
    layers = i.get("layers", 1) / i.get("pp", 1)
    return tensor_parallel_bytes(tokens, i["hidden"], i["tp"], layers=layers, itemsize=_item(case)) / _scale(case)


def _time(case: Case) -> float | None:
    speed = _bandwidth(case)
    elements = case.get("elements")
    size = elements * case.get("bytes", 2) if elements is not None else case.first("size", "size_bytes", "bytes")
    if size is not None and speed is not None:
        if is_seconds(case.unit):
            return transfer_seconds(size, speed) / in_seconds(case.unit)
        if unit_word(case.unit):
            return size / speed / leading_number(case.unit)
    return None
