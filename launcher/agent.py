"""What the launcher starts on each host: says what the host has, waits for orders, runs attempts, tells how they ended."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..environment import inherited, set_for_children, unset_for_children
from .channel import Sender
from .control import Control
from .job import Order, orders_from_text
from .network import own_address
from .preflight import Listener, facts
from .problem import LaunchError

if TYPE_CHECKING:
    from .elastic import Outcome

CHECKS = ("file", "module", "program")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one host until the launcher says that all is over, and return the exit status."""
    options = _parse(argv)
    env = inherited()
    reading, writing = _descriptors(options.channel)
    orders = orders_from_text(options.orders) if options.orders else None
    node = _node(options.node, [order.host for order in orders or ()], env)
    sender = Sender(writing, node)
    control = Control(sender)
    control.handle_signals()
    if orders:
        if options.lifeline:
            control.listen(reading)
        return _serve_alone(orders[node], control, sender, env)
    control.listen(reading)
    return _serve(options, control, sender, env)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stateroom.launcher.agent", description=__doc__, allow_abbrev=False)
    parser.add_argument("--node", required=True, help="this host's place in the list, or `match`: find it out")
    parser.add_argument("--channel", default="stdio", help="stdio, or R,W: descriptors to read orders from and to write to")
    parser.add_argument("--orders", help="what each host is to run, where nobody can be asked later")
    parser.add_argument("--lifeline", action="store_true", help="end when standard input does")
    parser.add_argument("--cwd", help="the folder to work in")
    parser.add_argument("--port", type=int, default=0, help="the port to keep for the rendezvous (default: a free one)")
    parser.add_argument("--only_here", action="store_true", help="keep that port on the loopback address")
    for kind in CHECKS:
        parser.add_argument(f"--check_{kind}", metavar="NAME", help=f"a {kind} that has to be there")
    return parser.parse_args(argv)


def _descriptors(channel: str) -> tuple[int, int]:
    """Return where orders come from and where messages go; whatever else prints here goes to standard error."""
    if channel != "stdio":
        given = channel.split(",")
        return int(given[0]), int(given[1])
    reading, writing = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return reading, writing


def _node(text: str, hosts: Sequence[str], env: Mapping[str, str]) -> int:
    """Return this host's place: as told, as a scheduler numbered it, or where an address of this machine is listed.

    Raises:
        LaunchError: none of these says which host this is.
    """
    if text.isdecimal():
        return int(text)
    for name in ("SLURM_NODEID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
        if env.get(name, "").isdecimal() and int(env[name]) < len(hosts):
            return int(env[name])
    from .plan import is_this_host

    found = [place for place, host in enumerate(hosts) if is_this_host(host)]
    if len(found) != 1:
        raise LaunchError(f"cannot tell which of the hosts {', '.join(hosts[:8])} this one is; use addresses in the hostfile")
    return found[0]


def _serve(options: argparse.Namespace, control: Control, sender: Sender, env: Mapping[str, str]) -> int:
    """Tell what this host has, and run what the launcher orders."""
    listener = Listener(options.port, options.only_here)
    check = next(((kind, name) for kind in CHECKS if (name := getattr(options, f"check_{kind}"))), None)
    has = facts(options.cwd, check, listener)
    sender.send("hello", facts={**has, "address": own_address(env)})
    if not has["lacks"] and has["torch"]:
        if options.cwd:
            os.chdir(options.cwd)
        _load(sender, env)
    while (message := control.orders.get()) is not None:
        order = Order.from_json(message["order"])
        control.grace_s = min(order.job.grace_s, 10.0)
        if message["watch"]:
            control.silence_s = order.job.silence_s
        outcome = _attempt(order, control, sender, listener, env)
        listener.close()
        listener = Listener(0, options.only_here)
        sender.send("ended", **_described(outcome), port=listener.port)
    return 0


def _serve_alone(order: Order, control: Control, sender: Sender, env: Mapping[str, str]) -> int:
    """Run the one order that was given on the command line, and return its status, for whoever started us."""
    listener = Listener(order.port if order.node == 0 else 0)
    check = "program" if order.job.is_program else "module" if order.job.is_module else "file"
    has = facts(order.job.cwd, (check, order.job.script), listener)
    if has["lacks"]:
        sender.send("ended", how="error", failures=[], text="; ".join(has["lacks"]), port=0)
        return 2
    os.chdir(order.job.cwd)
    control.grace_s = order.job.grace_s
    outcome = _attempt(order, control, sender, listener, env)
    sender.send("ended", **_described(outcome), port=0)
    if outcome.how == "failed":
        return outcome.failures[0].status if outcome.failures else 1
    return {"done": 0, "stopped": 143}.get(outcome.how, 1)


def _load(sender: Sender, env: Mapping[str, str]) -> None:
    """Import torch while the launcher waits for other hosts."""
    quiet = "TORCH_CPP_LOG_LEVEL" not in env
    try:
        # Its store warns of every address that has no name; it reads the level when it is loaded.
        if quiet:
            set_for_children("TORCH_CPP_LOG_LEVEL", "ERROR")
        from . import elastic  # noqa: F401
    except Exception as error:
        sender.send("ended", how="error", failures=[], text=f"torch cannot be imported: {type(error).__name__}: {error}", port=0)
    finally:
        if quiet:
            unset_for_children("TORCH_CPP_LOG_LEVEL")


def _attempt(order: Order, control: Control, sender: Sender, listener: Listener, env: Mapping[str, str]) -> Outcome:
    from .elastic import run_attempt

    with control.attempt():
        return run_attempt(order, control, sender, listener, env)


def _described(outcome: Outcome) -> dict[str, object]:
    return {"how": outcome.how, "failures": [failure.to_json() for failure in outcome.failures], "text": outcome.text}


if __name__ == "__main__":
    try:
        status = main()
    except LaunchError as problem:
        print(f"stateroom agent: {problem}", file=sys.stderr)
        status = 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads that wait for a launcher, and torch's own, are not worth waiting for
