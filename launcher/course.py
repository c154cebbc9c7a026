"""The course of a job, apart from processes and clocks: what has happened goes in, what to do comes out.

Contact: every host says what it has. Run: one attempt. Stop: the attempt is over, its ranks are being ended. Then
either the next attempt begins with the hosts that are left, or the job is over.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from . import failures as reports
from . import preflight
from .failures import Failure
from .job import Order
from .network import is_loopback
from .plan import Plan

CONTACT_S = 60.0
SLACK_S = 8.0  # beyond the grace, for a host to say that its ranks are ended


class Stage(enum.Enum):
    """Where a job is."""

    CONTACT = "contact"
    RUN = "run"
    STOP = "stop"
    OVER = "over"


class HostState(enum.Enum):
    """What is known of a host's agent."""

    CALLED = "called"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    GONE = "gone"


@dataclass
class _Host:
    name: str
    order: Order
    state: HostState = HostState.CALLED
    facts: dict[str, Any] | None = None
    why: str = ""
    clock_offset_s: float = 0.0


@dataclass(frozen=True)
class Send:
    """Send this message to the agent of a host."""

    place: int
    kind: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Drop:
    """End what connects to a host, at once."""

    place: int


@dataclass(frozen=True)
class Say:
    """Tell the user."""

    text: str


Action = Send | Drop | Say


@dataclass
class Course:
    """One job. Methods take what happened, with the time in seconds, and return what is to be done for it."""

    plan: Plan
    stage: Stage = Stage.CONTACT
    status: int = 0
    hosts: list[_Host] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with every host called."""
        self.hosts = [_Host(host.name, order) for host, order in zip(self.plan.hosts, self.plan.orders, strict=True)]
        self._job = self.plan.orders[0].job
        self._watch = self.plan.runner.name == "ssh"
        self._needed = min(self.plan.min_nodes, len(self.hosts))  # of those that this launcher starts
        self._attempt = 0
        self._active: list[int] = []
        self._failures: list[Failure] = []
        self._lost: list[str] = []
        self._elsewhere: list[str] = []  # what hosts say that were stopped by another, which is not always ours to see
        self._world = 0
        self._deadline: float | None = None
        self._user_signal: int | None = None
        if not self.plan.runner.leads:  # the agents have begun by themselves, and only speak
            self.stage, self._deadline, self._active = Stage.RUN, float("inf"), list(range(len(self.hosts)))
            for host in self.hosts:
                host.state = HostState.RUNNING

    def tick(self, now: float) -> list[Action]:
        """Heed deadlines."""
        if self._deadline is None:
            self._deadline = now + max(CONTACT_S, self._job.silence_s)
        if now < self._deadline:
            return []
        self._deadline = float("inf")
        if self.stage is Stage.CONTACT:
            late = [place for place, host in enumerate(self.hosts) if host.state is HostState.CALLED]
            return [action for place in late for action in self.gone(place, "no answer in time", now)]
        if self.stage is Stage.STOP:
            late = [place for place in self._active if self.hosts[place].state is HostState.RUNNING]
            return [action for place in late for action in self.gone(place, "its ranks did not end in time", now)]
        return []

    def hello(self, place: int, facts: dict[str, Any], clock_offset_s: float, now: float) -> list[Action]:
        """A host has answered."""
        host = self.hosts[place]
        host.facts, host.clock_offset_s = facts, clock_offset_s
        if host.state is HostState.CALLED:
            host.state = HostState.READY
        return self._all_answered(now)

    def started(self, world: int, attempt: int) -> list[Action]:
        """A host's ranks run."""
        first = self._world != world or attempt != self._attempt
        self._world, self._attempt = world, attempt
        return [Say(self._numbers())] if first and len(self._active) > 1 else []

    def again(self, place: int, failures: Sequence[Failure]) -> list[Action]:
        """The agents start the ranks again by themselves."""
        if not failures:
            return []
        return [*self._failed(failures), Say(f"{self.hosts[place].name}: the ranks are started again")]

    def ended(self, place: int, how: str, failures: Sequence[Failure], text: str, port: int, now: float) -> list[Action]:
        """A host's attempt is over."""
        host = self.hosts[place]
        if host.state is not HostState.RUNNING:
            # It could not even load what it needs; nothing had begun there.
            return self.gone(place, text, now)
        host.state = HostState.DONE if how == "done" else HostState.READY
        if host.facts is not None:
            host.facts["port"] = port
        # Clocks of hosts differ; failures are put in order by ours.
        shift = int(host.clock_offset_s * 1e9)
        self._failures += [replace(failure, time_ns=failure.time_ns - shift) for failure in failures]
        if how == "error":
            self._lost.append(f"{host.name}: {text}")
        elif how == "stopped" and self.stage is Stage.RUN:
            self._elsewhere.append(f"{host.name}: {text}")
        if self.stage is Stage.RUN and how != "done":
            return self._stop(self._job.fail_grace_s, "the attempt failed", now)
        return self._all_ended(now)

    def gone(self, place: int, why: str, now: float) -> list[Action]:
        """A host's agent is out of reach for good."""
        host = self.hosts[place]
        before, host.state, host.why = host.state, HostState.GONE, why
        actions: list[Action] = [Drop(place)]
        if before is HostState.GONE or self.stage is Stage.OVER:
            return actions
        if self.stage is Stage.CONTACT:
            return actions + self._all_answered(now)
        if place not in self._active or before is HostState.DONE:
            return actions + ([] if before is HostState.DONE else [Say(f"spare host {host.name} is gone: {why}")])
        self._lost.append(f"{host.name}: {why}")
        if self.stage is Stage.RUN and (self.plan.orders[0].led or self._needed == len(self.hosts)):
            return actions + self._stop(self._job.fail_grace_s, f"host {host.name} is lost", now)
        return actions + self._all_ended(now)

    def user_signal(self, number: int, name: str, now: float) -> list[Action]:
        """The user wants the job to end; wanting it twice means at once."""
        if self._user_signal is not None:
            self._deadline = now + SLACK_S
            return [Say(f"{name} again: ranks are killed"), *self._tell_active("stop", why=name, grace_s=0.0)]
        self._user_signal = number
        if self.stage is Stage.CONTACT:
            return [Say(f"{name} received before anything started"), *self._finish(128 + number)]
        wait = f"SIGKILL follows in {self._job.grace_s:.0f} s, or with another {name}"
        return [Say(f"{name} received: ranks get SIGTERM; {wait}"), *self._stop(self._job.grace_s, name, now)]

    def pass_signal(self, number: int) -> list[Action]:
        """A signal that means something to the script."""
        return self._tell_active("signal", number=number)

    @property
    def running(self) -> list[int]:
        """Return the places of hosts from which signs of life are due."""
        return [place for place, host in enumerate(self.hosts) if host.state in (HostState.RUNNING, HostState.READY)]

    def _all_answered(self, now: float) -> list[Action]:
        if self.stage is not Stage.CONTACT or any(host.state is HostState.CALLED for host in self.hosts):
            return []
        found = preflight.problems([(h.name, h.facts) for h in self.hosts], {h.name: h.clock_offset_s for h in self.hosts})
        for host in self.hosts:
            if host.state is HostState.GONE:
                found.setdefault(host.name, []).insert(0, host.why)
        actions: list[Action] = [Say(f"{name}: {line}") for name, lines in found.items() for line in lines]
        can_start = [h for h in self.hosts if h.state is HostState.READY and (h.name not in found or not self.plan.preflight)]
        if len(can_start) < self._needed:
            what = f"{len(found)} of {len(self.hosts)} hosts cannot take part (above), nothing was started"
            return [*actions, Say(what if len(self.hosts) > 1 else "nothing was started"), *self._finish(2)]
        for place, host in enumerate(self.hosts):
            if host not in can_start and host.state is HostState.READY:
                host.state = HostState.GONE
                actions.append(Drop(place))
        return actions + self._begin(now)

    def _begin(self, now: float) -> list[Action]:
        """Order the next attempt on the hosts that are there, in the list's order; what exceeds the maximum is spare."""
        there = [place for place, host in enumerate(self.hosts) if host.state in (HostState.READY, HostState.DONE)]
        self._active = there[: self.plan.max_nodes]
        self._failures, self._lost, self._elsewhere, self._world = [], [], [], 0
        self.stage, self._deadline = Stage.RUN, float("inf")
        first = self.hosts[self._active[0]]
        assert first.facts is not None
        address, problem = self._address(first)
        if problem:
            return [Say(problem), *self._finish(2)]
        orders = [(place, self.hosts[place].order) for place in self._active]
        strangers = not orders[0][1].led
        actions: list[Action] = []
        for node, (place, order) in enumerate(orders):
            if not strangers:
                run_id = f"{order.run_id}.{self._attempt}"
                size, port = len(orders), first.facts["port"]
                order = replace(order, node=node, address=address, port=port, run_id=run_id, min_nodes=size, max_nodes=size)
            self.hosts[place].state = HostState.RUNNING
            order = replace(order, attempt=self._attempt)
            actions.append(Send(place, "start", {"order": order.to_json(), "watch": self._watch}))
        if len(self.hosts) > 1:
            names = ", ".join(self.hosts[place].name for place in self._active[:16])
            more = f" and {len(self._active) - 16} more" if len(self._active) > 16 else ""
            actions.insert(0, Say(f"{len(self._active)} hosts: {names}{more}; they meet at {address}:{first.facts['port']}"))
        return actions

    def _address(self, first: _Host) -> tuple[str, str]:
        """Return where the first host is for the others, and what is wrong with that."""
        assert first.facts is not None
        if not first.order.led or (len(self.hosts) == 1 and not self._watch):
            return first.order.address, ""
        chosen = self.plan.master_addr if first is self.hosts[0] else None
        address = chosen or first.facts["address"]
        if len(self._active) > 1 and is_loopback(address) and not chosen:
            return address, f"{first.name} has no address that other hosts can reach ({address}); give one with --master_addr"
        return address, ""

    def _stop(self, grace_s: float, why: str, now: float) -> list[Action]:
        self.stage, self._deadline = Stage.STOP, now + grace_s + SLACK_S
        return [*self._tell_active("stop", why=why, grace_s=grace_s), *self._all_ended(now)]

    def _all_ended(self, now: float) -> list[Action]:
        if self.stage is Stage.OVER or any(self.hosts[place].state is HostState.RUNNING for place in self._active):
            return []
        done = sum(self.hosts[place].state is HostState.DONE for place in self._active)
        if self.stage is Stage.RUN and done >= self._needed:
            return self._finish(0)
        if self._user_signal is not None:
            return [Say("all ranks were ended"), *self._finish(128 + self._user_signal)]
        actions, status = self._report()
        left = [host for host in self.hosts if host.state in (HostState.READY, HostState.DONE)]
        restarts = self._job.max_restarts if self.plan.orders[0].led else 0
        if self._attempt >= restarts:
            return [*actions, *self._finish(status)]
        if len(left) < self._needed:
            how = "" if self._needed < len(self.hosts) else "; --elastic_training would go on with those that are left"
            return [Say(f"no restart: {len(left)} hosts are left, {self._needed} are needed{how}"), *actions, *self._finish(status)]
        self._attempt += 1
        return [*actions, Say(f"restart {self._attempt} of {restarts}"), *self._begin(now)]

    def _report(self) -> tuple[list[Action], int]:
        """Return what to say about the attempt that failed, and its exit status."""
        said: list[Action] = [Say(line) for line in self._lost or ([] if self._failures else self._elsewhere)]
        if self._failures and not (self._lost and reports.first(self._failures).is_echo):
            return [*said, *self._failed(self._failures)], reports.first(self._failures).status
        if self._failures:
            echo = reports.first(self._failures)
            said.insert(0, Say(f"rank {echo.rank} on {echo.host} ended with {echo.what()} for it: {echo.message[:160]}"))
        return said, 1

    def _failed(self, failures: Sequence[Failure]) -> list[Action]:
        return [*(Say(line) for line in reports.echoes(failures)), Say(reports.render(failures, self._world))]

    def _finish(self, status: int) -> list[Action]:
        self.stage, self.status = Stage.OVER, status
        return [Send(place, "quit", {}) for place, host in enumerate(self.hosts) if host.state is not HostState.GONE]

    def _tell_active(self, kind: str, **fields: Any) -> list[Action]:
        return [Send(place, kind, fields) for place in self._active if self.hosts[place].state is HostState.RUNNING]

    def _numbers(self) -> str:
        return f"{self._world} ranks on {len(self._active)} hosts"
