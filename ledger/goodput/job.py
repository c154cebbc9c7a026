"""What a run of a job costs beyond its steps: checkpoints, interruptions, device-hours and money."""

from __future__ import annotations

from dataclasses import dataclass

from ..account import Account, account
from ..job import Job
from ..problems import LedgerError
from ..shapes.count import count_parameters
from ..units import GIB, HOUR_S
from .failures import mtbf_from_node_rate
from .interval import daly_interval, exact_goodput, goodput_account, optimal_interval, young_interval
from .storage import checkpoint_bytes_of, transfer_seconds

# failures per 1,000 node-days: what was fitted on jobs of a large research cluster (arXiv:2410.21680, RSC-1)
NODE_RATE = 6.5
RESTART_S = 600.0
COPY_SHARE = 0.8


@dataclass(frozen=True)
class Recovery:
    """Checkpoints and interruptions of a job; times in seconds.

    Attributes:
        stall_s: how long a checkpoint stops training: the copy to the host when it is written beside training, else the write.
    """

    checkpoint: Account
    write_s: float
    stall_s: float
    mtbf_s: float
    restart_s: float
    young_s: float
    daly_s: float
    optimal_s: float
    shares: Account

    @property
    def goodput(self) -> float:
        """Share of the time that trains, at the optimal interval, by the exact expectation."""
        return exact_goodput(self.optimal_s, self.stall_s, self.mtbf_s, self.restart_s)


def recovery_of(
    job: Job, *, node_rate: float = NODE_RATE, mtbf_s: float | None = None, restart_s: float = RESTART_S,
        storage_bytes_s: float | None = None,
    asynchronous: bool = True,
) -> Recovery:  # fmt: skip
    """Return checkpoint sizes and intervals and the effective training time of a job.

    Args:
        node_rate: failures per 1,000 node-days, unless `mtbf_s` of the whole job is given.
        storage_bytes_s: of the shared file system; by default 1 GiB/s a node.
        asynchronous: the write runs beside training, and only the copy to the host stops it.
    """
    sizes, layout = job.layout.sizes, job.layout
    params = count_parameters(job.shape).total
    checkpoint = account(
        f"checkpoint of {job.shape.name}",
        "bytes",
        [
            ("parameters", params * sizes.param, f"{sizes.param:g} bytes each"),
            ("master weights", params * sizes.master, f"{sizes.master:g} bytes each"),
            ("optimizer states", params * (sizes.first + sizes.second), f"{sizes.first + sizes.second:g} bytes each"),
        ],
    )
    total = checkpoint_bytes_of(params, sizes)
    speed = storage_bytes_s or job.cluster.storage_bytes_s or GIB * job.cluster.nodes
    write = transfer_seconds(total, speed)
    host = job.cluster.accelerator.host_bytes_s
    writers = layout.tp * layout.pp * layout.shard_world
    copy = write if host is None else transfer_seconds(total / writers, COPY_SHARE * host)
    stall = min(write, copy) if asynchronous else write
    mtbf = mtbf_from_node_rate(job.cluster.devices, node_rate, job.cluster.per_node) if mtbf_s is None else mtbf_s
    best = max(optimal_interval(stall, mtbf), write)  # one checkpoint is written before the next begins
    shares = goodput_account(best, stall, mtbf, restart_s)
    return Recovery(checkpoint, write, stall, mtbf, restart_s, young_interval(stall, mtbf), daly_interval(stall, mtbf), best, shares)


def cost_of(job: Job, step_s: float, tokens: float, goodput: float = 1.0, price: float | None = None) -> Account:
    """Return device-hours of a run of `tokens` tokens: the steps, and what interruptions add.

    Args:
        price: USD a device and hour; that of the cluster or the hardware table by default.

    Raises:
        LedgerError: a goodput that is not above 0.
    """
    if goodput <= 0:
        raise LedgerError("no time is left for training: the mean time between failures is below a restart and a checkpoint")
    steps = tokens / job.tokens
    hours = steps * step_s * job.cluster.devices / HOUR_S
    each = job.cluster.price() if price is None else price
    days = steps * step_s / goodput / 86400
    return account(
        f"device-hours for {tokens:,.0f} tokens",
        "device-hours",
        [
            ("steps", hours, f"{steps:,.0f} steps of {step_s:.4g} s on {job.cluster.devices:,} devices"),
            ("interruptions and checkpoints", hours / goodput - hours, f"effective training time {100 * goodput:.1f} %"),
        ],
        days=f"{days:.3g}",
        price="not known; give --price" if each is None else f"{each:g} USD a device-hour",
        cost="not known" if each is None else f"{each * hours / goodput:,.0f} USD",
    )
