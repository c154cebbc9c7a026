"""The ways to start an agent on each host: one small class each, that only builds command lines."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from .hostfile import Host
from .job import Job, Order, orders_to_text
from .problem import LaunchError

# How the launcher and the agents of a command talk:
# "pipes": over descriptors of their own, the agent's streams stay the terminal's;
# "stdio": both ways over the command's standard streams;
# "lifeline": agents speak, and end when their standard input does; "speak": agents only speak.
Way = Literal["pipes", "stdio", "lifeline", "speak"]


@dataclass(frozen=True)
class Command:
    """One process to start here, which serves the hosts of these places in the list; env is added to the launcher's."""

    argv: tuple[str, ...]
    places: tuple[int, ...]
    way: Way
    env: dict[str, str] = field(default_factory=dict)


class Runner(Protocol):
    """What starts agents on hosts; `program` must be found on the PATH."""

    program: str | None
    name: str
    leads: bool  # what the agents are told later, the launcher tells them

    def commands(self, hosts: Sequence[Host], orders: Sequence[Order]) -> list[Command]:
        """Return the command lines that start an agent for each host; orders[i] is what hosts[i] is to run."""
        ...


def _agent(job: Job, *options: str) -> list[str]:
    return [job.python, "-m", "stateroom.launcher.agent", *options]


def _check(job: Job) -> list[str]:
    """Return what the agent looks for before it says that its host is ready."""
    kind = "--check_program" if job.is_program else "--check_module" if job.is_module else "--check_file"
    return ["--cwd", job.cwd, kind, job.script]


def _python_path(job: Job) -> list[str]:
    """Return the words that give a remote Python its path: it is needed before anything can be said to it."""
    return ["env", f"PYTHONPATH={job.env['PYTHONPATH']}"] if job.env.get("PYTHONPATH") else []


def _port_option(order: Order, place: int) -> list[str]:
    """Return the port that the first host keeps free for the rendezvous, where the user chose one."""
    return ["--port", str(order.port)] if place == 0 and order.port else []


class LocalRunner:
    """This host, without anything between."""

    program: str | None = None
    name = "local"
    leads = True

    def commands(self, hosts: Sequence[Host], orders: Sequence[Order]) -> list[Command]:
        """Return the one command; the launcher adds the descriptors to talk over."""
        (order,) = orders
        listens = ["--only_here", *_port_option(order, order.node)] if order.led else []
        argv = _agent(order.job, "--node", "0", *_check(order.job), *listens)
        return [Command(tuple(argv), (0,), "pipes", order.job.env)]


class SshRunner:
    """The system's ssh, one process a host, with the keys, agents and configuration that the user has."""

    program: str | None = "ssh"
    name = "ssh"
    leads = True

    def __init__(self, port: int | None = None, args: Sequence[str] = ()) -> None:
        self._options = [*(["-p", str(port)] if port else []), *args]

    def commands(self, hosts: Sequence[Host], orders: Sequence[Order]) -> list[Command]:
        """Return one command for each host. Nothing may ask for a password: prompts of many hosts at once help nobody."""
        before = ["ssh", "-T", *self._options, "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"]  # to ssh the first word counts
        found = []
        for place, (host, order) in enumerate(zip(hosts, orders, strict=True)):
            agent = _agent(order.job, "--node", str(place), *_check(order.job), *_port_option(order, place))
            remote = "exec " + shlex.join([*_python_path(order.job), *agent])
            found.append(Command((*before, host.login, remote), (place,), "stdio"))
        return found


class PdshRunner:
    """pdsh, always over ssh (Debian's default is rsh); -R exec among the arguments runs everything here, for tests."""

    program: str | None = "pdsh"
    name = "pdsh"
    leads = False

    def __init__(self, port: int | None = None, args: Sequence[str] = (), ssh_args: str = "") -> None:
        """`ssh_args` is what the user's PDSH_SSH_ARGS_APPEND says."""
        own = "-o BatchMode=yes -o ServerAliveInterval=10" + (f" -p {port}" if port else "")
        self._ssh_args, self._args = f"{ssh_args} {own}".strip(), list(args)

    def commands(self, hosts: Sequence[Host], orders: Sequence[Order]) -> list[Command]:
        """Return the one command for all hosts.

        Raises:
            LaunchError: a host is an IPv6 address, which pdsh's list of hosts cannot hold.
        """
        for host in hosts:
            if ":" in host.name:
                raise LaunchError(f"pdsh cannot be told the IPv6 address {host.name}; give the host a name, or use --launcher ssh")
        job = orders[0].job
        env = {"PDSH_SSH_ARGS_APPEND": self._ssh_args}
        agent = _agent(job, "--node", "match" if "exec" not in self._args else "%n", "--lifeline", "--orders", orders_to_text(orders))
        words = [shlex.quote(word) for word in [*_python_path(job), *agent]]
        targets = ",".join(host.login for host in hosts)
        argv = ("pdsh", "-R", "ssh", "-S", "-N", "-f", str(len(hosts)), *self._args, "-w", targets, *words)
        return [Command(argv, tuple(range(len(hosts))), "lifeline", env)]


class SlurmRunner:
    """srun inside an allocation, one task a host; the environment goes along by itself."""

    program: str | None = "srun"
    name = "slurm"
    leads = False

    def __init__(self, args: Sequence[str] = ()) -> None:
        self._args = list(args)

    def commands(self, hosts: Sequence[Host], orders: Sequence[Order]) -> list[Command]:
        """Return the one command for all hosts; a lost task ends the others, unless the job may go on without it."""
        count = str(len(hosts))
        lost = "0" if orders[0].min_nodes < orders[0].max_nodes or orders[0].job.max_restarts else "1"
        srun = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(h.name for h in hosts)}"]
        srun += [f"--kill-on-bad-exit={lost}", "--cpu-bind=none", "--export=ALL", *self._args]
        agent = _agent(orders[0].job, "--node", "match", "--orders", orders_to_text(_bare(orders)))
        return [Command((*srun, *agent), tuple(range(len(hosts))), "speak", orders[0].job.env)]


class OpenMpiRunner:
    """Open MPI's mpirun, one process a host."""

    program: str | None = "mpirun"
    name = "openmpi"
    leads = False

    def __init__(self, args: Sequence[str] = ()) -> None:
        self._args = list(args)

    def commands(self, hosts: Sequence[Host], orders: Sequence[Order]) -> list[Command]:
        """Return the one command for all hosts; variables go along by name, so that no value shows in a list of processes."""
        names = [word for name in orders[0].job.env for word in ("-x", name)]
        mpirun = ["mpirun", "-np", str(len(hosts)), "--host", _mpi_hosts(hosts, ":1"), "--map-by", "ppr:1:node", "--bind-to", "none"]
        agent = _agent(orders[0].job, "--node", "match", "--orders", orders_to_text(_bare(orders)))
        return [Command((*mpirun, *names, *self._args, *agent), tuple(range(len(hosts))), "speak", orders[0].job.env)]


class MpichRunner:
    """MPICH's mpirun, one process a host."""

    program: str | None = "mpirun"
    name = "mpich"
    leads = False

    def __init__(self, args: Sequence[str] = ()) -> None:
        self._args = list(args)

    def commands(self, hosts: Sequence[Host], orders: Sequence[Order]) -> list[Command]:
        """Return the one command for all hosts; variables go along by name."""
        names = ["-genvlist", ",".join(orders[0].job.env)] if orders[0].job.env else []
        mpirun = ["mpirun", "-n", str(len(hosts)), "-ppn", "1", "-hosts", _mpi_hosts(hosts, "")]
        agent = _agent(orders[0].job, "--node", "match", "--orders", orders_to_text(_bare(orders)))
        return [Command((*mpirun, *names, *self._args, *agent), tuple(range(len(hosts))), "speak", orders[0].job.env)]


def _mpi_hosts(hosts: Sequence[Host], ending: str) -> str:
    for host in hosts:
        if host.user:
            raise LaunchError(f"mpirun takes no user names, so {host.login} cannot be reached; name the user in ~/.ssh/config")
        if ":" in host.name and ipaddress.ip_address(host.name.partition("%")[0]).version == 6:
            raise LaunchError(f"mpirun cannot be told the IPv6 address {host.name}; give the host a name, or use --launcher ssh")
    return ",".join(host.name + ending for host in hosts)


def _bare(orders: Sequence[Order]) -> list[Order]:
    """Return the orders without the environment, which takes another way."""
    return [order.without_environment() for order in orders]
