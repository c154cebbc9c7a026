"""Saving beside training: what is saved is what was there, training waits no longer than it must, and failures are said."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engine_jobs import differences, listen, new_engine, states_of, train
from stateroom.checkpoint.image import ImageWriter

ASYNC = {"checkpoint": {"async": True}}


@contextmanager
def staging_waits(go):
    """Let copying begin only when `go` is set."""
    stage = ImageWriter.stage

    def late(self, image):
        assert go.wait(60)
        return stage(self, image)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageWriter, "stage", late)
        yield


def announce(engine, go):
    """Set `go` when something asks whether it may write: whatever does not ask would find the copy never taken."""
    asked = engine.optimizer.before_write

    def ask():
        go.set()
        asked()

    engine.optimizer.before_write = ask
    for unit in engine.sharded.units:
        unit.before_write = ask


def step_of(engine):
    train(engine, "gpt", 1, first=5)


def gathered(engine):
    from stateroom.zero import GatheredParameters

    param = engine.module.blocks[0].up.weight
    with GatheredParameters(param, modifier_rank=0):
        param.data.fill_(7.0)


def set_master(engine):
    from stateroom.utils import safe_set_full_fp32_param

    param = engine.module.blocks[0].up.weight
    safe_set_full_fp32_param(param, torch.full(param.shape, 7.0))


def set_local(engine):
    from stateroom.utils import safe_get_local_fp32_param, safe_set_local_fp32_param

    param = engine.module.blocks[0].up.weight
    safe_set_local_fp32_param(param, torch.full_like(safe_get_local_fp32_param(param), 7.0))


def set_state(engine):
    from stateroom.utils import safe_set_full_optimizer_state

    param = engine.module.blocks[0].up.weight
    safe_set_full_optimizer_state(param, torch.full(param.shape, 7.0), "exp_avg")


def load_weights(engine):
    engine.load_module_state_dict({name: torch.full_like(value, 7.0) for name, value in engine.module_state_dict().items()})


def load_file(engine):
    engine.load_checkpoint(engine.earlier)


WRITERS = {f.__name__: f for f in (step_of, gathered, set_master, set_local, set_state, load_weights)}


def changed_while_copied(folder, stage, precision, writer):
    """Save, change states before the copy was taken, and return the states before, after, and those in the checkpoint."""
    engine = new_engine("gpt", stage, precision, **ASYNC)
    train(engine, "gpt", 2)
    before, go = states_of(engine), threading.Event()
    with staging_waits(go):
        engine.save_checkpoint(folder)
        announce(engine, go)
        WRITERS[writer](engine)
        after = states_of(engine)
        engine.saving.wait()
    fresh = new_engine("gpt", 0, precision)
    fresh.load_checkpoint(folder)
    saved = states_of(fresh)
    engine.destroy(), fresh.destroy()
    return before, after, saved


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("stage", "precision"), [(2, "bf16"), *(pytest.param(stage, "fp32", marks=pytest.mark.full) for stage in (0, 3))])
def test_nothing_changes_what_is_being_copied(pools, tmp_path, stage, precision, writer):
    """Every way to write weights or states asks first, and waits for the copy."""
    for before, after, saved in pools(2).run(changed_while_copied, str(tmp_path), stage, precision, writer):
        assert differences(before, saved) == []
        assert differences(before, after), "the writer changed nothing: the test shows nothing"


def forward_meanwhile(folder):
    """Forward and backward run while nothing has been copied yet; buffers that they change are saved as they were."""
    engine = new_engine("odd", 3, "bf16", **ASYNC)
    train(engine, "odd", 1)
    before, go = states_of(engine), threading.Event()
    with staging_waits(go):
        engine.save_checkpoint(folder)
        from engine_jobs import batch_any

        engine.backward(engine(*batch_any("odd", 3, engine.global_rank)))
        still_waiting = not engine.saving._saver._job.staged.is_set()
        go.set()
        engine.step()
        engine.saving.wait()
    record = engine.saving.last
    fresh = new_engine("odd", 1, "bf16")
    fresh.load_checkpoint(folder)
    saved = states_of(fresh)
    engine.destroy(), fresh.destroy()
    return before, still_waiting, saved, record


def test_forward_and_backward_do_not_wait(pools, tmp_path):
    for before, still_waiting, saved, record in pools(2).run(forward_meanwhile, str(tmp_path)):
        assert still_waiting
        assert differences(before, saved) == []
        assert record.error == "" and record.num_bytes > 0 and record.write_s > 0 and record.buffer_bytes >= record.num_bytes


def two_in_a_row(folder):
    engine = new_engine("gpt", 2, **ASYNC)
    lines, go = listen(engine), threading.Event()
    with staging_waits(go):
        engine.save_checkpoint(folder, tag="one")
        threading.Timer(0.2, go.set).start()
        engine.save_checkpoint(folder, tag="two")
    in_between = (Path(folder) / "one" / "manifest.json").exists()
    engine.destroy()
    return in_between, lines


def test_a_second_save_waits_for_the_first(pools, tmp_path):
    for in_between, lines in pools(2).run(two_in_a_row, str(tmp_path)):
        assert in_between
        said = [line for line in lines if "in flight" in line or line.startswith("saved")]
        assert ["one" in said[0] and "waiting" in said[0], "one" in said[1], "two" in said[2]] == [True] * 3
        assert "stall" in said[1] and "MB/s" in said[1]
    assert (tmp_path / "latest").read_text() == "two"


def broken_write(folder, use_async, bad_rank):
    """A save during which one rank's files may not grow; then a good one."""
    engine = new_engine("gpt", 2, checkpoint={"async": use_async})
    lines = listen(engine)
    engine.save_checkpoint(folder, tag="good")
    engine.saving.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    error = ""
    if engine.global_rank == bad_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        engine.save_checkpoint(folder, tag="bad")
        if use_async:
            engine.saving._saver._job.finished.wait()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    del lines[:]
    train(engine, "gpt", 1)
    at_next_step = list(lines)
    left = sorted(path.name for path in Path(folder).iterdir())
    engine.comm.barrier()
    latest = (Path(folder) / "latest").read_text()
    engine.save_checkpoint(folder, tag="after")
    engine.destroy()
    return error, at_next_step, left, latest


@pytest.mark.parametrize(
    ("use_async", "bad_rank"), [(True, 1), *(pytest.param(*case, marks=pytest.mark.full) for case in ((False, 0), (True, 0), (False, 1)))]
)
def test_a_failed_write_is_said_and_the_previous_checkpoint_stays(pools, tmp_path, use_async, bad_rank):
    pools(2).close()  # fresh ranks: the file of their store must stay below the limit too
    for error, at_next_step, left, latest in pools(2).run(broken_write, str(tmp_path), use_async, bad_rank):
        said = "\n".join(at_next_step) if use_async else error
        assert f"saving {tmp_path / 'bad'} failed: rank {bad_rank}: OSError: [Errno 27] File too large" in said, (error, at_next_step)
        assert left == ["good", "latest"] and latest == "good"
    assert (tmp_path / "latest").read_text() == "after"


ENDING = """
import resource, sys
sys.path[:0] = {path!r}
from engine_jobs import new_engine, train
engine = new_engine("gpt", 2, checkpoint={{"async": True}})
train(engine, "gpt", 1)
engine.save_checkpoint({folder!r}, tag="one")
engine.saving.wait()
{limit}
engine.save_checkpoint({folder!r}, tag="two")
"""
LIMIT = "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))"


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.full), True])
def test_the_end_of_the_process_waits_for_a_save_and_says_a_failure(tmp_path, fails):
    """The script ends right behind save_checkpoint, without destroy()."""
    path = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    script = ENDING.format(path=path, folder=str(tmp_path), limit=LIMIT if fails else "")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "latest").read_text() == ("one" if fails else "two")
    assert ("File too large" in done.stdout + done.stderr) == fails
    assert (tmp_path / "two").exists() != fails
