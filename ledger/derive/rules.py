"""The relations, most specific first: of two that give the same quantity, the earlier one whose inputs are there is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..flops.published import (
    dense_flops_per_token,
    dgxc_attention,
    dgxc_embedding,
    dgxc_mlp,
    narayanan_flops,
    six_n_d,
    training_seconds,
)
from ..flops.utilisation import hfu_from_mfu, mfu_from_hfu, model_share_of_hardware, utilisation
from ..units import HOUR_S

Number = float


@dataclass(frozen=True)
class Switches:
    """Conventions that change an answer.

    Attributes:
        attention: "full" counts s² score pairs, "causal" half, "none" leaves the attention core out.
        recompute: policy in force; None: not said, so that no HFU is made from an MFU.
    """

    attention: str = "full"
    recompute: str | None = None


@dataclass(frozen=True)
class Rule:
    """`gives` follows from `needs` by `compute`, which takes them in this order and the switches last."""

    gives: str
    needs: tuple[str, ...]
    text: str
    compute: Callable[..., Number]
    when: Callable[[Switches], bool] = lambda switches: True


def _rule(gives: str, needs: str, text: str, compute: Callable[..., Number], when: Callable[[Switches], bool] | None = None) -> Rule:
    return Rule(gives, tuple(needs.split()), text, compute, when or (lambda switches: True))


def _recomputed(switches: Switches) -> bool:
    return switches.recompute is not None


_FLOPS = (
    _rule(
        "token_flops", "layers hidden heads kv_heads ffn vocab seq", "12 L h² (1 + kv/a + s/h) + 18 L h f + 6 V h",
        lambda layers, hidden, heads, kv, ffn, vocab, seq, on: dgxc_attention(layers, hidden, heads, kv, seq, on.attention)
        + dgxc_mlp(layers, hidden, ffn) + dgxc_embedding(vocab, hidden),
    ),
    _rule("token_flops", "sequence_flops seq", "sequence FLOPs / s", lambda flops, seq, on: flops / seq),
    _rule(
        "token_flops", "counted layers heads head_dim seq", "6 N + 12 L a d s",
        lambda n, layers, heads, dim, seq, on: dense_flops_per_token(n, layers=layers, width=heads * dim, seq=seq, attention=on.attention),
    ),
    _rule(
        "token_flops", "counted layers hidden seq", "6 N + 12 L h s",
        lambda n, layers, hidden, seq, on: dense_flops_per_token(n, layers=layers, width=hidden, seq=seq, attention=on.attention),
    ),
    _rule("token_flops", "counted", "6 N", lambda n, on: dense_flops_per_token(n, attention="none")),
    _rule(
        "token_flops", "layers hidden seq vocab", "72 L h² (1 + s/6h + V/12hL)",
        lambda layers, hidden, seq, vocab, on: narayanan_flops(1, layers, hidden, seq, vocab) / seq,
    ),
    _rule("counted", "active embedding", "active - embedding", lambda n, emb, on: n - emb),
    _rule("counted", "active", "active parameters", lambda n, on: n),
    _rule("counted", "params embedding", "N - embedding", lambda n, emb, on: n - emb),
    _rule("counted", "params", "N", lambda n, on: n),
    _rule("sequence_flops", "token_flops seq", "token FLOPs x s", lambda flops, seq, on: flops * seq),
    _rule("step_flops", "sequence_flops batch", "sequence FLOPs x batch", lambda flops, batch, on: flops * batch),
    _rule("step_flops", "token_flops step_tokens", "token FLOPs x tokens of a step", lambda flops, tokens, on: flops * tokens),
    _rule("executed_token_flops", "layers hidden seq vocab", "96 (72) L h² (1 + s/6h + V/16hL)",
          lambda layers, hidden, seq, vocab, on: narayanan_flops(1, layers, hidden, seq, vocab, on.recompute) / seq, _recomputed),
    _rule("executed_step_flops", "batch layers hidden seq vocab", "96 (72) B L s h² (1 + s/6h + V/16hL)",
          lambda batch, layers, hidden, seq, vocab, on: narayanan_flops(batch, layers, hidden, seq, vocab, on.recompute), _recomputed),
    _rule("run_flops", "counted tokens passes", "passes x N x tokens", lambda n, tokens, passes, on: six_n_d(n, tokens, passes)),
    _rule("run_flops", "token_flops tokens", "token FLOPs x tokens", lambda flops, tokens, on: flops * tokens),
)  # fmt: skip
_RATES = (
    _rule("samples_s", "batch step_s", "batch / step time", lambda batch, step, on: batch / step),
    _rule("step_tokens", "batch seq", "batch x s", lambda batch, seq, on: batch * seq),
    _rule("step_tokens", "tokens_s step_s", "tokens a second x step time", lambda rate, step, on: rate * step),
    _rule("batch", "step_tokens seq", "tokens of a step / s", lambda tokens, seq, on: tokens / seq),
    _rule("tokens_s", "device_tokens_s devices", "a device's x devices", lambda rate, n, on: rate * n),
    _rule("tokens_s", "step_tokens step_s", "tokens of a step / step time", lambda tokens, step, on: tokens / step),
    _rule("tokens_s", "tokens run_s", "tokens / time", lambda tokens, time, on: tokens / time),
    _rule("device_tokens_s", "tokens_s devices", "tokens a second / devices", lambda rate, n, on: rate / n),
    _rule("device_tokens_s", "tokens device_h", "tokens / device-seconds", lambda tokens, hours, on: tokens / (hours * HOUR_S)),
    _rule("step_s", "step_tokens tokens_s", "tokens of a step / tokens a second", lambda tokens, rate, on: tokens / rate),
    _rule("achieved", "device_tokens_s token_flops", "tokens a second of a device x token FLOPs", lambda rate, flops, on: rate * flops),
    _rule("achieved", "tokens_s token_flops devices", "tokens a second x token FLOPs / devices",
          lambda rate, flops, n, on: rate * flops / n),
    _rule("achieved", "step_flops step_s devices", "step FLOPs / (step time x devices)", lambda flops, step, n, on: flops / (step * n)),
    _rule("achieved", "aggregate devices", "the job's FLOP/s / devices", lambda total, n, on: total / n),
    _rule("achieved", "run_flops device_h", "FLOPs / device-seconds", lambda flops, hours, on: flops / (hours * HOUR_S)),
    _rule("achieved", "mfu peak", "MFU x peak", lambda share, peak, on: share * peak),
    _rule("aggregate", "achieved devices", "a device's FLOP/s x devices", lambda rate, n, on: rate * n),
    _rule("executed", "device_tokens_s executed_token_flops", "tokens a second of a device x executed FLOPs of a token",
          lambda rate, flops, on: rate * flops),
    _rule("executed", "executed_step_flops step_s devices", "executed FLOPs / (step time x devices)",
          lambda flops, step, n, on: flops / (step * n)),
    _rule("executed", "hfu peak", "HFU x peak", lambda share, peak, on: share * peak),
)  # fmt: skip
_SHARES = (
    _rule("mfu", "executed peak layers hidden seq vocab", "executed FLOP/s / peak x model / executed FLOPs",
          lambda rate, peak, layers, hidden, seq, vocab, on: utilisation(rate, peak)
          * model_share_of_hardware(layers, hidden, seq, vocab, on.recompute or "full")),
    _rule("mfu", "hfu added", "HFU / (1 + added)", lambda share, added, on: mfu_from_hfu(share, added=added)),
    _rule("mfu", "hfu", "HFU x 6/8", lambda share, on: mfu_from_hfu(share, on.recompute), _recomputed),
    _rule("mfu", "achieved peak", "achieved / peak", lambda rate, peak, on: utilisation(rate, peak)),
    _rule("hfu", "executed peak", "executed / peak", lambda rate, peak, on: utilisation(rate, peak)),
    _rule("hfu", "mfu added", "MFU x (1 + added)", lambda share, added, on: hfu_from_mfu(share, added=added)),
    _rule("hfu", "mfu", "MFU x 8/6", lambda share, on: hfu_from_mfu(share, on.recompute), _recomputed),
)  # fmt: skip
_TIMES = (
    _rule("run_s", "hours", "hours x 3600", lambda hours, on: hours * HOUR_S),
    _rule("run_s", "tokens tokens_s", "tokens / tokens a second", lambda tokens, rate, on: tokens / rate),
    _rule("run_s", "run_flops executed devices", "FLOPs / (executed FLOP/s x devices)",
          lambda flops, rate, n, on: training_seconds(flops, rate, n)),
    _rule("run_s", "run_flops achieved devices", "FLOPs / (achieved FLOP/s x devices)",
          lambda flops, rate, n, on: training_seconds(flops, rate, n)),
    _rule("run_s", "run_flops peak devices", "FLOPs / (peak x devices)", lambda flops, peak, n, on: training_seconds(flops, peak, n)),
    _rule("run_s", "device_h devices", "device-hours / devices", lambda hours, n, on: hours * HOUR_S / n),
    _rule("run_s", "run_flops peak", "FLOPs / peak of one device", lambda flops, peak, on: training_seconds(flops, peak)),
    _rule("hours", "usd node_usd_per_h", "cost / price of a node and hour", lambda usd, price, on: usd / price),
    _rule("hours", "run_s", "seconds / 3600", lambda time, on: time / HOUR_S),
    _rule("device_h", "devices hours", "devices x hours", lambda n, hours, on: n * hours),
    _rule("device_h", "tokens device_tokens_s", "tokens / tokens a second of a device", lambda tokens, rate, on: tokens / rate / HOUR_S),
    _rule("device_h", "run_flops mfu peak", "FLOPs / (peak x MFU)",
          lambda flops, share, peak, on: training_seconds(flops, peak, 1, share) / HOUR_S),
    _rule("device_h", "run_flops achieved", "FLOPs / achieved FLOP/s", lambda flops, rate, on: training_seconds(flops, rate) / HOUR_S),
    _rule("device_h", "usd usd_per_h", "cost / price", lambda usd, price, on: usd / price),
    _rule("device_h", "energy_kwh watts", "energy / power", lambda energy, watts, on: energy * 1000 / watts),
)  # fmt: skip
_MONEY = (
    _rule("usd", "device_h usd_per_h", "device-hours x price", lambda hours, price, on: hours * price),
    _rule("usd", "node_usd_per_h hours nodes", "nodes x hours x price of a node", lambda price, hours, n, on: price * hours * n),
    _rule("usd", "node_usd_per_h hours", "hours x price of a node", lambda price, hours, on: price * hours),
    _rule("usd_per_h", "node_usd_per_h per_node", "price of a node / its devices", lambda price, n, on: price / n),
    _rule("usd_per_h", "usd device_h", "cost / device-hours", lambda usd, hours, on: usd / hours),
    _rule("cluster_usd_per_h", "devices usd_per_h", "devices x price", lambda n, price, on: n * price),
    _rule("energy_kwh", "device_h watts pue", "device-hours x power x PUE", lambda hours, watts, pue, on: hours * watts * pue / 1000),
    _rule("energy_kwh", "device_h watts", "device-hours x power", lambda hours, watts, on: hours * watts / 1000),
    _rule("watts", "energy_kwh device_h", "energy / device-hours", lambda energy, hours, on: energy * 1000 / hours),
    _rule("co2_t", "energy_kwh kg_per_kwh", "energy x CO2 of a kWh", lambda energy, rate, on: energy * rate / 1000),
    _rule("kg_per_kwh", "co2_t energy_kwh", "CO2 / energy", lambda mass, energy, on: mass * 1000 / energy),
)  # fmt: skip
_DEGREES = (
    _rule("expert_dp", "devices pp ep etp", "devices / (pp ep etp)", lambda n, pp, ep, etp, on: n / (pp * ep * etp)),
    _rule("expert_dp", "devices pp ep", "devices / (pp ep)", lambda n, pp, ep, on: n / (pp * ep)),
    _rule("devices", "dp tp pp cp", "dp tp pp cp", lambda dp, tp, pp, cp, on: dp * tp * pp * cp),
    _rule("devices", "dp tp pp", "dp tp pp", lambda dp, tp, pp, on: dp * tp * pp),
    _rule("devices", "dp tp cp", "dp tp cp", lambda dp, tp, cp, on: dp * tp * cp),
    _rule("devices", "dp tp", "dp tp", lambda dp, tp, on: dp * tp),
    _rule("devices", "dp pp", "dp pp", lambda dp, pp, on: dp * pp),
    _rule("devices", "nodes per_node", "nodes x devices of one", lambda nodes, each, on: nodes * each),
    _rule("dp", "devices tp pp cp", "devices / (tp pp cp)", lambda n, tp, pp, cp, on: n / (tp * pp * cp)),
    _rule("dp", "devices tp pp", "devices / (tp pp)", lambda n, tp, pp, on: n / (tp * pp)),
    _rule("dp", "devices tp cp", "devices / (tp cp)", lambda n, tp, cp, on: n / (tp * cp)),
    _rule("dp", "devices tp", "devices / tp", lambda n, tp, on: n / tp),
    _rule("dp", "devices pp", "devices / pp", lambda n, pp, on: n / pp),
    _rule("dp", "batch micro_batch accumulation", "batch / (micro-batch x accumulation)",
          lambda batch, micro, steps, on: batch / (micro * steps)),
    _rule("accumulation", "batch micro_batch dp", "batch / (micro-batch x dp)", lambda batch, micro, dp, on: batch / (micro * dp)),
    _rule("accumulation", "rank_batch micro_batch", "batch of a rank / micro-batch", lambda batch, micro, on: batch / micro),
    _rule("rank_batch", "batch dp", "batch / dp", lambda batch, dp, on: batch / dp),
    _rule("rank_batch", "micro_batch accumulation", "micro-batch x accumulation", lambda micro, steps, on: micro * steps),
    _rule("batch", "rank_batch dp", "batch of a rank x dp", lambda batch, dp, on: batch * dp),
    _rule("batch", "micro_batch accumulation dp", "micro-batch x accumulation x dp", lambda micro, steps, dp, on: micro * steps * dp),
)  # fmt: skip

RULES: tuple[Rule, ...] = (*_FLOPS, *_RATES, *_SHARES, *_TIMES, *_MONEY, *_DEGREES)
