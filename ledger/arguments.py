"""Command-line options that `ledger` and `plan` share, and the job they describe."""

from __future__ import annotations

import argparse
import math
from typing import Any

from .hardware.device import Cluster
from .hardware.load import read_cluster
from .job import Job, Layout, check
from .problems import LedgerError
from .shapes.load import read_shape
from .shapes.shape import ModelShape
from .units import parse_bytes, parse_count

_ROUND = 0.05  # a batch in tokens is taken as a power of two of sequences when that is this close


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a model, a cluster and a batch."""
    parser.add_argument(
        "--model", metavar="NAME|FILE", help="a name of `stateroom ledger models`, a config.json, or an hjson file of sizes"
    )
    parser.add_argument("--on", metavar="CLUSTER", help="'128x8 h100' (nodes x devices), '1024 h100', or an hjson file")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of devices, where --on names only the device")
    parser.add_argument("--network", metavar="SIZE", help="network of one device, one direction, a second, such as 50GB")
    parser.add_argument(
        "--overhead", metavar="SIZE", help="device memory that is no tensor, such as 3GiB; see `stateroom ledger calibrate`"
    )
    parser.add_argument("--seq", type=int, metavar="N", help="tokens of a sequence; default: the model's own")
    parser.add_argument("--batch", metavar="N", help="sequences of a step")
    parser.add_argument("--batch-tokens", metavar="N", help="tokens of a step, such as 4M")
    parser.add_argument("--attention", choices=("causal", "full", "none"), default="causal", help="how attention is counted in FLOPs")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the options of a layout."""
    group = parser.add_argument_group("layout")
    for name, text in (
        ("tp", "ranks that share a matrix"), ("pp", "pipeline stages"), ("vp", "chunks of layers a stage"), ("cp",
         "ranks that share a sequence"),
        ("ep", "ranks that share the experts"), ("dp-replicate", "copies of the sharded states"), ("zero", "ZeRO stage"),
        ("micro-batch", "sequences of one forward"), ("accumulation", "forwards of a step"), ("loss-chunks", "pieces of the loss"),
    ):  # fmt: skip
        group.add_argument(f"--{name}", type=int, metavar="N", help=text)
    group.add_argument("--recompute", choices=("none", "core", "selective", "full"), help="activations that are computed again")
    group.add_argument("--schedule", help="1f1b, gpipe, zb-h1, zb-h2, zb-v, v-half, v-min, dualpipe")
    add_dtypes(group)
    group.add_argument("--no-sequence-parallel", action="store_true", help="norms are whole on every tensor-parallel rank")
    group.add_argument("--no-flash", action="store_true", help="attention scores are kept")
    group.add_argument("--dropout", action="store_true", help="dropout masks are kept")


def add_dtypes(group: Any) -> None:
    """Add the options of dtypes and tiers."""
    for name, text in (
        ("param", "parameters"),
        ("grad", "accumulated gradients"),
        ("wire", "gradients on the wire"),
        ("compute", "matrix products"),
    ):
        group.add_argument(f"--{name}", metavar="DTYPE", help=f"dtype of {text}")
    for name in ("optimizer", "parameter"):
        group.add_argument(f"--{name}-tier", choices=("device", "cpu", "nvme"), help=f"where {name} states rest")


def shape_of(args: argparse.Namespace) -> ModelShape:
    """Return the model.

    Raises:
        LedgerError: none is named.
    """
    if args.model is None:
        raise LedgerError("name a model: --model llama3-70b, or a config.json; `stateroom ledger models` lists the built-in ones")
    return read_shape(args.model)


def cluster_of(args: argparse.Namespace) -> Cluster:
    """Return the cluster.

    Raises:
        LedgerError: none is named.
    """
    if args.on is None:
        raise LedgerError("name the hardware: --on '128x8 h100' (nodes x devices); `stateroom ledger hardware` lists what is known")
    changes: dict[str, Any] = {}
    if args.network is not None:
        changes["network_bytes_s"] = parse_bytes(args.network.removesuffix("/s"))
    if args.overhead is not None:
        changes["overhead_bytes"] = parse_bytes(args.overhead)
    return read_cluster(args.on, args.ranks, **changes)


def batch_of(args: argparse.Namespace, seq: int) -> tuple[int | None, list[str]]:
    """Return sequences of a step, or None when no batch is named, and a note where tokens were rounded.

    Raises:
        LedgerError: both ways of naming it, or less than one sequence.
    """
    if args.batch is not None and args.batch_tokens is not None:
        raise LedgerError("give --batch (sequences) or --batch-tokens, not both")
    if args.batch is not None:
        count = int(parse_count(args.batch))
        if count < 1:
            raise LedgerError(f"--batch {args.batch}: a step needs at least one sequence")
        return count, []
    if args.batch_tokens is None:
        return None, []
    wanted = parse_count(args.batch_tokens) / seq
    if wanted < 0.5:
        raise LedgerError(f"--batch-tokens {args.batch_tokens} is less than one sequence of {seq:,} tokens")
    power = 2 ** round(math.log2(wanted))
    count = power if abs(power / wanted - 1) <= _ROUND else max(1, round(wanted))
    return count, [f"a batch of {args.batch_tokens} tokens is taken as {count:,} sequences of {seq:,}: {count * seq:,} tokens"]


def layout_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the layout that options set."""
    names = ("tp", "pp", "vp", "cp", "ep", "dp_replicate", "zero", "micro_batch", "accumulation", "loss_chunks", "recompute",
        "schedule", "param",
             "grad", "wire", "compute", "optimizer_tier", "parameter_tier")  # fmt: skip
    found = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    if getattr(args, "no_sequence_parallel", False):
        found["sequence_parallel"] = False
    if getattr(args, "no_flash", False):
        found["flash"] = False
    if getattr(args, "dropout", False):
        found["dropout"] = True
    if found.get("param") == "fp32":
        found.setdefault("compute", "fp32")
    return found


def job_of(args: argparse.Namespace) -> tuple[Job, list[str]]:
    """Return the job that options describe, checked, and notes on what was chosen for it.

    Raises:
        LedgerError: something is missing, unknown, or does not fit.
    """
    shape, cluster = shape_of(args), cluster_of(args)
    seq = shape.context if args.seq is None else args.seq
    if seq < 1:
        raise LedgerError(f"--seq {seq}: a sequence needs at least 1 token")
    batch, notes = batch_of(args, seq)
    given = layout_fields(args)
    layout = Layout(**given)
    model = layout.tp * layout.pp * layout.cp
    if cluster.devices % (model * layout.dp_replicate):
        wanted = model * layout.dp_replicate
        legal = [number for number in range(1, min(cluster.devices, 4 * wanted) + 1) if cluster.devices % number == 0]
        near = sorted(sorted(legal, key=lambda number: (abs(number - wanted), number))[:2])
        raise LedgerError(
            f"{cluster.devices:,} devices do not divide by tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp-replicate "
            f"{layout.dp_replicate} = {wanted:,}; nearest products that divide: {' or '.join(f'{number:,}' for number in near)}"
        )
    dp = cluster.devices // model
    given["dp_shard"] = dp // layout.dp_replicate
    if batch is not None and "accumulation" not in given:
        each = dp * layout.micro_batch
        if batch % each:
            near = sorted({max(1, batch // each) * each, (batch // each + 1) * each})
            raise LedgerError(
                f"a batch of {batch:,} sequences does not divide by dp {dp:,} x micro-batch {layout.micro_batch} = {each:,}; "
                f"nearest: {' or '.join(f'{size:,}' for size in near)}"
            )
        given["accumulation"] = batch // each
    job = Job(shape, cluster, Layout(**given), seq, args.attention)
    check(job)
    return job, notes
