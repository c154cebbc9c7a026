"""A shard that was brought ahead and then not needed is forgotten: its memory goes, and nobody reads it after the values have changed."""

from __future__ import annotations

import threading

import torch
from offload_jobs import go_on, offload, start
from training import master_weights

NVME = ("nvme", "nvme")


def block_of(engine):
    return next(unit for unit in engine.sharded.units if unit.name == "blocks.0")


def preloaded(folder):
    """Bring a unit ahead, then let it go, write to it, and update it."""
    from stateroom.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
    from stateroom.zero import GatheredParameters

    engine = start("gpt", offload(3, *NVME, folder))
    go_on(engine, "gpt", 1)
    unit, weight = block_of(engine), engine.module.blocks[0].up.weight
    unit.preload()
    held = unit.full.untyped_storage().nbytes()
    unit.release()
    left = unit.full.untyped_storage().nbytes()

    unit.preload()
    safe_set_full_fp32_param(weight, torch.full(weight.shape, 0.25))
    with GatheredParameters([weight]):
        written = weight.detach().clone()
    safe_set_full_fp32_param(weight, torch.zeros(weight.shape))

    loss = engine(torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long))
    engine.backward(loss)
    unit.preload()  # before the update, and no unit is gathered in one
    engine.step()
    master = safe_get_full_fp32_param(weight)
    with GatheredParameters([weight]):
        updated = weight.detach().clone()
    engine.destroy()
    return held, left, written, updated, master


def test_values_that_changed_meanwhile_are_read_anew(pools, tmp_path):
    for held, left, written, updated, master in pools(2).run(preloaded, str(tmp_path)):
        assert held > 0 and left == 0
        assert bool((written == 0.25).all())
        assert bool(updated.any())
        assert torch.equal(updated, master)


def released_while_read(folder):
    """Hold the drive's reads back; return whether a release ended before them, and what the memory held then."""
    engine = start("gpt", offload(3, *NVME, folder))
    before = master_weights(engine)
    unit = block_of(engine)
    drive, go_on_reading, began = unit.residence.shard.drive, threading.Event(), threading.Event()
    real = drive.transfer

    def transfer(direction, *args):
        began.set()
        go_on_reading.wait(30)
        real(direction, *args)

    drive.transfer = transfer
    unit.preload()
    began.wait(30)
    release = threading.Thread(target=unit.release)
    release.start()
    release.join(0.3)
    early = not release.is_alive()
    if early:  # the reads would write to memory that is gone
        unit.full.untyped_storage().resize_(unit.full_bytes)
    go_on_reading.set()
    release.join(30)
    drive.transfer = real
    after = master_weights(engine)
    same = all(torch.equal(before[name], after[name]) for name in before)
    engine.destroy()
    return early, same


def test_memory_is_not_freed_under_a_read(pools, tmp_path):
    assert pools(1).run(released_while_read, str(tmp_path)) == [(False, True)]
