"""From a request to what will run: which hosts, which runner, and what each host is told. Nothing is started here."""

from __future__ import annotations

import os
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import exports, hostfile, slurm
from .cores import parse_cores
from .hostfile import Host
from .job import C10D, FIXED, Job, Order, Raw
from .options import Request
from .problem import LaunchError
from .runners import LocalRunner, MpichRunner, OpenMpiRunner, PdshRunner, Runner, SlurmRunner, SshRunner

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Plan:
    """A job ready to start. orders[i] is for hosts[i]; their address and attempt are open until the hosts have answered."""

    hosts: tuple[Host, ...]
    orders: tuple[Order, ...]
    runner: Runner
    min_nodes: int
    max_nodes: int
    master_addr: str | None
    preflight: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Place:
    """Where the job runs: the hosts that this launcher starts, and which of all nodes they are."""

    hosts: tuple[Host, ...]
    runner: Runner
    num_nodes: int
    node: int = 0
    master_addr: str | None = None
    port: int | None = None
    meets_strangers: bool = False  # hosts that another launcher starts
    note: str = ""


def make_plan(request: Request, env: Mapping[str, str]) -> Plan:
    """Return the plan for a request; `env` is the launcher's environment.

    Raises:
        LaunchError: the request contradicts itself, the hostfile or the allocation; the message says what to change.
    """
    _check(request)
    place = _place(request, env)
    only_here = place.runner.name == "local" and place.num_nodes == 1
    if request.no_tags and not only_here:
        raise LaunchError("--no_tags is for a job on this host alone; lines of several hosts need their tags")
    raw: Raw = "never" if not only_here else "always" if request.no_tags else "single"
    job, notes = _job(request, env, raw)
    low, high = _elastic(request, place.num_nodes)
    led = not place.meets_strangers and place.runner.leads
    kind = request.rdzv_backend or (FIXED if led else C10D)
    if not led and kind == FIXED and (request.max_restarts or request.elastic):
        raise LaunchError("--rdzv_backend static cannot restart here, where the launcher does not lead the hosts; leave it out")
    if led and only_here:
        address, port = LOOPBACK, request.master_port or 0
    else:
        address = request.master_addr or place.master_addr or ""
        port = request.master_port or place.port or (0 if led else DEFAULT_PORT)
    # Launchers that do not know of each other must name the job alike; its store is new with each job.
    run_id = "job" if place.meets_strangers else uuid.uuid4().hex
    base = Order(job, "", place.node, None, 0, address, port, low, high, run_id, kind=kind, led=led)
    orders = tuple(_for_host(base, host, place.node + i, request) for i, host in enumerate(place.hosts))
    notes = [place.note, *notes] if place.note else notes
    return Plan(place.hosts, orders, place.runner, low, high, request.master_addr, request.preflight, tuple(notes))


def _for_host(base: Order, host: Host, node: int, request: Request) -> Order:
    """Return one host's order; slots that are simply the first ones need no naming."""
    slots = host.slots if host.slots != tuple(range(len(host.slots))) else None
    return replace(base, host=host.name, node=node, slots=slots, num_ranks=len(host.slots) or request.num_ranks or 0)


def _check(request: Request) -> None:
    picked = request.include or request.exclude
    if picked and (request.num_nodes or request.num_ranks):
        raise LaunchError("--include and --exclude name the hosts and slots, so --num_nodes and --num_gpus cannot be given as well")
    if request.node_rank is not None and not request.no_ssh:
        raise LaunchError("--node_rank is for --no_ssh, where you start the launcher on every host; over ssh the hostfile gives the order")
    if request.no_ssh and request.node_rank is None:
        raise LaunchError("--no_ssh needs --node_rank: this host's number, from 0")
    if (request.min_nodes or request.max_nodes) and not request.elastic:
        raise LaunchError("--min_elastic_nodes and --max_elastic_nodes need --elastic_training")
    if request.force_multi and request.launcher == "local":
        raise LaunchError("--force_multi goes over ssh, which --launcher local does not")
    if request.no_ssh and request.launcher != "auto":
        raise LaunchError(f"--no_ssh starts nothing on other hosts, so --launcher {request.launcher} cannot be given as well")


def _place(request: Request, env: Mapping[str, str]) -> _Place:
    if request.no_ssh:
        return _by_hand(request)
    if request.launcher == "kubernetes":
        return _pod(request, env)
    granted = slurm.allocation(env) if request.launcher in ("auto", "slurm") and not request.hostfile else None
    if request.launcher == "slurm" and granted is None:
        raise LaunchError("--launcher slurm works inside an allocation (salloc, sbatch), without --hostfile; SLURM_JOB_ID is not set here")
    if granted is not None and (request.launcher == "slurm" or len(granted.hosts) > 1):
        return _allocated(request, granted)
    listed, note = _listed(request)
    alone = not request.force_multi if listed is None else _here(request, listed)
    if request.launcher in ("local", "auto") and alone:
        return _Place((_this_host(request, listed),), LocalRunner(), 1, note=note)
    if listed is None:
        listed = [Host("localhost", tuple(range(request.num_ranks or 1)))]
    return _Place(tuple(listed), _runner(request, env), len(listed), master_addr=listed[0].name, note=note)


def _listed(request: Request) -> tuple[list[Host] | None, str]:
    """Return the hosts of the hostfile that are wanted, or None without one, and what to say about it."""
    path = request.hostfile or (hostfile.DEFAULT_PATH if hostfile.DEFAULT_PATH.is_file() else None)
    if path is None:
        if request.num_nodes not in (None, 1) or request.launcher in ("pdsh", "openmpi", "mpich"):
            raise LaunchError("more than this host needs a --hostfile; a line of it reads like: worker-1 slots=4")
        return None, ""
    hosts = hostfile.select(hostfile.read_hostfile(path), request.include, request.exclude)
    return hostfile.first(hosts, request.num_nodes, request.num_ranks), "" if request.hostfile else f"hosts from {path}"


def _here(request: Request, listed: Sequence[Host]) -> bool:
    """Return whether the only host is this one."""
    if request.launcher == "local" and (len(listed) > 1 or not is_this_host(listed[0].name)):
        raise LaunchError(f"--launcher local starts this host only, but the hostfile names {', '.join(h.name for h in listed[:8])}")
    return len(listed) == 1 and not request.force_multi and is_this_host(listed[0].name)


def _this_host(request: Request, listed: Sequence[Host] | None) -> Host:
    if listed:
        return listed[0]
    name = socket.gethostname()
    if request.exclude:
        raise LaunchError("--exclude needs a --hostfile: without one it is not known which slots there are")
    if not request.include:
        return Host(name, tuple(range(request.num_ranks or 0)))
    whole = [Host(known, tuple(range(hostfile.MAX_SLOTS))) for known in ("localhost", name)]
    (host,) = hostfile.select(whole[: 1 if name == "localhost" else 2], request.include)
    return Host(name, host.slots if len(host.slots) < hostfile.MAX_SLOTS else ())


def _runner(request: Request, env: Mapping[str, str]) -> Runner:
    args = request.launcher_args
    made: dict[str, Runner] = {
        "pdsh": PdshRunner(request.ssh_port, args, env.get("PDSH_SSH_ARGS_APPEND", "")),
        "openmpi": OpenMpiRunner(args),
        "mpich": MpichRunner(args),
    }
    return made.get(request.launcher) or SshRunner(request.ssh_port, args)


def _by_hand(request: Request) -> _Place:
    """Return the place of one node of several that are each started by hand."""
    listed, note = _listed(replace(request, num_nodes=None)) if request.hostfile else (None, "")
    listed = hostfile.first(listed, request.num_nodes, None) if listed else None
    num_nodes = len(listed) if listed else request.num_nodes or 0
    if not num_nodes:
        raise LaunchError("--no_ssh needs --num_nodes or --hostfile: how many hosts there are")
    node = request.node_rank or 0
    if node >= num_nodes:
        raise LaunchError(f"--node_rank {node}: there are {num_nodes} hosts, numbered from 0")
    first = request.master_addr or (listed[0].name if listed else None)
    if first is None:
        raise LaunchError("--no_ssh needs --master_addr: where the host with --node_rank 0 is")
    host = listed[node] if listed else Host(socket.gethostname(), tuple(range(request.num_ranks or 0)))
    return _Place((host,), LocalRunner(), num_nodes, node, first, meets_strangers=True, note=note)


def _pod(request: Request, env: Mapping[str, str]) -> _Place:
    """Return the place of one pod of an indexed job of Kubernetes."""
    index = env.get("JOB_COMPLETION_INDEX", "")
    if not index.isdecimal():
        raise LaunchError("--launcher kubernetes runs inside a pod of an indexed Job, which sets its index; see `stateroom job`")
    return _by_hand(replace(request, no_ssh=True, node_rank=int(index)))


def _allocated(request: Request, granted: slurm.Allocation) -> _Place:
    """Return the place of a job inside an allocation of Slurm: all its hosts, or the one that this step's task is on."""
    hosts = [Host(name, tuple(range(request.num_ranks or count))) for name, count in zip(granted.hosts, granted.ranks, strict=True)]
    if request.include or request.exclude:
        raise LaunchError("inside an allocation Slurm gives the hosts and slots; --include and --exclude need --hostfile")
    hosts = hostfile.first(hosts, request.num_nodes, None)
    first, port = hosts[0].name, granted.port
    if granted.node_id is None:
        return _Place(tuple(hosts), SlurmRunner(request.launcher_args), len(hosts), master_addr=first, port=port)
    if granted.node_id >= len(hosts):
        raise LaunchError(f"this task is on host {granted.node_id} of its step, but the job has {len(hosts)} hosts; give srun as many")
    own = hosts[granted.node_id]
    return _Place((own,), LocalRunner(), len(hosts), granted.node_id, first, port, meets_strangers=True)


def _elastic(request: Request, num_nodes: int) -> tuple[int, int]:
    """Return the least and the most hosts that an attempt runs on."""
    if not request.elastic:
        return num_nodes, num_nodes
    low, high = request.min_nodes or 1, min(request.max_nodes or num_nodes, num_nodes)
    if low > high:
        raise LaunchError(f"--min_elastic_nodes {low} is more than the {high} hosts that there can be")
    return low, high


def _job(request: Request, env: Mapping[str, str], raw: Raw) -> tuple[Job, list[str]]:
    files = exports.env_files(request.env_file, env, Path.home(), Path.cwd())
    variables = exports.exported(env)
    for path in files:
        variables |= exports.read_env_file(path)
    variables |= exports.from_options(request.exports, env)
    cores = parse_cores(request.bind_core_list) if request.bind_core_list else ()
    job = Job(
        script=request.script,
        script_args=request.script_args,
        is_module=request.is_module,
        is_program=request.no_python,
        python=sys.executable,
        cwd=os.getcwd(),
        env=variables,
        pass_local_rank=request.pass_local_rank,
        raw=raw,
        quiet_ranks=request.quiet_ranks,
        log_dir=str(request.log_dir) if request.log_dir else None,
        bind=request.bind_cores or bool(cores),
        bind_cores=cores,
        grace_s=request.grace_s,
        silence_s=request.silence_s,
        max_restarts=request.max_restarts,
    )
    return job, [f"variables from {path}" for path in files]


def is_this_host(name: str) -> bool:
    """Return whether a host's name or address is one of this machine: only then can a socket be bound to it."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind((address[0], 0, *address[2:]))
                return True
        except OSError:
            continue
    return False
