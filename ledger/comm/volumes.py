"""Traffic of each strategy in closed form: elements or bytes that one rank sends."""

from __future__ import annotations

from ..memory.states import placement_of
from ..problems import LedgerError, look_up
from .collectives import moved_share

# strategy -> how often the parameters travel in a step, in 16-bit units
_STRATEGIES: dict[str, float] = {
    "dp": 2.0, "ddp": 2.0, "zero0": 2.0, "zero1": 2.0, "zero2": 2.0, "zero3": 3.0, "fsdp": 3.0, "full_shard": 3.0,
    "shard_grad_op": 2.0, "fsdp_no_reshard": 2.0, "hsdp": 3.0,
    "qwz": 2.0, "hpz": 2.0, "qgz": 2.25, "zero++": 0.75,
}  # fmt: skip


def strategy_factor(strategy: str) -> float:
    """Return how often the parameters travel in a step: 2 for data parallelism and ZeRO 1 and 2, 3 for ZeRO 3.

    An all-reduce counts twice (arXiv:1910.02054, section 7). ZeRO++ (arXiv:2306.10209): qwz gathers int8 weights, hpz gathers
    for backward inside a node, qgz reduces int4 gradients; zero++ is all three, counted between nodes.

    Raises:
        LedgerError: no such strategy.
    """
    name = strategy.lower().replace("-", "").replace("_", "").replace(" ", "")
    if name.startswith("zero") and name[4:].isdigit():
        return 3.0 if placement_of(int(name[4:])).parameters.sharded else 2.0
    if name in ("zero++", "zeropp"):
        return _STRATEGIES["zero++"]
    return look_up("strategy", strategy, _STRATEGIES)


def data_parallel_bytes(params: float, itemsize: float, strategy: str = "zero3") -> float:
    """Return bytes a rank sends in a step; the factor (n - 1)/n of a ring is left out, as papers do."""
    return strategy_factor(strategy) * params * itemsize


def ring_bytes(params: float, itemsize: float, ranks: int, *, tp: int = 1, pp: int = 1, kind: str = "all_gather") -> float:
    """Return bytes a rank sends (and receives) when its share of the model, params / (tp pp), travels once over `ranks`."""
    return moved_share(kind, ranks) * params / (tp * pp) * itemsize


def tensor_parallel_bytes(
    tokens: float, hidden: int, tp: int, *, layers: float = 1.0, itemsize: float = 2.0, forward: int = 2, backward: int = 2
) -> float:
    """Return bytes a rank sends for tensor parallelism: `forward` + `backward` all-reduces of tokens x hidden in each layer.

    With sequence parallelism each all-reduce is an all-gather and a reduce-scatter of the same volume.
    """
    return (forward + backward) * layers * moved_share("all_reduce", tp) * tokens * hidden * itemsize


def pipeline_elements(seq: int, hidden: int, micro_batch: int = 1, *, tp: int = 1, scatter: bool = False) -> float:
    """Return elements a rank sends over one stage border for one micro-batch, one direction: b s h, or b s h / t when each
    tensor-parallel rank sends its part and the next stage gathers."""
    return micro_batch * seq * hidden / (tp if scatter else 1)


def context_parallel_elements(seq: float, hidden: float, ranks: int, batch: float = 1, *, method: str = "ulysses") -> float:
    """Return elements a link carries in one layer's forward, for all `seq` tokens: 4 N h / P by all-to-all (Ulysses), 4 N h
    by gathering (Megatron sequence parallelism).

    Raises:
        LedgerError: no such method.
    """
    shares = {"ulysses": 1.0 / ranks, "megatron": 1.0}
    return 4.0 * seq * hidden * batch * look_up("method", method, shares)


def expert_bytes(tokens: float, hidden: float, copies: float, itemsize: float, scale_bytes: float = 0.0, scale_group: int = 128) -> float:
    """Return bytes that `tokens` bring to (or back from) `copies` experts each, with a scale for every `scale_group` values."""
    return tokens * copies * (hidden * itemsize + (hidden / scale_group * scale_bytes if scale_bytes else 0.0))


def causal_pairs(seq: int, cp: int, rank: int, split: str = "zigzag") -> int:
    """Return how many query-key pairs a context-parallel rank computes under a causal mask.

    Args:
        split: "zigzag" gives rank i the chunks i and 2 cp - 1 - i of 2 cp, "contiguous" the i-th of cp.

    Raises:
        LedgerError: the sequence does not divide, or there is no such rank or split.
    """
    if split not in ("zigzag", "contiguous"):
        raise LedgerError(f"split is {split!r}; known: zigzag, contiguous")
    if not 0 <= rank < cp:
        raise LedgerError(f"rank {rank} of {cp} context-parallel ranks")
    parts = 2 * cp if split == "zigzag" else cp
    if seq % parts:
        raise LedgerError(
            f"{seq} tokens do not divide into {parts} chunks; nearest: {seq // parts * parts} or {(seq // parts + 1) * parts}"
        )
    size = seq // parts
    chunks = (rank, 2 * cp - 1 - rank) if split == "zigzag" else (rank,)
    return sum(size * chunk * size + size * (size + 1) // 2 for chunk in chunks)
