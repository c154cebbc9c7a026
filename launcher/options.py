"""The launcher's command line: its options in groups, and the request that they make."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAUNCHERS = ("auto", "local", "ssh", "pdsh", "slurm", "openmpi", "mpich", "kubernetes")

EXAMPLES = """\
examples:
  launcher --num_gpus 2 train.py --config ds.json       two ranks on this host
  launcher train.py                                     one rank for each accelerator, or a single one without any
  launcher --num_gpus 4 -m mypackage.train --lr 1e-3    a module instead of a file
  launcher --hostfile hosts train.py                    all slots of all hosts, over ssh
  launcher --hostfile hosts -i worker-1@worker-2:0,2 --dry_run train.py
                                                        what would run where
  launcher --hostfile hosts --max_restarts 3 --elastic_training --min_elastic_nodes 2 train.py
                                                        goes on with the hosts that are left
  launcher --launcher slurm train.py                    inside an allocation of Slurm

A line of the hostfile reads `worker-1 slots=4`. Without an accelerator slots and --num_gpus count processes. What
follows the script reaches it unchanged. The exit status is that of the rank that failed first (128 + n after signal
n), 0 when every rank ended well, 1 when a host was lost, 2 for what could not be started.
"""


@dataclass(frozen=True)
class Request:
    """One job as asked for on the command line; None and empty texts mean that nothing was said."""

    script: str
    script_args: tuple[str, ...]
    is_module: bool
    no_python: bool
    pass_local_rank: bool
    hostfile: Path | None
    include: str
    exclude: str
    num_nodes: int | None
    num_ranks: int | None
    launcher: str
    launcher_args: tuple[str, ...]
    ssh_port: int | None
    force_multi: bool
    no_ssh: bool
    node_rank: int | None
    preflight: bool
    master_addr: str | None
    master_port: int | None
    rdzv_backend: str | None
    env_file: Path | None
    exports: tuple[str, ...]
    max_restarts: int
    elastic: bool
    min_nodes: int | None
    max_nodes: int | None
    grace_s: float
    silence_s: float
    log_dir: Path | None
    quiet_ranks: bool
    no_tags: bool
    bind_cores: bool
    bind_core_list: str | None
    save_pid: bool
    dry_run: bool


def parse(argv: list[str]) -> Request:
    """Return the request, or leave with status 2 and one line of what is wrong.

    The line is cut at the script by hand: argparse would take `--` and abbreviations out of the script's own arguments.
    """
    parser, flags = build_parser()
    cut = _script_index(argv, flags)
    values = vars(parser.parse_args(argv[:cut]))
    rest = argv[cut + 1 :] if argv[cut : cut + 1] == ["--"] else argv[cut:]
    if not rest:
        parser.error("no script given; example: launcher --num_gpus 2 train.py")
    if values["no_python"] and values["is_module"]:
        parser.error("-m starts Python and --no_python does not; give one of them")
    if not values["is_module"] and not values["no_python"] and not Path(rest[0]).is_file():
        parser.error(f"there is no file {rest[0]!r} here; use -m to start a module by name")
    try:
        values["launcher_args"] = tuple(shlex.split(values["launcher_args"]))
    except ValueError as error:
        parser.error(f"--launcher_args {values['launcher_args']!r}: {error}")
    values["exports"] = tuple(values["exports"] or ())
    del values["no_local_rank"]
    return Request(script=rest[0], script_args=tuple(rest[1:]), **values)


def _script_index(argv: list[str], flags: set[str]) -> int:
    """Return where the script (or a `--` before it) stands: the first word that is neither an option nor an option's value."""
    index = 0
    while index < len(argv) and argv[index].startswith("-") and argv[index] != "--":
        word = argv[index]
        joined = "=" in word if word.startswith("--") else len(word) > 2  # --port=1, -iworker-1
        index += 1 if joined or word in flags else 2
    return min(index, len(argv))


class _Group:
    """Options under one heading; each long option is also known with dashes, as torchrun writes it."""

    def __init__(self, parser: argparse.ArgumentParser, title: str, flags: set[str]) -> None:
        self._group, self._flags = parser.add_argument_group(title), flags

    def value(self, *names: str, dest: str, help: str, **more: Any) -> None:
        self._group.add_argument(*_spellings(names), dest=dest, help=help, **more)

    def flag(self, *names: str, dest: str, help: str, **more: Any) -> None:
        spellings = _spellings(names)
        self._flags.update(spellings)
        self._group.add_argument(*spellings, dest=dest, help=help, action=more.pop("action", "store_true"), **more)


def _spellings(names: tuple[str, ...]) -> list[str]:
    dashed = ["--" + name[2:].replace("_", "-") for name in names if name.startswith("--")]
    return [*names, *(name for name in dashed if name not in names)]


class _Help(argparse.RawDescriptionHelpFormatter):
    """Show one spelling of each long option; the dashed ones would double the page."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if not (name.startswith("--") and "-" in name[2:])]
        if not names or action.nargs == 0:
            return ", ".join(names)
        return ", ".join(names) + " " + (action.metavar if isinstance(action.metavar, str) else action.dest.upper())


def build_parser() -> tuple[argparse.ArgumentParser, set[str]]:
    """Return the parser of the launcher's own options, those before the script, and which of them take no value."""
    parser = argparse.ArgumentParser(
        prog="launcher",
        usage="launcher [options] [-m] SCRIPT [script arguments]",
        description="Start a training script as several ranks that find each other, on one host or many.",
        epilog=EXAMPLES,
        formatter_class=lambda prog: _Help(prog, max_help_position=34, width=120),
        allow_abbrev=False,
    )
    flags = {"-h", "--help"}
    _add_script(_Group(parser, "what to start", flags))
    _add_hosts(_Group(parser, "where, and how many", flags))
    _add_ways(_Group(parser, "how the hosts are reached", flags))
    _add_meeting(_Group(parser, "how the ranks meet", flags))
    _add_life(_Group(parser, "when something fails", flags))
    _add_output(_Group(parser, "what is seen", flags))
    _add_cores(_Group(parser, "cores", flags))
    return parser, flags


def _add_script(group: _Group) -> None:
    group.flag("-m", "--module", dest="is_module", help="SCRIPT is a module name, as in python -m")
    group.flag("--no_python", dest="no_python", help="SCRIPT is a program, run as it is")
    group.flag("--pass_local_rank", dest="pass_local_rank", help="add --local_rank=N to each rank's arguments; LOCAL_RANK is always set")
    group.flag("--no_local_rank", dest="no_local_rank", help="the default here; accepted, since DeepSpeed's launcher needs it said")


def _add_hosts(group: _Group) -> None:
    group.value(
        "-H", "--hostfile", dest="hostfile", type=Path, metavar="FILE", help="hosts and slots (default: /job/hostfile if it exists)"
    )
    text = "use only these hosts and slots: host1@host2:0,2"
    group.value("-i", "--include", dest="include", default="", metavar="HOSTS", help=text)
    group.value("-e", "--exclude", dest="exclude", default="", metavar="HOSTS", help="use all but these, in the same syntax")
    group.value("--num_nodes", dest="num_nodes", type=positive, metavar="N", help="use the first N hosts")
    text = "ranks on each host (default: its slots; on this host one for each accelerator)"
    group.value("--num_gpus", "--num_accelerators", dest="num_ranks", type=positive, metavar="N", help=text)
    group.value("--nproc_per_node", dest="num_ranks", type=positive, metavar="N", help="the same, under torchrun's name")


def _add_ways(group: _Group) -> None:
    text = "what starts the hosts (auto: ssh with a hostfile, slurm inside an allocation, else this host)"
    group.value("--launcher", dest="launcher", choices=LAUNCHERS, default="auto", metavar="NAME", help=f"{text}: {', '.join(LAUNCHERS)}")
    group.value(
        "--launcher_args", dest="launcher_args", default="", metavar="ARGS", help="arguments for ssh, pdsh, srun or mpirun, in one word"
    )
    group.value("--ssh_port", dest="ssh_port", type=port, metavar="P", help="port of ssh (default: what ssh itself takes)")
    group.flag("--force_multi", dest="force_multi", help="go over ssh even to this host alone")
    group.flag("--no_ssh", dest="no_ssh", help="you start the launcher on every host, each with its --node_rank")
    group.value("--node_rank", dest="node_rank", type=natural, metavar="N", help="with --no_ssh: this host's number, from 0")
    text = "warn of what the check before the start finds, and start all the same"
    group.flag("--no_preflight", "--no_ssh_check", dest="preflight", action="store_false", help=text)
    group.value("--env_file", dest="env_file", type=Path, metavar="FILE", help="NAME=VALUE lines for every rank (default: .deepspeed_env)")
    group.value("--export", dest="exports", action="append", metavar="NAME[=VALUE]", help="one variable for every rank; may be repeated")


def _add_meeting(group: _Group) -> None:
    group.value("--master_addr", dest="master_addr", type=_word, metavar="ADDR", help="address of the first host, as the others reach it")
    text = "port of the rendezvous (default: a free one; 29500 where the hosts must know it beforehand)"
    group.value("--master_port", dest="master_port", type=port, metavar="P", help=text)
    text = "static: the launcher tells the hosts of each other; c10d: they find each other (default: static where it can)"
    group.value("--rdzv_backend", dest="rdzv_backend", choices=("static", "c10d"), metavar="KIND", help=text)


def _add_life(group: _Group) -> None:
    group.value(
        "--max_restarts",
        dest="max_restarts",
        type=natural,
        default=0,
        metavar="N",
        help="start again after a failure, N times (default: 0)",
    )
    group.flag("--elastic_training", dest="elastic", help="a restart may do with fewer hosts")
    group.value("--min_elastic_nodes", dest="min_nodes", type=positive, metavar="N", help="with at least so many (default: 1)")
    group.value(
        "--max_elastic_nodes",
        dest="max_nodes",
        type=positive,
        metavar="N",
        help="with at most so many; the others are spares (default: all)",
    )
    text = "seconds from SIGTERM to SIGKILL when you end the job (default: 30)"
    group.value("--shutdown_timeout", dest="grace_s", type=_seconds, default=30.0, metavar="S", help=text)
    text = "seconds without a sign of life after which a host is lost (default: 30)"
    group.value("--heartbeat_timeout", dest="silence_s", type=_seconds, default=30.0, metavar="S", help=text)


def _add_output(group: _Group) -> None:
    group.flag("--quiet_ranks", dest="quiet_ranks", help="show rank 0 only; the last lines of a rank that fails are shown all the same")
    group.flag("--no_tags", dest="no_tags", help="on one host: leave the ranks' streams as they are, without [host:rank]")
    group.value("--enable_each_rank_log", dest="log_dir", type=Path, metavar="DIR", help="write rank_N.log for each rank, on its host")
    group.flag("--save_pid", dest="save_pid", help="write the process ids to PID.stateroom in the temporary folder while the job runs")
    group.flag("--dry_run", dest="dry_run", help="print what would run on each host, and run nothing")


def _add_cores(group: _Group) -> None:
    group.flag("--bind_cores_to_rank", dest="bind_cores", help="each rank gets cores of its own, as many threads as cores")
    group.value("--bind_core_list", dest="bind_core_list", metavar="LIST", help="share out these cores only: 0,2-15")


def positive(text: str) -> int:
    """Return a number of ranks, hosts or nodes."""
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks, hosts or nodes, 1 or more")
    return int(text)


def natural(text: str) -> int:
    """Return a whole number, 0 or more."""
    if not text.isdecimal() or int(text) > 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def port(text: str) -> int:
    """Return a port."""
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 1 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 1 to 86400")
    return value


def _word(text: str) -> str:
    if not text or text.split() != [text] or text.startswith("-"):
        raise argparse.ArgumentTypeError(f"{text!r} is not an address")
    return text


def refuse(problem: str) -> int:
    """Print what stands in the way of a start, and return the exit status for it."""
    print(f"launcher: {problem}", file=sys.stderr, flush=True)
    return 2
