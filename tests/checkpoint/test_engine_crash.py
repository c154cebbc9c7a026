"""A job that is killed while it saves loads again, from the last checkpoint or the one before; damaged files are named."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from engine_jobs import differences, listen, new_engine, states_of, train
from oracle import error_of
from ranks import forking
from stateroom.checkpoint.directory import find
from stateroom.checkpoint.native import NativeSource
from stateroom.checkpoint.retention import VERIFIED
from stateroom.checkpoint.verifying import verify, verify_folder
from torch import nn


class Countdown(nn.Module):
    """Every weight is minus the number of updates: any mixture of two checkpoints shows."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 33) for _ in range(3))
        for param in self.parameters():
            nn.init.zeros_(param)

    def forward(self, x):
        return sum(param.sum() for param in self.parameters()) * x


def countdown(stage, use_async):
    import stateroom

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
        "checkpoint": {"async": use_async, "keep_last": 2},
        "log_level": "error",
    }
    engine, *_ = stateroom.initialize(Countdown(), config=config, optimizer=lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.5))
    return engine


def save_until_killed(rank, world, rendezvous, folder, use_async, same_tag, pipe):
    """Load what there is, then save after every update; tell the parent of each checkpoint that is complete."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(rendezvous, world), rank=rank, world_size=world)
    engine = countdown(2, use_async)
    engine.load_checkpoint(folder)
    while True:
        engine.backward(engine(torch.ones(())))
        engine.step()
        step = engine.global_steps
        engine.save_checkpoint(folder, tag="only" if same_tag else None)
        if rank == 0:
            pipe.send(step - 1 if use_async else step)  # in the background the one before has been waited for


def check(folder, at_least):
    """The checkpoint that is found is whole, and no older than the last that was reported complete."""
    candidates, _ = find(folder, None)
    chosen = candidates[0]
    step = chosen.manifest["counters"]["global_steps"]
    assert step >= at_least
    assert verify_folder(chosen.path) == []
    source = NativeSource(chosen.path)
    momentum = 2 - 2 * 0.5**step
    for name in source.parameters:
        weight = sum(2 - 2 * 0.5**k for k in range(1, step + 1))
        assert torch.allclose(source.tensor(name, "fp32"), torch.tensor(-weight, dtype=torch.float32), rtol=1e-5), (name, step)
        assert torch.allclose(source.tensor(name, "momentum_buffer"), torch.tensor(momentum), rtol=1e-5)
    return step


def kill_many_times(folder, kills, use_async, same_tag, seed):
    """Start the job again and again, and kill all of it at random instants; return the steps that were found."""
    draw = random.Random(seed)
    done, steps = 0, []
    context = forking()
    for _ in range(kills):
        here, there = context.Pipe()
        rendezvous = tempfile.mktemp(prefix="crash-")
        ranks = [
            context.Process(target=save_until_killed, args=(rank, 2, rendezvous, str(folder), use_async, same_tag, there), daemon=True)
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        while done <= (steps[-1] if steps else 0):  # until something new is complete
            assert here.poll(90), "the job did not come to its next save"
            done = max(done, here.recv())
        time.sleep(draw.uniform(0, 0.15))  # the instant of the crash, not a synchronisation
        for process in ranks:
            os.kill(process.pid, signal.SIGKILL)
        for process in ranks:
            process.join()
        with contextlib.suppress(EOFError, OSError):
            while here.poll():
                done = max(done, here.recv())
        Path(rendezvous).unlink(missing_ok=True)
        steps.append(check(folder, done))
    return steps


@pytest.mark.parametrize(
    ("use_async", "same_tag"), [(True, False), *(pytest.param(False, same, marks=pytest.mark.full) for same in (False, True))]
)
def test_a_job_killed_while_it_saves_loads_again(tmp_path, use_async, same_tag):
    steps = kill_many_times(tmp_path, 4, use_async, same_tag, 1)
    assert steps == sorted(steps) and steps[-1] > steps[0]


@pytest.mark.full
@pytest.mark.parametrize(("use_async", "same_tag"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_job_killed_100_times_while_it_saves_loads_again(tmp_path, use_async, same_tag):
    steps = kill_many_times(tmp_path, 100, use_async, same_tag, 2)
    assert steps == sorted(steps)


# ---- damage


def two_saves(folder):
    engine = new_engine("odd", 2)
    for tag in ("first", "second"):
        train(engine, "odd", 1)
        engine.save_checkpoint(folder, tag=tag)
    engine.destroy()


def load_damaged(folder, damages, stage):
    """For each damage: do it, try to load by tag and by `latest`, undo it. Return what was said and loaded."""
    engine = new_engine("odd", stage)
    lines, found = listen(engine), []
    engine.load_checkpoint(folder, tag="first")
    first = states_of(engine)
    for file, at, bit in damages:
        path = Path(folder) / "second" / file
        engine.comm.barrier()
        if engine.global_rank == 0:
            damage(path, at, bit)
        engine.comm.barrier()
        del lines[:]
        error = error_of(lambda: engine.load_checkpoint(folder, tag="second"))
        loaded, _ = engine.load_checkpoint(folder)
        fell_back = differences(first, states_of(engine)) == []
        engine.comm.barrier()
        if engine.global_rank == 0:
            shutil.copy(Path(folder) / "second" / f"whole-{file}", path)
        found.append((error, loaded, fell_back, "\n".join(lines)))
    engine.comm.barrier()
    engine.load_checkpoint(folder, tag="second")
    after = states_of(engine)
    engine.destroy()
    return found, differences(first, after)


def damage(path, at, bit):
    """Flip a bit, or cut the file where `bit` is negative."""
    content = bytearray(path.read_bytes())
    if bit < 0:
        content = content[:at]
    else:
        content[at] ^= 1 << bit
    path.write_bytes(content)


def damages_of(folder, count, seed):
    """Draw bit flips over all files, most of them in the data, and some truncations."""
    draw = random.Random(seed)
    files = sorted(path for path in (folder / "second").iterdir() if path.name != VERIFIED)  # an empty mark
    data = [path for path in files if path.suffix == ".distcp"]
    keep_copies(files)
    drawn = []
    for number in range(count):
        path = draw.choice(data if number % 2 else files)
        size = path.stat().st_size
        drawn.append((path.name, draw.randrange(size), -1 if number % 5 == 4 else draw.randrange(8)))
    return drawn


def keep_copies(files):
    for path in files:
        shutil.copy(path, path.with_name(f"whole-{path.name}"))


def check_damages(pools, folder, count, seed):
    pools(2).run(two_saves, str(folder))
    assert verify(folder, "second") == []
    drawn = damages_of(folder, count, seed)
    for file, at, bit in drawn:
        damage(folder / "second" / file, at, bit)
        problems = verify(folder, "second")
        assert problems and all(file in str(problem) for problem in problems), (file, at, bit, problems)
        if file.endswith(".distcp") and bit >= 0:
            assert all(problem.low <= at < problem.high and problem.key for problem in problems)
        shutil.copy(folder / "second" / f"whole-{file}", folder / "second" / file)
    check_loads(pools, folder, drawn, stage=3)


def check_loads(pools, folder, drawn, stage):
    for found, changed in pools(2).run(load_damaged, str(folder), drawn, stage):
        assert changed, "after all that the whole checkpoint loads, and it is another one"
        for (file, at, bit), (error, loaded, fell_back, said) in zip(drawn, found, strict=True):
            assert error[0] in ("CheckpointError", "DamagedError") and file in error[1], (file, at, bit, error)
            if file.endswith(".distcp") and bit >= 0:
                low, high = error[1].split("bytes [")[1].split(")")[0].split(", ")
                assert int(low) <= at < int(high)
            assert loaded == str(folder / "first") and fell_back and file in said


def test_damage_is_named_and_the_checkpoint_before_is_loaded(pools, tmp_path):
    check_damages(pools, tmp_path, 12, 1)


@pytest.mark.full
def test_any_damage_is_named(pools, tmp_path):
    check_damages(pools, tmp_path, 200, 2)


def test_damage_to_a_state_is_found_while_weights_travel(pools, tmp_path):
    """At stages 1 and 2 ranks send each other the weights while they read optimizer states, one of which is damaged on one rank."""
    pools(2).run(two_saves, str(tmp_path))
    files, draw, drawn = sorted((tmp_path / "second").glob("*.distcp")), random.Random(3), []
    keep_copies(files)
    while len(drawn) < 4:
        path = files[len(drawn) % len(files)]
        at = draw.randrange(path.stat().st_size)
        damage(path, at, 0)
        if any("exp_avg" in (problem.key or "") for problem in verify(tmp_path, "second")):
            drawn.append((path.name, at, 0))
        damage(path, at, 0)
    assert len(files) == 2 and verify(tmp_path, "second") == []
    check_loads(pools, tmp_path, drawn, stage=2)


def test_no_byte_of_a_data_file_may_change_unseen(pools, tmp_path):
    """Header, data, trailer and padding: every 127th byte, which falls on all of them."""
    pools(1).run(two_saves, str(tmp_path))
    path = tmp_path / "second" / "__0_0.distcp"
    whole = path.read_bytes()
    for at in range(0, len(whole), 127):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        (problem, *_) = verify_folder(tmp_path / "second")
        assert problem.low <= at < problem.high
