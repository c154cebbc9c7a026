"""What a host is told to run: the same for all hosts (Job), and its own part in one attempt (Order)."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

# Hosts know each other from the launcher, or find each other by PyTorch's c10d rendezvous.
FIXED, C10D = "static", "c10d"

# When a rank's streams stay those of its agent, the terminal's, without tags.
Raw = Literal["never", "single", "always"]


@dataclass(frozen=True)
class Job:
    """What runs, alike on every host. Times are in seconds."""

    script: str
    script_args: tuple[str, ...] = ()
    is_module: bool = False
    is_program: bool = False  # run as it is, without Python
    python: str = ""
    cwd: str = ""
    env: dict[str, str] = field(default_factory=dict)
    pass_local_rank: bool = False
    raw: Raw = "never"
    quiet_ranks: bool = False
    log_dir: str | None = None
    bind: bool = False
    bind_cores: tuple[int, ...] = ()
    grace_s: float = 30.0  # from SIGTERM to SIGKILL when the user ends the job
    fail_grace_s: float = 3.0  # the same when a rank failed, and nothing is left to save but time
    silence_s: float = 30.0  # without a sign of life for so long, the other end counts as lost
    max_restarts: int = 0


@dataclass(frozen=True)
class Order:
    """One host's part in one attempt.

    address and port are where node 0 keeps the store; num_ranks 0 means one for each accelerator. With kind FIXED the
    hosts are `max_nodes` in number and `node` is this one's place; with C10D they find each other, at least `min_nodes`.
    When the launcher leads (`led`), an attempt that fails is over and the launcher orders the next; else the agents
    start again by themselves, up to the job's max_restarts.
    """

    job: Job
    host: str
    node: int
    slots: tuple[int, ...] | None
    num_ranks: int
    address: str
    port: int
    min_nodes: int
    max_nodes: int
    run_id: str
    kind: str = FIXED
    attempt: int = 0

    led: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Order:
        """Return the order that to_json described."""
        raw = dict(values["job"])
        job = Job(**{**raw, "script_args": tuple(raw["script_args"]), "bind_cores": tuple(raw["bind_cores"])})
        slots = values["slots"]
        return cls(**{**values, "job": job, "slots": None if slots is None else tuple(slots)})

    def without_environment(self) -> Order:
        """Return the order for a host that gets the variables some other way."""
        return replace(self, job=replace(self.job, env={}))


def orders_to_text(orders: Sequence[Order]) -> str:
    """Return the orders of one attempt as one word that no shell and no pdsh changes; the first stands for what is alike."""
    parts = [[order.host, order.slots, order.num_ranks] for order in orders]
    packed = json.dumps({"base": orders[0].to_json(), "parts": parts}, separators=(",", ":"))
    return base64.urlsafe_b64encode(packed.encode()).decode()


def orders_from_text(text: str) -> list[Order]:
    """Return the orders that orders_to_text wrote."""
    packed = json.loads(base64.urlsafe_b64decode(text))
    base = Order.from_json(packed["base"])
    return [
        replace(base, node=node, host=host, slots=None if slots is None else tuple(slots), num_ranks=num_ranks)
        for node, (host, slots, num_ranks) in enumerate(packed["parts"])
    ]


def rank_command(job: Job, agent_pid: int | None = None, cores: tuple[int, ...] = ()) -> list[str]:
    """Return the command line of each rank on a host."""
    if job.is_program:
        return [job.script, *job.script_args]
    options = ["--parent", str(agent_pid)] if agent_pid else []
    if cores:
        options += ["--cores", ",".join(map(str, cores))]
    if job.pass_local_rank:
        options.append("--local_rank")
    module = ["-m"] if job.is_module else []
    return [job.python, "-u", "-m", "stateroom.launcher.child", *options, *module, job.script, *job.script_args]
