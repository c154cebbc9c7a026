"""Saves that nobody asks for, what is kept of them, and the end of a job that is told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from engine_jobs import listen, new_engine, train
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import error_of
from stateroom.__main__ import main
from stateroom.checkpoint.directory import Tag, tags
from stateroom.checkpoint.interval import Every, Schedule, daly_interval_s
from stateroom.checkpoint.retention import PINNED, pin, prune, superfluous, unpin
from stateroom.checkpoint.verifying import verify


def lost_share(interval_s, save_s, mtbf_s):
    """Return the share of time that is not progress, for failures that come at a constant rate (Daly's model, no restart time)."""
    import math

    useful = interval_s
    total = mtbf_s * (math.exp((interval_s + save_s) / mtbf_s) - 1)
    return 1 - useful / total


@given(save_s=st.floats(0.1, 600), ratio=st.floats(20, 1e5))
def test_the_interval_loses_least(save_s, ratio):
    """No interval near the chosen one wastes noticeably less."""
    mtbf_s = save_s * ratio
    chosen = daly_interval_s(save_s, mtbf_s)
    best = min(lost_share(chosen * factor / 50, save_s, mtbf_s) for factor in range(10, 250))
    assert lost_share(chosen, save_s, mtbf_s) <= best * 1.02 + 1e-9


def test_saving_that_takes_half_the_time_between_failures_is_done_all_the_time():
    assert daly_interval_s(100, 40) == 40


def test_when_a_save_is_due():
    now = [0.0]
    by_steps = Schedule(Every(steps=3), lambda: now[0])
    assert [by_steps.due_by_steps(step) for step in range(1, 7)] == [False, False, True, False, False, True]
    assert not by_steps.due_by_time() and by_steps.active and not Schedule(Every()).active
    by_time = Schedule(Every(minutes=2), lambda: now[0])
    found = []
    for now[0] in (0, 119, 120, 121):
        found.append(by_time.due_by_time())
        if found[-1]:
            by_time.saved(1.0)
    assert found == [False, False, True, False]
    by_cost = Schedule(Every(mtbf_hours=10), lambda: now[0])
    assert by_cost.due_by_time(), "the first save measures the cost"
    by_cost.saved(5.0)
    assert not by_cost.due_by_time() and by_cost.interval_s() == daly_interval_s(5.0, 36000)
    now[0] += by_cost.interval_s()
    assert by_cost.due_by_time()


def some_tags(folder, steps, pinned=(), verified=(), broken=()):
    found = []
    for step in steps:
        path = folder / f"s{step}"
        path.mkdir()
        for name, chosen in ((PINNED, pinned), ("verified", verified)):
            if step in chosen:
                (path / name).touch()
        manifest = {"counters": {"global_steps": step}, "created": float(step)}
        found.append(Tag(path.name, path, manifest, "broken" if step in broken else ""))
    return sorted(found, key=lambda tag: tag.age, reverse=True)


def test_what_is_kept(tmp_path):
    found = some_tags(tmp_path, range(1, 11), pinned={2}, verified={3, 4}, broken={1})
    doomed = superfluous(found, "s7", keep_last=2, keep_every=5)
    assert {tag.name for tag in doomed} == {"s3", "s6", "s8"}  # kept: 10 9 | 5 10 | pinned 2 | verified 4 | latest 7 | broken 1


@settings(deadline=None)
@given(keep_last=st.integers(1, 12), every=st.none() | st.integers(1, 5), verified=st.sets(st.integers(1, 10)), named=st.integers(1, 10))
def test_the_newest_the_last_verified_and_the_latest_always_stay(tmp_path_factory, keep_last, every, verified, named):
    found = some_tags(tmp_path_factory.mktemp("keep"), range(1, 11), verified=verified)
    doomed = {tag.name for tag in superfluous(found, f"s{named}", keep_last, every)}
    assert "s10" not in doomed and f"s{named}" not in doomed
    assert not verified or f"s{max(verified)}" not in doomed
    assert all(f"s{step}" not in doomed for step in range(11 - keep_last, 11))


def kept_while_training(folder, use_async):
    """8 steps with a save at every second one, of which the last 2 are kept, and those at multiples of 4."""
    section = {"async": use_async, "dir": folder, "save_every_steps": 2, "keep_last": 2, "keep_every": 4}
    engine = new_engine("gpt", 2, checkpoint=section)
    engine.client_state = {"note": "kept by saves that nobody asked for"}
    train(engine, "gpt", 12)
    engine.destroy()
    engine = new_engine("gpt", 0)
    _, client = engine.load_checkpoint(folder)
    steps = engine.global_steps
    engine.destroy()
    return steps, client


@pytest.mark.parametrize("use_async", [False, True])
def test_saves_by_steps_and_retention(pools, tmp_path, use_async):
    for steps, client in pools(2).run(kept_while_training, str(tmp_path), use_async):
        assert steps == 12 and client == {"note": "kept by saves that nobody asked for"}
    names = sorted((tag.name for tag in tags(tmp_path)), key=lambda name: int(name.removeprefix("global_step")))
    assert names == ["global_step4", "global_step8", "global_step10", "global_step12"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "latest"])


def by_time(folder, section):
    """The clock of rank 0 decides; rank 1's is an hour ahead."""
    engine = new_engine("gpt", 3, checkpoint={"dir": folder, **section})
    lines, now = listen(engine), [0.0 if engine.global_rank == 0 else 3600.0]
    engine.saving._schedule._clock = lambda: now[0]
    engine.saving._schedule._last = now[0]
    for step in range(6):
        now[0] += 25.0
        train(engine, "gpt", 1, first=step)
    engine.destroy()
    return [line for line in lines if line.startswith("saved")]


def test_saves_by_time_are_agreed_between_ranks(pools, tmp_path):
    pools(2).run(by_time, str(tmp_path / "a"), {"save_every_minutes": 1})
    assert {tag.name for tag in tags(tmp_path / "a")} == {"global_step3", "global_step6"}
    pools(2).run(by_time, str(tmp_path / "b"), {"auto_interval": True, "mtbf_hours": 1})
    assert "global_step1" in {tag.name for tag in tags(tmp_path / "b")}


def bad_sections():
    found = []
    for section in ({"save_every_steps": 2}, {"save_on_sigterm": True}, {"auto_interval": True, "dir": "x"}):
        found.append(error_of(lambda section=section: new_engine("gpt", 0, checkpoint=section)))
    return found


def test_a_save_that_nobody_asks_for_needs_a_place_and_a_rate(pools):
    for kind, text in pools(1).run(bad_sections)[0]:
        assert kind == "ConfigError" and ("set checkpoint.dir or run_dir" in text or "mtbf_hours" in text)


JOB = """
import sys
sys.path[:0] = {path!r}
from engine_jobs import new_engine, train
engine = new_engine("gpt", 2, checkpoint={{"dir": {folder!r}, "save_on_sigterm": True, "async": {use_async}}})
print("ready", flush=True)
step = 0
while True:
    train(engine, "gpt", 1, first=step)
    step += 1
"""


@pytest.mark.parametrize("use_async", [pytest.param(False, marks=pytest.mark.full), True])
def test_sigterm_saves_once_and_ends_with_its_status(tmp_path, use_async):
    """Only rank 1 gets the signal; both ranks save and end."""
    path = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    script = JOB.format(path=path, folder=str(tmp_path), use_async=use_async)
    from stateroom.parallel.distributed import free_port

    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    heads = []
    for process in ranks:
        for line in process.stdout:
            heads.append(line)
            if line.startswith("ready"):
                break
    ranks[1].send_signal(signal.SIGTERM)
    outs = [process.communicate(timeout=90)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [143, 143], (heads, outs)
    (tag,) = tags(tmp_path)
    assert not tag.problem and verify(tmp_path) == []
    assert f"SIGTERM: saved at step {tag.manifest['counters']['global_steps']}" in outs[0]


def test_pinned_checkpoints_stay(pools, tmp_path):
    pools(1).run(several, str(tmp_path), 4)
    pin(tmp_path, "global_step1")
    assert [tag.name for tag in prune(tmp_path, 1)] == ["global_step3", "global_step2"]
    unpin(tmp_path, "global_step1")
    assert verify(tmp_path, "global_step1") == []
    assert prune(tmp_path, 1) == [], "the last one that was verified stays"
    assert verify(tmp_path, "global_step4") == []
    assert [tag.name for tag in prune(tmp_path, 1)] == ["global_step1"]


def several(folder, count):
    engine = new_engine("gpt", 0)
    for step in range(count):
        train(engine, "gpt", 1, first=step)
        engine.save_checkpoint(folder)
    engine.destroy()


def test_commands(pools, tmp_path, capsys):
    def ckpt(*args):
        status = main(["ckpt", *map(str, args)])
        said = capsys.readouterr()
        return status, said.out + said.err

    pools(1).run(several, str(tmp_path), 3)
    status, text = ckpt("verify", tmp_path, "--all")
    assert status == 0 and text.count("every byte is what was written") == 3
    path = tmp_path / "global_step2" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    status, text = ckpt("verify", tmp_path, "--tag", "global_step2", "--json")
    assert status == 1 and str(path) in text and '"low"' in text
    status, text = ckpt("prune", tmp_path, "--keep_last", 1, "--pin", "global_step1")
    assert status == 0 and f"deleted {tmp_path / 'global_step2'}" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "global_step3", "latest"]
    assert ckpt("verify", tmp_path / "nothing")[0] == 1
    assert ckpt("verify")[0] == 2
    status, text = ckpt("ls", tmp_path)
    assert status == 0 and "global_step3" in text
    assert ckpt("show", tmp_path)[0] == 0
    status, text = ckpt("diff", tmp_path, tmp_path, "--tag_a", "global_step1", "--tag_b", "global_step3")
    assert status == 1 and "blocks.0.up.weight" in text
    assert ckpt("diff", tmp_path, tmp_path)[0] == 0
