"""Manifests for clusters: an indexed Job of Kubernetes, and a component of TorchX, that run the launcher on each node."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .problem import LaunchError

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?\Z", re.ASCII)
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?\Z", re.ASCII)
_BYTES = {"": 1, "k": 10**3, "Ki": 2**10, "M": 10**6, "Mi": 2**20, "G": 10**9, "Gi": 2**30, "T": 10**12, "Ti": 2**40}
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*\Z", re.ASCII)
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


@dataclass(frozen=True)
class Task:
    """What a cluster is asked for: nodes, and on each of them ranks and resources. `command` begins with the script."""

    name: str
    image: str
    command: tuple[str, ...]
    num_nodes: int
    num_ranks: int
    is_module: bool = False
    devices: int = 0
    device_kind: str = "nvidia.com/gpu"
    cpu: str = "4"
    memory: str = "16Gi"
    port: int = 29500
    max_restarts: int = 0
    min_nodes: int | None = None
    namespace: str | None = None
    env: tuple[tuple[str, str], ...] = ()

    def check(self) -> None:
        """Raise LaunchError where a cluster would refuse the manifest."""
        longest = 63 - len(f"-{self.num_nodes - 1}") - 6  # the pod's own name gets five letters more
        if not _NAME.match(self.name) or len(self.name) > longest:
            raise LaunchError(f"--name {self.name!r}: small letters, digits and '-', at most {longest} of them, a letter first")
        if self.namespace is not None and (not _NAME.match(self.namespace) or len(self.namespace) > 63):
            raise LaunchError(f"--namespace {self.namespace!r}: small letters, digits and '-', a letter first")
        for option, quantity in (("--cpu", self.cpu), ("--memory", self.memory)):
            if not _QUANTITY.match(quantity):
                raise LaunchError(f"{option} {quantity!r} is no quantity; write 8 or 500m for cores, 64Gi for memory")
        if not re.fullmatch(r"[a-z0-9.-]+/[A-Za-z0-9._-]+", self.device_kind):
            raise LaunchError(f"--device_kind {self.device_kind!r} is no resource of Kubernetes; it reads like nvidia.com/gpu")
        if self.min_nodes is not None and self.min_nodes > self.num_nodes:
            raise LaunchError(f"--min_elastic_nodes {self.min_nodes} is more than the {self.num_nodes} nodes")

    def launcher_words(self) -> list[str]:
        """Return the options that are alike on every node, and the script with its arguments."""
        words = ["--num_nodes", str(self.num_nodes), "--num_gpus", str(self.num_ranks), "--master_port", str(self.port)]
        if self.max_restarts:
            words += ["--max_restarts", str(self.max_restarts)]
        if self.min_nodes is not None:
            words += ["--elastic_training", "--min_elastic_nodes", str(self.min_nodes)]
        return [*words, *(["-m"] if self.is_module else []), *self.command]


def kubernetes(task: Task) -> str:
    """Return YAML: a headless service, by which pods find the first one, and an indexed Job, one pod a node.

    Raises:
        LaunchError: Kubernetes would refuse a name or quantity.
    """
    task.check()
    meta = {"name": task.name, **({"namespace": task.namespace} if task.namespace else {})}
    # Names must resolve before the pods are ready: they become ready by finding each other.
    service_spec = {"clusterIP": "None", "selector": {"job-name": task.name}, "publishNotReadyAddresses": True}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {**service_spec, "ports": [{"port": task.port}]}}
    resources: dict[str, Any] = {"cpu": task.cpu, "memory": task.memory}
    if task.devices:
        resources[task.device_kind] = str(task.devices)
    container = {
        "name": "ranks",
        "image": task.image,
        "command": ["launcher", "--launcher", "kubernetes", "--master_addr", f"{task.name}-0.{task.name}", *task.launcher_words()],
        "env": [{"name": name, "value": value} for name, value in task.env],
        "ports": [{"containerPort": task.port}],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if not task.env:
        del container["env"]
    pod = {
        "subdomain": task.name,
        "restartPolicy": "Never",
        # Data loaders and NCCL share memory through files that the default of 64 MiB has no room for.
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        "containers": [container],
    }
    job_spec = {
        "completionMode": "Indexed",
        "completions": task.num_nodes,
        "parallelism": task.num_nodes,
        "backoffLimit": task.max_restarts * task.num_nodes,
        "template": {"metadata": {"labels": {"app": task.name}}, "spec": pod},
    }
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": job_spec}
    return "---\n".join("\n".join(_yaml(part)) + "\n" for part in (service, job))


def torchx(task: Task) -> str:
    """Return Python: a TorchX component, for `torchx run FILE:NAME`.

    Raises:
        LaunchError: as for kubernetes.
    """
    task.check()
    words = shlex.join(task.launcher_words()).replace("$", "$$")
    # TorchX fills in ${…}; what is left, $${…}, the shell on the node reads.
    place = "--no_ssh --node_rank ${replica_id} --master_addr $${${rank0_env}:=localhost}"
    number = task.memory.rstrip("kKMGTim")
    megabytes = int(float(number) * _BYTES[task.memory[len(number) :]] / 2**20)
    cores = int(task.cpu[:-1]) // 1000 if task.cpu.endswith("m") else int(float(task.cpu))
    return f'''"""A TorchX component: torchx run --scheduler SCHEDULER FILE:{task.name.replace("-", "_")}"""

import torchx.specs as specs


def {task.name.replace("-", "_")}() -> specs.AppDef:
    """Run {json.dumps(task.command[0])[1:-1]} on {task.num_nodes} nodes."""
    role = specs.Role(
        name="ranks",
        image={json.dumps(task.image)},
        entrypoint="bash",
        args=["-c", {json.dumps(f"launcher {place} {words}")}],
        env={json.dumps(dict(task.env))},
        num_replicas={task.num_nodes},
        max_retries={task.max_restarts},
        retry_policy=specs.RetryPolicy.{"REPLICA" if task.min_nodes is not None else "APPLICATION"},
        resource=specs.Resource(cpu={max(1, cores)}, gpu={task.devices}, memMB={max(1, megabytes)}),
        port_map={{"c10d": {task.port}}},
    )
    return specs.AppDef(name={json.dumps(task.name)}, roles=[role])
'''


def _yaml(value: Mapping[str, Any], indent: int = 0) -> list[str]:
    """Return a mapping as lines of YAML; texts that could be read as something else are quoted."""
    lines = []
    for key, item in value.items():
        lines += _entry(" " * indent + f"{_scalar(key)}:", item, indent)
    return lines


def _entry(head: str, item: Any, indent: int) -> list[str]:
    if isinstance(item, Mapping):
        return [head, *_yaml(item, indent + 2)]
    if isinstance(item, Sequence) and not isinstance(item, str):
        lines = [head]
        for element in item:
            if isinstance(element, Mapping):
                first, *rest = _yaml(element, indent + 4)
                lines += [" " * (indent + 2) + "- " + first.lstrip(), *rest]
            else:
                lines.append(" " * (indent + 2) + f"- {_scalar(element)}")
        return lines
    return [f"{head} {_scalar(item)}"]


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return value if _PLAIN.match(value) and value.lower() not in _WORDS else _quoted(value)


def _quoted(text: str) -> str:
    return '"' + "".join(_escaped(char) for char in text) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if " " <= char <= "~" else f"\\U{ord(char):08x}"
