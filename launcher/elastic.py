"""One attempt on one host: PyTorch's elastic agent starts, watches and ends the ranks.

HostAgent extends torch's LocalElasticAgent where that knows too little for a job of many hosts: it gives ranks 30 s to
end when one has failed, which cannot be chosen; it numbers attempts per host; it waits for other hosts in C++, deaf to
signals. The methods overridden are those its documentation names for that, and _exit_barrier (torch 2.11 to 2.14).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousError

from ..environment import set_for_children
from ..parallel.accelerator import device_type
from .channel import Sender
from .control import Control, Stopped
from .cores import available_cores, share
from .failures import Failure
from .job import C10D, Order, rank_command
from .network import interface_towards
from .preflight import Listener
from .problem import LaunchError
from .rendezvous import FailedElsewhere, HostRendezvous
from .streams import Pump, RankStreams

VISIBLE_DEVICES = {"xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES", "hpu": "HABANA_VISIBLE_MODULES"}


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended on this host: "done", "failed" (a rank, see failures), "stopped" or "error" (see text)."""

    how: str
    failures: tuple[Failure, ...] = ()
    text: str = ""


class Failed(Exception):
    """A rank failed in an attempt that the launcher leads; what happens next is for the launcher to say."""


class HostAgent(LocalElasticAgent):
    """Torch's agent for the ranks of one host."""

    def __init__(
        self, spec: WorkerSpec, streams: RankStreams, order: Order, control: Control, pump: Pump | None, tell: Callable[..., None]
    ):
        super().__init__(spec, streams)
        self.failures: list[Failure] = []
        self._order, self._control, self._streams, self._pump, self._tell = order, control, streams, pump, tell
        self._meeting: HostRendezvous = spec.rdzv_handler  # type: ignore[assignment]
        self._deaths: dict[int, int] = {}  # local rank -> the host's clock, ns
        self._grace_s = order.job.fail_grace_s
        self._told_to_stop_ns: int | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # TORCHELASTIC_RESTART_COUNT is their difference: the attempt, alike on all hosts.
        self._remaining_restarts = worker_group.spec.max_restarts - self._meeting.attempt
        self._deaths, self.failures, self._told_to_stop_ns = {}, [], None
        pids = super()._start_workers(worker_group)
        self._streams.started()
        self._control.ranks_are(pids.values())
        if hasattr(os, "waitid"):
            for local_rank, pid in pids.items():
                threading.Thread(target=self._note_death, args=(self._deaths, local_rank, pid), daemon=True).start()
        ranks = {worker.global_rank: pids[worker.local_rank] for worker in worker_group.workers}
        world = worker_group.workers[0].world_size
        self._tell("started", ranks=ranks, world=world, attempt=self._meeting.attempt)
        return pids

    @staticmethod
    def _note_death(deaths: dict[int, int], local_rank: int, pid: int) -> None:
        """Note when a rank ended, to the millisecond, and leave it for the agent to reap."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            deaths[local_rank] = time.time_ns()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        handlers = self._pcontext.subprocess_handlers  # type: ignore[union-attr]
        codes = {local_rank: handler.proc.poll() for local_rank, handler in handlers.items()}
        exits = {local_rank: code for local_rank, code in codes.items() if code}
        if exits:
            self._told_to_stop_ns = time.time_ns()
            self.failures = self._read_failures(worker_group, exits)
            self._pcontext.close(signal.SIGTERM, timeout=self._grace_s)  # type: ignore[union-attr, arg-type]
            self.failures += self.failures_before_the_stop(exits)
            if self._order.led:
                raise Failed
            return super()._monitor_workers(worker_group)
        try:
            self._control.check()
            self._meeting.raise_if_failed()
        except Stopped as stop:
            self._grace_s, self._told_to_stop_ns = stop.grace_s, time.time_ns()
            raise
        except FailedElsewhere:
            self._told_to_stop_ns = time.time_ns()
            raise
        if None in codes.values():
            # Torch's own look would see a rank that has failed since ours, and end the others in 30 s, untold.
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def failures_before_the_stop(self, known: Collection[int] = ()) -> tuple[Failure, ...]:
        """Return the failures of ranks that had raised when the stop came, but had not yet ended: one may be the cause."""
        if self._pcontext is None or self._told_to_stop_ns is None:
            return ()
        files = self._pcontext.error_files
        exits = {local_rank: 1 for local_rank, path in files.items() if local_rank not in known and Path(path).exists()}
        found = self._read_failures(self._worker_group, exits)
        return tuple(failure for failure in found if failure.time_ns < self._told_to_stop_ns)

    def _read_failures(self, worker_group: WorkerGroup, exits: dict[int, int]) -> list[Failure]:
        """Return the failures of ranks that ended by themselves; those that are ended for it are none."""
        found = []
        for local_rank, code in exits.items():
            rank = worker_group.workers[local_rank].global_rank
            text, extra = _recorded(Path(self._pcontext.error_files[local_rank]))  # type: ignore[union-attr]
            moment = int(extra.get("time_ns") or self._deaths.get(local_rank) or time.time_ns())
            trace = str(extra.get("py_callstack", ""))
            if self._pump:
                self._pump.log(rank, trace)
            tail = self._pump.tail(rank) if self._pump else ()
            found.append(Failure(rank, self._order.host, code, moment, text, trace, tail))
        return found

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._tell("again", failures=[failure.to_json() for failure in self.failures])
        super()._restart_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        super()._shutdown(signal.SIGTERM, self._grace_s)  # type: ignore[arg-type]

    def _exit_barrier(self) -> None:
        """Wait for the other hosts, so that the first one's store outlives their ranks; the launcher does, where it leads."""
        if not self._order.led:
            self._meeting.wait_for_all(self._worker_group.group_world_size or 1)


def run_attempt(order: Order, control: Control, sender: Sender, listener: Listener, env: Mapping[str, str]) -> Outcome:
    """Run the ranks of one host to their end, and leave no process of theirs behind unless all ended well.

    `env` is the environment that this agent was started with: what an earlier attempt set is not to be built upon.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says of a failure the launcher says
    try:
        num_ranks, note = _prepare(order, env)
    except LaunchError as problem:
        return Outcome("error", text=str(problem))
    if order.max_nodes == 1:
        sender.send("say", text=note)
    job = order.job
    raw = job.log_dir is None and (job.raw == "always" or (job.raw == "single" and num_ranks == 1))
    log_dir = Path(job.cwd, job.log_dir) if job.log_dir else None
    with tempfile.TemporaryDirectory(prefix="stateroom-launcher-") as folder:
        pump = None if raw else Pump(sender, job.quiet_ranks, log_dir, "ab" if order.attempt else "wb")
        if pump:
            pump.start()
        try:
            return _run(order, num_ranks, control, sender, listener, RankStreams(Path(folder), pump), pump)
        finally:
            if pump:
                pump.close()


def _run(
    order: Order, num_ranks: int, control: Control, sender: Sender, listener: Listener, streams: RankStreams, pump: Pump | None
) -> Outcome:
    meeting = agent = None
    try:
        meeting = HostRendezvous(order, listener, control)
        agent = HostAgent(_spec(order, num_ranks, meeting), streams, order, control, pump, sender.send)
        result = agent.run()
        outcome = Outcome("failed", tuple(agent.failures)) if result.is_failed() else Outcome("done")
    except Failed:
        assert agent is not None
        outcome = Outcome("failed", tuple(agent.failures))
    except (Stopped, FailedElsewhere) as stop:
        outcome = Outcome("stopped", agent.failures_before_the_stop() if agent else (), str(stop))
        if isinstance(stop, FailedElsewhere) and meeting:
            meeting.leave()
    except (LaunchError, RendezvousError, DistError, OSError) as problem:
        outcome = Outcome("error", text=f"{problem}" if isinstance(problem, LaunchError) else f"{type(problem).__name__}: {problem}")
    finally:
        streams.started()  # closes pipes of ranks that never came to be
    if outcome.how != "done":
        control.signal_ranks(signal.SIGKILL)  # what ranks have started and left in their groups
    if meeting is not None and not order.led and outcome.how != "stopped":
        if outcome.how != "done":
            ranks = ", ".join(f"rank {failure.rank}" for failure in outcome.failures) or "a rank"
            meeting.announce_failure(outcome.text or f"{ranks} on {order.host}")
        meeting.leave()
    if meeting is not None:
        meeting.end()
    return outcome


def _spec(order: Order, num_ranks: int, meeting: HostRendezvous) -> WorkerSpec:
    job = order.job
    cores = (job.bind_cores or available_cores()) if job.bind else ()
    entry, *args = rank_command(job, os.getpid(), cores)
    return WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        entrypoint=entry,
        args=tuple(args),
        rdzv_handler=meeting,
        max_restarts=job.max_restarts,
        monitor_interval=0.1,
        local_addr=order.address,
    )


def _prepare(order: Order, env: Mapping[str, str]) -> tuple[int, str]:
    """Set what the ranks inherit from us; return how many they are, and a sentence about it.

    Raises:
        LaunchError: the host has too few accelerators or cores.
    """
    job = order.job
    for name, value in job.env.items():
        set_for_children(name, value)
    # Torch's own handlers would turn a SIGTERM into an exception wherever the agent is; ours are asked.
    set_for_children("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGQUIT")
    if order.kind == C10D:
        # Torch's handler would open a store of its own, at the host's label; see rendezvous.py.
        set_for_children("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    devices = 0 if device_type() == "cpu" else torch.accelerator.device_count()
    num_ranks = order.num_ranks or max(1, devices)
    if devices and num_ranks > devices:
        raise LaunchError(f"{num_ranks} ranks were asked for, but {order.host} has {devices} accelerators; ask for at most {devices}")
    if order.slots is not None:
        _show_devices(order.slots, {**env, **job.env})
    if job.bind:
        share(job.bind_cores or available_cores(), 0, num_ranks)
    threads = job.env.get("OMP_NUM_THREADS") or env.get("OMP_NUM_THREADS")
    if threads is None:
        threads = str(max(1, len(available_cores()) // num_ranks))
        set_for_children("OMP_NUM_THREADS", threads)
    if order.max_nodes > 1 and "GLOO_SOCKET_IFNAME" not in {**env, **job.env}:
        # Gloo would take the address that the host's own name stands for, which often is a loopback's.
        interface = interface_towards(order.address)
        if interface:
            set_for_children("GLOO_SOCKET_IFNAME", interface)
    kind = f"{devices} accelerators" if devices else "no accelerator, so ranks are processes on the CPU"
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    where = order.host if job.raw == "never" else "this host"
    return num_ranks, f"{ranks} on {where} ({kind}), OMP_NUM_THREADS={threads}"


def _show_devices(slots: tuple[int, ...], env: Mapping[str, str]) -> None:
    """Let the ranks see the accelerators of these slots only; slots count among those that we see ourselves."""
    name = VISIBLE_DEVICES.get(device_type(), "CUDA_VISIBLE_DEVICES")
    seen = [word for word in env.get(name, "").split(",") if word]
    if seen and max(slots) >= len(seen):
        raise LaunchError(f"slot {max(slots)} was asked for, but {name}={','.join(seen)} shows {len(seen)} devices")
    set_for_children(name, ",".join(seen[slot] if seen else str(slot) for slot in slots))


def _recorded(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the message and the details that a rank left in its file, empty where it left none or was ended while writing."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return "", {}
    message = data.get("message") if isinstance(data, dict) else None
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        return str(message.get("message", "")), extra if isinstance(extra, dict) else {}
    return str(message or ""), {}
