"""Drives that are missing, read-only, full, failing or without direct I/O; runs beside each other and runs that were killed."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from unittest import mock

import pytest
from models import build
from offload_jobs import go_on, offload, same, start, train, with_lines
from oracle import error_of
from training import config_for, master_weights

NVME = ("nvme", "nvme")


def refusal(zero, **extra):
    """Return the error of initialize() on this rank."""
    import stateroom

    return error_of(lambda: stateroom.initialize(build("gpt"), config=config_for(0, "fp32", 1, zero_optimization=zero, **extra)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_that_does_not_exist_is_named(pools, tmp_path, ranks):
    for kind, message in pools(ranks).run(refusal, offload(3, *NVME, str(tmp_path / "nothing"))):
        assert kind == "ConfigError"
        assert "nothing" in message and "mount the drive or make the folder" in message


def test_a_folder_that_cannot_be_written_is_named(pools):
    ((kind, message),) = pools(1).run(refusal, offload(3, *NVME, "/proc"))  # not even root writes there
    assert kind == "ConfigError"
    assert "/proc" in message and "cannot be written" in message


def test_a_drive_too_small_is_refused_with_both_numbers(pools, tmp_path):
    for kind, message in pools(2).run(refusal_when_small, str(tmp_path)):
        assert kind == "ConfigError"
        assert "has 8,192 bytes free" in message and "rank 1" in message and "Nothing was written" in message
    assert os.listdir(tmp_path) == []


def refusal_when_small(folder):
    """On rank 1 only the drive is small; both ranks must hear of it."""
    import torch.distributed as dist

    small = mock.Mock(f_bavail=2, f_frsize=4096)
    patch = mock.patch("os.statvfs", return_value=small) if dist.get_rank() == 1 else mock.patch("os.getpid", os.getpid)
    with patch:
        return refusal(offload(3, *NVME, folder))


def refusal_when_host_is_small():
    with mock.patch("psutil.virtual_memory", return_value=mock.Mock(available=50_000)):
        return refusal(offload(2, "cpu"), bf16={"enabled": True})


def test_a_host_too_small_is_refused_with_both_numbers(pools):
    ((kind, message),) = pools(1).run(refusal_when_host_is_small)
    assert kind == "ConfigError"
    assert "109,312 bytes of host memory and 50,000 are available" in message  # 16 bytes for each of 6,832 elements


def test_no_room_is_found_before_any_state_changes(pools, tmp_path):
    """Room is reserved while the states are built, so a drive that others fill meanwhile stops the start and not the training."""
    ((kind, message),) = pools(1).run(refusal_when_full, str(tmp_path))
    assert kind == "EngineError"
    assert "no room for" in message and "'exp_avg_sq'" in message and "make room" in message and str(tmp_path) in message
    assert pools(1).run(reservations_while_training, str(tmp_path)) == [0]


def refusal_when_full(folder):
    """There is room for all but the last state."""
    from stateroom.zero.tiers.drive import Drive

    real = Drive.reserve

    def reserve(drive, state, *args):
        code = {"exp_avg_sq": errno.ENOSPC}.get(state)
        with mock.patch("os.posix_fallocate", side_effect=OSError(code, os.strerror(code))) if code else mock.patch("os.getpid", os.getpid):
            real(drive, state, *args)

    with mock.patch.object(Drive, "reserve", reserve):
        return refusal(offload(3, *NVME, folder))


def reservations_while_training(folder):
    """Return how often room is asked for once the engine is there."""
    engine = start("gpt", offload(3, *NVME, folder))
    with mock.patch("os.posix_fallocate", side_effect=OSError(errno.ENOSPC, "full")) as asked:
        go_on(engine, "gpt", 2)
    engine.destroy()
    return asked.call_count


@contextmanager
def failing(call, code, after):
    """Let the os-level `call` fail with `code` after so many calls that succeed."""
    real, count = getattr(os, call), [0]

    def fail(*args):
        count[0] += 1
        if count[0] > after:
            raise OSError(code, os.strerror(code))
        return real(*args)

    with mock.patch(f"os.{call}", fail):
        yield count


def errors_of_a_failing_drive(folder, call, after):
    """Return the error of a step while the drive fails, and whether an engine can be had afterwards."""
    engine = start("gpt", offload(3, *NVME, folder))
    go_on(engine, "gpt", 1)
    with failing(call, errno.EIO, after) as count:
        error = error_of(lambda: go_on(engine, "gpt", 1, first=1))
        assert count[0] > after
    engine.destroy()
    losses, *_ = train("gpt", offload(3, *NVME, folder))
    return error, losses


@pytest.mark.parametrize(("call", "what"), [("pwrite", "written"), ("preadv", "read")])
@pytest.mark.parametrize("after", [0, *(pytest.param(after, marks=pytest.mark.full) for after in (3, 9))])
def test_a_failing_drive_stops_the_step_with_its_name(pools, tmp_path, call, what, after):
    (((kind, message), losses),) = pools(1).run(errors_of_a_failing_drive, str(tmp_path), call, after)
    assert kind == "EngineError", message
    assert f"could not be {what}" in message and str(tmp_path) in message and "last checkpoint" in message
    assert losses == pools(1).run(train, "gpt", {"stage": 3})[0][0]


def train_without_direct_io(folder):
    real, refused = os.open, []

    def open_buffered(path, flags, *rest, **kwargs):
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **kwargs)

    with mock.patch("os.open", open_buffered):
        result = train("gpt", offload(3, *NVME, folder))
    assert refused
    return result


def test_without_direct_io_one_line_says_so_and_nothing_changes(pools, tmp_path):
    wanted = pools(2).run(train, "gpt", {"stage": 3})
    said = []
    for (mine, lines), theirs in zip(pools(2).run(with_lines, train_without_direct_io, str(tmp_path)), wanted, strict=True):
        same(mine, theirs)
        said.append([line for line in lines if "without direct I/O" in line])
    assert [len(lines) for lines in said] == [1, 0]
    assert str(tmp_path) in said[0][0]


def test_a_file_system_in_memory_is_as_good(pools, tmp_path):
    """A real one, whether or not its version takes direct I/O."""
    wanted = pools(2).run(train, "gpt", {"stage": 3})
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        try:
            os.close(os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT))
            expected = [0, 0]
        except OSError:
            expected = [1, 0]
        found = pools(2).run(with_lines, train, "gpt", offload(3, *NVME, folder))
    for (mine, _), theirs in zip(found, wanted, strict=True):
        same(mine, theirs)
    assert [sum("without direct I/O" in line for line in lines) for _, lines in found] == expected


def test_pinning_without_an_accelerator_is_said_once(pools):
    counts = []
    for zero in (offload(2, "cpu", pin_memory=True), offload(2, "cpu")):
        for _, lines in pools(2).run(with_lines, train, "mlp", zero):
            counts.append(sum("no memory is page-locked" in line for line in lines))
    assert counts == [1, 0, 0, 0]


@pytest.mark.parametrize("ratio", [-0.1, 1.5])
def test_a_ratio_outside_0_to_1_is_refused(pools, ratio):
    ((kind, message),) = pools(1).run(refusal, offload(3, "cpu", ratio=ratio))
    assert kind == "ConfigError"
    assert "zero_optimization.offload_optimizer.ratio" in message


class Counting:
    """Stands for an optimizer whose step does something for all its tensors together."""

    def __new__(cls, params):
        import torch

        class Together(torch.optim.SGD):
            def step(self, closure=None):
                self.calls = getattr(self, "calls", 0) + 1
                return super().step(closure)

        return Together(params, lr=0.1, momentum=0.9)


def unknown_optimizer(folder, device, **extra):
    import stateroom

    config = config_for(0, "fp32", 1, zero_optimization=offload(3, device, "none", folder), **extra)
    config.pop("optimizer")
    engine, optimizer, *_ = stateroom.initialize(build("gpt"), config=config, optimizer=Counting)
    go_on(engine, "gpt", 2)
    calls = optimizer.inner.calls
    engine.destroy()
    return calls


def test_an_unknown_optimizer_is_stepped_as_one_or_refused(pools, tmp_path):
    assert pools(1).run(unknown_optimizer, str(tmp_path), "cpu") == [2]
    assert pools(1).run(unknown_optimizer, str(tmp_path), "nvme", zero_allow_untested_optimizer=True)[0] > 2
    ((kind, (name, message, _)),) = pools(1).outcomes(unknown_optimizer, str(tmp_path), "nvme")
    assert (kind, name) == ("error", "ConfigError")
    assert "Together" in message and "zero_allow_untested_optimizer" in message


# ---- files


def open_in(folder):
    """Return the files under `folder` that this process holds open."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return [link for link in links if os.path.exists(link) or os.path.islink(link) if os.readlink(link).startswith(str(folder))]


def two_engines_in_one_folder(folder):
    """Two runs of different models take turns in one folder."""
    zero = offload(3, *NVME, folder)
    first, second = start("gpt", zero), start("mlp", zero, "momentum")
    assert open_in(folder)
    listed, losses = [], []
    for step in range(3):
        losses.append((go_on(first, "gpt", 1, first=step), go_on(second, "mlp", 1, first=step)))
        listed += os.listdir(folder)
    result = (losses, master_weights(first), master_weights(second), listed)
    first.destroy()
    still = len(open_in(folder))
    del second
    gc.collect()
    return *result, still, len(open_in(folder))


@pytest.mark.full
def test_runs_in_one_folder_do_not_meet_and_leave_nothing(pools, tmp_path):
    wanted = [pools(2).run(train, "gpt", {"stage": 3}), pools(2).run(train, "mlp", {"stage": 3}, "momentum")]
    for rank, (losses, gpt, mlp, listed, still, left) in enumerate(pools(2).run(two_engines_in_one_folder, str(tmp_path))):
        assert [loss for (one, _), _ in losses for loss in one] == wanted[0][rank][0]
        assert [loss for _, (one, _) in losses for loss in one] == wanted[1][rank][0]
        for found, expected in ((gpt, wanted[0]), (mlp, wanted[1])):
            assert all(found[name].equal(value) for name, value in expected[rank][2].items())
        assert listed == []  # no name is ever there for another run to find
        assert still > 0 and left == 0  # the second engine's files went with it, destroyed or not


KILLED = """
import os, sys
sys.path.insert(0, {tests!r})
from offload_jobs import *
engine = start("gpt", offload(3, "nvme", "nvme", {folder!r}))
go_on(engine, "gpt", 2)
print("trained", flush=True)
sys.stdin.read()
"""


@pytest.mark.full
def test_a_killed_run_leaves_no_file_and_no_bytes(pools, tmp_path):
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    script = KILLED.format(tests=tests, folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        lines = iter(process.stdout.readline, "")
        assert any(line.strip() == "trained" for line in lines)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
    wanted = pools(1).run(train, "mlp", {"stage": 3})
    same(pools(1).run(train, "mlp", offload(3, *NVME, str(tmp_path)))[0], wanted[0])  # another model in the same folder
