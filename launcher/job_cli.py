"""`stateroom job`: write the manifest with which a cluster starts the launcher on each of its nodes."""

from __future__ import annotations

import argparse
import sys

from .manifests import Task, kubernetes, torchx
from .options import natural, port, positive
from .problem import LaunchError

WRITERS = {"kubernetes": kubernetes, "torchx": torchx}


def main(argv: list[str]) -> int:
    """Print the manifest and return 0, or 2 when it cannot be written as asked."""
    args = _parser().parse_args(argv)
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        print("stateroom job: no script given; put it last, with its arguments", file=sys.stderr)
        return 2
    try:
        variables = tuple(_variable(text) for text in args.env)
        task = Task(
            name=args.name,
            image=args.image,
            command=tuple(words),
            num_nodes=args.num_nodes,
            num_ranks=args.num_gpus,
            is_module=args.module,
            devices=0 if args.cpu_only else args.num_gpus,
            device_kind=args.device_kind,
            cpu=args.cpu,
            memory=args.memory,
            port=args.master_port,
            max_restarts=args.max_restarts,
            min_nodes=args.min_elastic_nodes,
            namespace=args.namespace,
            env=variables,
        )
        print(WRITERS[args.format](task), end="")
    except LaunchError as problem:
        print(f"stateroom job: {problem}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stateroom job",
        description="Write a manifest that runs a script on the nodes of a cluster; nothing is sent anywhere.",
        epilog="example: stateroom job --format kubernetes --name llama --image registry/llama:1 --num_nodes 4 --num_gpus 8 "
        "train.py --config ds.json | kubectl apply -f -",
        allow_abbrev=False,
    )
    parser.add_argument("--format", choices=sorted(WRITERS), required=True, help="for what")
    parser.add_argument("--name", required=True, help="name of the job")
    parser.add_argument("--image", required=True, help="container image that has Stateroom and the script")
    parser.add_argument("--namespace", help="namespace of Kubernetes")
    parser.add_argument("--num_nodes", type=positive, default=1, metavar="N", help="nodes (default: 1)")
    parser.add_argument("--num_gpus", type=positive, default=1, metavar="N", help="ranks and accelerators on each node (default: 1)")
    parser.add_argument("--cpu_only", action="store_true", help="ask for no accelerators; ranks are processes")
    parser.add_argument("--device_kind", default="nvidia.com/gpu", help="the accelerators' name in Kubernetes (default: %(default)s)")
    parser.add_argument("--cpu", default="4", help="cores for each node (default: %(default)s)")
    parser.add_argument("--memory", default="16Gi", help="memory for each node (default: %(default)s)")
    parser.add_argument("--master_port", type=port, default=29500, metavar="P", help="port of the rendezvous (default: %(default)s)")
    parser.add_argument("--max_restarts", type=natural, default=0, metavar="N", help="restarts after a failure (default: 0)")
    parser.add_argument("--min_elastic_nodes", type=positive, metavar="N", help="go on with as few nodes as this")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable for every rank; may be repeated")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module name")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT …", help="the script and its arguments")
    return parser


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier() or not name.isascii():
        raise LaunchError(f"--env {text!r} is not NAME=VALUE")
    return name, value
