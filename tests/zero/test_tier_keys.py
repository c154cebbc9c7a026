"""Every key of the offload and aio sections: what it changes is changed, and what it cannot change is said in one line."""

from __future__ import annotations

import threading

import pytest
from offload_jobs import go_on, offload, start, with_lines


def effects(zero, **extra):
    """Train a little and return what keys may set."""
    engine = start("wide", zero, **extra)
    go_on(engine, "wide", 1)
    tiers, update = engine.sharded.tiers, engine.optimizer.update
    tiles = [tile.stop - tile.start for unit in engine.sharded.units for tile in tiers.tiles_of(unit.index)]
    drives = [drive for drive in tiers.drives if drive._crew is not None]
    requests = {row: moved for drive in drives for row, moved in drive.moved.items()}
    found = {
        "rooms": update.rooms,
        "staging": (tiers.staging.count, tiers.staging.num_bytes),
        "threads": sum(thread.name.startswith("stateroom-swap") for thread in threading.enumerate()) // max(len(drives), 1),
        "largest request": max(-(-moved.num_bytes // moved.requests) for moved in requests.values()),
        "largest tile": max(tiles),
        "in host": sum(unit.shard.numel() for unit in engine.sharded.units if tiers.param_tiers[unit.index] == "cpu"),
        "left": sum(tiers.optimizer_tier(unit) != "device" for unit in engine.sharded.units),
    }
    engine.destroy()
    return found


def sections(folder, optimizer=None, params=None, **zero):
    section = offload(3, "nvme", "nvme", str(folder), **(optimizer or {}))
    section["offload_param"] |= params or {}
    return section | zero


HONOURED = [
    ({"optimizer": {"buffer_count": 4}}, {}, "rooms", 1),
    ({"optimizer": {"buffer_count": 8}}, {}, "rooms", 2),
    ({"optimizer": {"pipeline_read": False}}, {}, "rooms", 2),
    ({"optimizer": {"pipeline_read": False, "pipeline_write": False}}, {}, "rooms", 1),
    ({"optimizer": {"pipeline_read": True, "pipeline_write": True}}, {}, "rooms", 3),
    ({"optimizer": {"ratio": 0.0}}, {}, "left", 0),
    ({"params": {"buffer_count": 2}}, {}, "staging", (2, 1 << 20)),
    ({"params": {"buffer_size": 3000}}, {}, "staging", (5, 8192)),  # of two bytes each, in whole sectors
    ({}, {"aio": {"block_size": 5000}}, "staging", (5, 8192)),
    ({}, {"aio": {"queue_depth": 3}}, "threads", 3),
    ({"sub_group_size": 8192}, {}, "largest tile", 8192),
]


@pytest.mark.parametrize(("zero", "extra", "name", "value"), HONOURED)
def test_a_key_does_what_it_says(pools, tmp_path, zero, extra, name, value):
    (found,) = pools(1).run(effects, sections(tmp_path, **zero), **extra)
    assert found[name] == value, found


def test_what_the_keys_leave_open(pools, tmp_path):
    (found,) = pools(1).run(effects, sections(tmp_path))
    assert found == found | {"rooms": 3, "staging": (5, 1 << 20), "threads": 8, "largest tile": 4096, "in host": 0}
    assert found["left"] > 1
    (some,) = pools(1).run(effects, sections(tmp_path, params={"max_in_cpu": 50_000}))
    assert 0 < some["in host"] <= 50_000
    (small,) = pools(1).run(effects, sections(tmp_path), aio={"block_size": 4096})
    assert small["largest request"] == 4096 < found["largest request"]


EXPLAINED = [
    ("offload_optimizer", "fast_init", True),
    ("offload_optimizer", "super_offload", True),
    ("offload_optimizer", "cpuadam_cores_perc", 0.5),
    ("aio", "intra_op_parallelism", 2),
    ("aio", "single_submit", True),
    ("aio", "overlap_events", False),
    ("aio", "use_gds", True),
]


def build(zero, aio):
    start("mlp", zero, aio=aio).destroy()


def test_a_key_without_effect_has_its_line(pools, tmp_path):
    given = {section: {key: value for where, key, value in EXPLAINED if where == section} for section in ("offload_optimizer", "aio")}
    ((_, lines),) = pools(1).run(with_lines, build, sections(tmp_path, optimizer=given["offload_optimizer"]), given["aio"])
    for section, key, _ in EXPLAINED:
        about = [line for line in lines if f"{section}.{key}" in line]
        assert len(about) == 1, (key, lines)
