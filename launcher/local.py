"""Start the ranks of a job on this host, through torch's elastic agent, and report the one that failed first."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from typing import Any

import torch
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..environment import inherited, set_for_children
from ..parallel.accelerator import device_type
from .cli import Request

HOST = "127.0.0.1"


def run(request: Request) -> int:
    """Run the job to its end and return its exit status."""
    devices = 0 if device_type() == "cpu" else torch.accelerator.device_count()
    num_ranks = request.num_ranks or max(1, devices)
    if devices and num_ranks > devices:
        return _refuse(f"{num_ranks} ranks were asked for, but this host has {devices} accelerators; ask for at most {devices}")
    threads = _set_threads(num_ranks)
    kind = f"{devices} accelerators" if devices else "no accelerator, so ranks are processes on the CPU"
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    _say(f"{ranks} on this host ({kind}), OMP_NUM_THREADS={threads}")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it would say of a failure is said below
    with tempfile.TemporaryDirectory(prefix="stateroom-launcher-") as errors:
        try:
            elastic_launch(_agent_config(request, num_ranks, errors), sys.executable)(*_rank_command(request))
        except ChildFailedError as failed:
            return _report(failed.failures, num_ranks)
        except DistNetworkError as problem:
            return _refuse(f"ranks cannot meet at {HOST} ({str(problem).splitlines()[0]}); try another --master_port, or none")
        except SignalException as ended:
            _say(f"{signal.Signals(ended.sigval).name} received; all ranks were ended")
            return 128 + int(ended.sigval)
    return 0


def _agent_config(request: Request, num_ranks: int, error_dir: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        # c10d takes a free port (0) and tells it to the ranks; only the static kind hands a chosen port on as MASTER_PORT
        rdzv_backend="static" if request.master_port else "c10d",
        rdzv_endpoint=f"{HOST}:{request.master_port or 0}",
        rdzv_configs={"rank": 0} if request.master_port else {},
        local_addr=HOST,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=error_dir),
    )


def _rank_command(request: Request) -> list[str]:
    module = ["-m"] if request.is_module else []
    return ["-u", "-m", "stateroom.launcher.child", *module, request.script, *request.script_args]


def _set_threads(num_ranks: int) -> str:
    """Share the cores among the ranks unless the user chose a number; the agent passes our environment on."""
    chosen = inherited().get("OMP_NUM_THREADS")
    if chosen is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        chosen = str(max(1, cores // num_ranks))
        set_for_children("OMP_NUM_THREADS", chosen)
    return chosen


def _report(failures: dict[int, ProcessFailure], num_ranks: int) -> int:
    """Print the traceback of the rank that failed first and return its exit status."""
    rank = min(failures, key=lambda r: _moment(failures[r]))
    failure = failures[rank]
    what = f"status {failure.exitcode}" if failure.exitcode > 0 else f"signal {-failure.exitcode} ({failure.signal_name()})"
    text = _extra_info(failure).get("py_callstack")
    others = "; the others were ended" if num_ranks > 1 else ""
    _say(f"rank {rank} failed first, with {what}{others}" + (", its traceback:" if text else ", and left no traceback"))
    if text:
        print(text.rstrip(), file=sys.stderr, flush=True)
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def _moment(failure: ProcessFailure) -> tuple[int, int]:
    """Order failures by time: a kill or crash is never an echo, and a rank that could not say when comes last."""
    if -failure.exitcode in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
        return (0, 0)
    told = _extra_info(failure).get("time_ns")
    return (2, 0) if told is None else (1, int(told))


def _extra_info(failure: ProcessFailure) -> dict[str, Any]:
    message = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    return message.get("extraInfo", {}) if isinstance(message, dict) else {}


def _refuse(problem: str) -> int:
    _say(problem)
    return 2


def _say(text: str) -> None:
    print(f"launcher: {text}", file=sys.stderr, flush=True)
