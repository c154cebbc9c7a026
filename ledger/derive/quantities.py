"""The quantities that relations speak of, each with its one unit and the other names people give it."""

from __future__ import annotations

from dataclasses import dataclass

from ..problems import look_up


@dataclass(frozen=True)
class Quantity:
    """A named figure; `unit` is the only unit it has inside the ledger."""

    name: str
    unit: str
    text: str
    aliases: tuple[str, ...] = ()


_ROWS = (
    ("devices", "", "accelerators of the job", ("gpus", "chips", "n_gpus", "accelerators", "world_size", "endpoints")),
    ("nodes", "", "hosts", ()),
    ("per_node", "", "accelerators of a host", ("gpus_per_node",)),
    ("peak", "FLOP/s", "dense peak of one device", ("peak_flops",)),
    ("achieved", "FLOP/s", "model FLOP/s of one device", ("flops_per_s_per_gpu",)),
    ("executed", "FLOP/s", "FLOP/s of one device with what is recomputed", ("hardware_flops_per_s",)),
    ("aggregate", "FLOP/s", "FLOP/s of the whole job", ()),
    ("mfu", "", "model FLOP/s over peak, 0 to 1", ()),
    ("hfu", "", "executed FLOP/s over peak, 0 to 1", ()),
    ("added", "", "recomputed over model FLOPs", ()),
    ("params", "", "parameters", ("parameters", "n_params")),
    ("active", "", "parameters one token uses", ("active_params",)),
    ("embedding", "", "parameters of the embedding, left out of N", ("emb", "input_embedding", "embedding_params")),
    ("counted", "", "parameters that FLOPs are counted for", ()),
    ("tokens", "", "tokens of the run", ("total_tokens",)),
    ("seq", "", "tokens of a sequence", ("seq_length", "seqlen", "sequence")),
    ("batch", "", "sequences of a step", ("gbs", "global_batch", "batch_sequences", "global_batch_size")),
    ("step_tokens", "", "tokens of a step", ("batch_tokens", "tokens_per_step")),
    ("step_s", "s", "time of a step", ("iter_s", "step_time_s")),
    ("run_s", "s", "time of the run", ()),
    ("tokens_s", "1/s", "tokens a second of the job", ("tokens_per_s",)),
    ("device_tokens_s", "1/s", "tokens a second of one device", ("tokens_per_s_per_gpu", "tokens_per_s_per_chip", "tps")),
    ("samples_s", "1/s", "sequences a second of the job", ("samples_per_s",)),
    ("token_flops", "FLOP", "model FLOPs of a token", ("flops_per_token",)),
    ("sequence_flops", "FLOP", "model FLOPs of a sequence", ("flops_per_sequence", "flops_per_sample")),
    ("step_flops", "FLOP", "model FLOPs of a step", ("flops_per_step", "flops_per_iteration")),
    ("run_flops", "FLOP", "FLOPs of the run", ("flops",)),
    ("executed_token_flops", "FLOP", "executed FLOPs of a token", ("hardware_flops_per_token",)),
    ("executed_step_flops", "FLOP", "executed FLOPs of a step", ()),
    ("passes", "", "FLOPs for each parameter and token: 6, or 8 with full recomputation", ("factor",)),
    ("layers", "", "layers", ("num_layers",)),
    ("hidden", "", "width of the residual stream", ("hidden_size",)),
    ("heads", "", "attention heads", ()),
    ("kv_heads", "", "key and value heads", ()),
    ("head_dim", "", "width of a head", ()),
    ("ffn", "", "inner size of the MLP", ("ffn_hidden_size",)),
    ("vocab", "", "vocabulary", ("vocab_size",)),
    ("device_h", "h", "device-hours", ("gpu_hours", "gpu_h", "chip_hours")),
    ("usd", "USD", "cost", ("cost",)),
    ("usd_per_h", "USD/h", "price of a device and hour", ()),
    ("node_usd_per_h", "USD/h", "price of a node and hour", ()),
    ("cluster_usd_per_h", "USD/h", "price of all devices and an hour", ()),
    ("hours", "h", "time of the run in hours", ()),
    ("energy_kwh", "kWh", "energy", ("kwh",)),
    ("watts", "W", "power of one device", ()),
    ("pue", "", "facility power over device power", ()),
    ("kg_per_kwh", "kg/kWh", "CO2 of a kWh", ("carbon_intensity",)),
    ("co2_t", "t", "CO2 in tonnes", ()),
    ("tp", "", "tensor-parallel ranks", ("mp",)),
    ("pp", "", "pipeline stages", ()),
    ("cp", "", "context-parallel ranks", ()),
    ("ep", "", "expert-parallel ranks", ()),
    ("etp", "", "tensor-parallel ranks of an expert", ()),
    ("dp", "", "data-parallel ranks", ()),
    ("expert_dp", "", "data-parallel ranks of the experts", ()),
    ("micro_batch", "", "sequences of a micro-batch", ("mbs",)),
    ("accumulation", "", "micro-batches of a step on each rank", ("microbatches", "num_microbatches", "gas")),
    ("rank_batch", "", "sequences of a step on each data-parallel rank", ("batch_per_dp",)),
)
QUANTITIES: dict[str, Quantity] = {name: Quantity(name, unit, text, aliases) for name, unit, text, aliases in _ROWS}
_BY_ANY_NAME = {alias: found for found in QUANTITIES.values() for alias in (found.name, *found.aliases)}


def quantity(name: str) -> Quantity:
    """Return a quantity by its name or another name of it.

    Raises:
        LedgerError: no such quantity; the message names the nearest ones.
    """
    return look_up("quantity", name, _BY_ANY_NAME)
