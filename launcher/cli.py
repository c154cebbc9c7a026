"""The `launcher` command: what is asked for, what would run, and then the run; no torch is imported here."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence

from ..environment import inherited
from .job import rank_command
from .options import parse, refuse
from .plan import Plan, make_plan
from .problem import LaunchError
from .runners import Command


def main(argv: Sequence[str] | None = None) -> int:
    """Start the job that the command line describes and return its exit status."""
    request = parse(sys.argv[1:] if argv is None else list(argv))
    env = inherited()
    try:
        plan = make_plan(request, env)
        commands = plan.runner.commands(plan.hosts, plan.orders)
    except LaunchError as problem:
        return refuse(str(problem))
    if request.dry_run:
        print(describe(plan, commands))
        return 0
    if plan.runner.program and shutil.which(plan.runner.program) is None:
        return refuse(f"--launcher {plan.runner.name} needs the program {plan.runner.program}, which is not on the PATH")
    from .driver import drive

    return drive(plan, commands, env, request.save_pid)


def describe(plan: Plan, commands: Sequence[Command]) -> str:
    """Return what would run on each host, as text; variables that go along are named without their values."""
    job = plan.orders[0].job
    lines = [f"# {note}" for note in plan.notes]
    for command in commands:
        names = ",".join(plan.hosts[place].name for place in command.places)
        lines.append(f"{names}: {shlex.join(command.argv)}")
    begin = plan.orders[0].node
    for host, order in zip(plan.hosts, plan.orders, strict=True):
        slots = f", slots {','.join(map(str, order.slots))}" if order.slots is not None else ""
        count = f"{order.num_ranks} ranks" if order.num_ranks != 1 else "1 rank"
        lines.append(f"# {host.name}: {count if order.num_ranks else 'a rank for each accelerator'}{slots}")
    port = plan.orders[0].port or "a free port"
    lines += [
        f"# each rank: {shlex.join(rank_command(job))}",
        f"# in: {job.cwd}",
        f"# variables: {', '.join(sorted(job.env)) or 'none'}",
        f"# hosts: {plan.min_nodes} to {plan.max_nodes}, the first is node {begin}; restarts: {job.max_restarts}; "
        f"rendezvous: {plan.orders[0].kind} at {plan.orders[0].address or plan.master_addr or 'the first host'}, {port}",
    ]
    return "\n".join(lines)
