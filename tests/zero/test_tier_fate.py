"""A drive that fails on one rank ends the step on every rank with its name and reason, and nobody goes on with half a step."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
from models import batch
from offload_jobs import go_on, offload, same, start, states_of, train
from oracle import error_of
from training import master_weights

NVME = ("nvme", "nvme")


@contextmanager
def broken(call, rank, on, code=errno.EIO):
    """Let every os-level `call` fail on one rank."""

    def fail(*args):
        raise OSError(code, os.strerror(code))

    with mock.patch(f"os.{call}", fail) if rank == on else nullcontext():
        yield


def results(engine, losses, norms):
    found = (losses, norms, master_weights(engine), states_of(engine))
    engine.destroy()
    return found


def gradient_is_lost(folder, on):
    """Gradients cannot be written in one step; go on with the next ones as if it had not been."""
    engine = start("gpt", offload(3, *NVME, folder))
    losses, norms = go_on(engine, "gpt", 1)
    with broken("pwrite", engine.global_rank, on):
        engine.backward(engine(*batch("gpt", 77, 0, engine.global_rank)))
        error = error_of(engine.step)
    more = go_on(engine, "gpt", 2, first=1)
    return error, results(engine, losses + more[0], norms + more[1])


@pytest.mark.parametrize(("ranks", "on"), [(1, 0), (2, 1), (2, 0)])
def test_before_the_update_nothing_is_changed(pools, tmp_path, ranks, on):
    wanted = pools(ranks).run(train, "gpt", {"stage": 3})
    for ((kind, message), found), plain in zip(pools(ranks).run(gradient_is_lost, str(tmp_path), on), wanted, strict=True):
        assert kind == "EngineError"
        assert f"rank {on}: " in message and str(tmp_path) in message and "gradients" in message and "Input/output error" in message
        assert "No weight and no optimizer state was changed" in message
        same(found, plain)


def update_fails(folder, call, on, code):
    """One rank's update fails half way; try what a script may try then, and load a checkpoint."""
    engine = start("gpt", offload(3, *NVME, folder))
    losses, norms = go_on(engine, "gpt", 2)
    engine.save_checkpoint(folder + "/saved")
    engine.backward(engine(*batch("gpt", 77, 0, engine.global_rank)))
    for unit in engine.sharded.units:
        unit.residence.flush()
    with broken(call, engine.global_rank, on, code):
        tried = [error_of(engine.step)]
    inputs = batch("gpt", 2, 0, engine.global_rank)
    tried += [error_of(lambda: engine(*inputs)), error_of(lambda: engine.save_checkpoint(folder + "/mixed"))]
    tried += [error_of(lambda: engine.save_16bit_model(folder)), error_of(engine.step)]
    engine.load_checkpoint(folder + "/saved")
    more = go_on(engine, "gpt", 1, first=2)
    return tried, results(engine, losses + more[0], norms + more[1])


@pytest.mark.parametrize(
    ("ranks", "on", "call", "code"),
    [(2, 1, "pwrite", errno.EIO), (2, 1, "preadv", errno.EIO), (1, 0, "preadv", errno.EIO), (1, 0, "pwrite", errno.ENOSPC)],
)
def test_half_an_update_is_known_everywhere_and_never_saved(pools, tmp_path, ranks, on, call, code):
    what, reason = {"pwrite": "written", "preadv": "read"}[call], os.strerror(code)
    wanted = pools(ranks).run(train, "gpt", {"stage": 3})
    for (tried, found), plain in zip(pools(ranks).run(update_fails, str(tmp_path), call, on, code), wanted, strict=True):
        for kind, message in tried:
            assert kind == "EngineError", message
            assert f"rank {on}: " in message and str(tmp_path) in message and f"could not be {what}" in message
            assert reason in message and "load_checkpoint()" in message
        same(found, plain)
    assert not os.path.exists(tmp_path / "mixed")


# ---- where ranks wait for each other in other places: the failing one tells before it raises

JOB = """
import errno, json, os, sys, threading
from unittest import mock
sys.path.insert(0, {tests!r})
import stateroom
from models import batch
from offload_jobs import go_on, offload, start

case = json.loads(sys.argv[1])
stateroom.init_distributed()
rank = int(os.environ["RANK"])
fail = mock.patch("os." + case["call"], side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
if case["when"] == "start" and rank == case["on"]:
    fail.start()
engine = start("gpt", offload(3, "nvme", "nvme", case["folder"]))
go_on(engine, "gpt", 1)
if rank == case["on"]:
    fail.start()
try:
    go_on(engine, "gpt", 1, first=1)
except stateroom.StateroomError as error:
    if rank != case["on"] or not case["lives"]:
        raise
    print("still here", error, flush=True)
    sys.stdin.read()  # for as long as the test wants
"""


def run_two(tmp_path, free_port, **case):
    """Run the job on two ranks, with nothing that would end one because of the other; return (status, stderr) of each."""
    script = JOB.format(tests=str(Path(__file__).parents[1]))
    processes = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
        command = [sys.executable, "-c", script, json.dumps({"folder": str(tmp_path), **case})]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=env, **pipes))
    found = {}
    order = [1 - case["on"], case["on"]] if case["lives"] else [0, 1]  # the living one ends when its stdin is closed
    for rank in order:
        _, text = processes[rank].communicate(timeout=90)
        found[rank] = (processes[rank].returncode, text)
    return found


@pytest.mark.parametrize(
    ("when", "call", "on", "lives"),
    [
        ("step", "preadv", 1, False),
        ("step", "preadv", 1, True),
        pytest.param("step", "preadv", 0, False, marks=pytest.mark.full),  # the store ends with rank 0
        pytest.param("start", "posix_fallocate", 1, False, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_fails_alone_is_named_by_the_others(tmp_path, when, call, on, lives):
    from stateroom.parallel.distributed import free_port
    from stateroom.parallel.watch import EXIT_STATUS

    found = run_two(tmp_path, free_port(), when=when, call=call, on=on, lives=lives)
    other, text = found[1 - on]
    assert other == (EXIT_STATUS if lives else 1), text
    assert found[on][0] == (0 if lives else 1), found[on][1]
    reason = "no room for" if when == "start" else "could not be read"
    last = text.strip().splitlines()[-1] if not lives else next(line for line in text.splitlines() if line.startswith("stateroom.errors"))
    for message in (last, *([] if lives else [found[on][1].strip().splitlines()[-1]])):
        assert "stateroom.errors" in message and reason in message and f"rank {on}" in message and str(tmp_path) in message
