"""Collectives on flat buffers: right for any bounds, in rank order, counted, and recorded where a crash can be read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from stateroom.parallel.ring import Ring, read_ring


def gather_and_reduce(dtype_name, bounds, wire_name=None):
    """Return (gathered buffer, own reduced interval, counters) of one rank."""
    from stateroom.parallel import Collectives

    dtype = getattr(torch, dtype_name)
    comm = Collectives()
    full = torch.zeros(bounds[-1], dtype=dtype)
    low, high = bounds[comm.rank], bounds[comm.rank + 1]
    full[low:high] = torch.arange(low, high).to(dtype)
    comm.all_gather(full, bounds, state="parameters", unit="u").wait()
    grads = torch.arange(bounds[-1]).to(dtype) * (comm.rank + 1)
    wire = getattr(torch, wire_name) if wire_name else None
    comm.reduce_scatter(grads, bounds, state="gradients", unit="u", wire=wire).wait()
    both = torch.arange(bounds[-1]).to(dtype) * (comm.rank + 1)
    comm.all_reduce(both, bounds, state="gradients", unit="u").wait()
    traffic = {key: (t.calls, t.num_bytes, t.sent_bytes) for key, t in comm.snapshot().items()}
    records = [(r.kind, r.state, r.end_s is not None) for r in comm.ring.records()]
    return full, grads[low:high], both, traffic, records


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bounds", [(0, 4, 8, 12), (0, 0, 7, 9), (0, 5, 5, 5)])
def test_any_bounds(pools, dtype, bounds):
    for rank, (full, reduced, both, traffic, records) in enumerate(pools(3).run(gather_and_reduce, dtype, bounds)):
        expected = torch.arange(bounds[-1]).to(getattr(torch, dtype))
        assert torch.equal(full, expected)
        assert torch.equal(reduced, expected[bounds[rank] : bounds[rank + 1]] * 6)
        assert torch.equal(both, expected * 6)
        size = bounds[-1] * full.element_size()
        assert traffic["all_gather", "parameters"][:2] == (1, size)
        assert traffic["reduce_scatter", "gradients"][:2] == (2, 2 * size)
        assert ("all_gather", "parameters", True) in records


def order_of_sum():
    """Return the reduced value of 1e8, 1, -1e8 over three ranks: only one order of summation gives it."""
    from stateroom.parallel import Collectives

    comm = Collectives()
    value = torch.full((3,), (1e8, 1.0, -1e8)[comm.rank])
    comm.all_reduce(value, (0, 1, 2, 3), state="gradients", unit="u").wait()
    return value


def test_sums_run_in_rank_order_on_every_owner(pools):
    expected = (torch.tensor(1e8) + torch.tensor(1.0)) + torch.tensor(-1e8)
    for value in pools(3).run(order_of_sum):
        assert torch.equal(value, expected.expand(3))


def bf16_wire():
    """Return the sum of 1 + 2**-7 over ranks, sent as bf16 and added in fp32."""
    from stateroom.parallel import Collectives

    comm = Collectives()
    value = torch.full((4,), 1 + 2.0**-7)
    comm.reduce_scatter(value, tuple(4 * r // comm.world for r in range(comm.world + 1)), state="g", unit="u", wire=torch.bfloat16).wait()
    low = 4 * comm.rank // comm.world
    return value[low]


def test_a_bf16_wire_adds_in_fp32(pools):
    for value in pools(4).run(bf16_wire):
        assert value.item() == 4 * (1 + 2.0**-7)  # bf16 addition would round 3 + 3 * 2**-7


def missing_rank():
    """Only rank 0 comes; the others leave at once."""
    from stateroom.errors import RankError
    from stateroom.parallel import Collectives

    comm = Collectives()
    message = ""
    if comm.rank == 0:
        try:
            comm.meet("save_checkpoint()", timeout_s=0.5)
        except RankError as error:
            message = str(error)
    comm._meetings = 1  # the others skipped it on purpose
    return message


def test_a_missing_rank_is_named_within_the_wait(pools):
    message, *_ = pools(3).run(missing_rank)
    assert "[1, 2]" in message and "save_checkpoint()" in message


def test_ring_keeps_the_newest_and_is_read_after_a_kill(tmp_path):
    path = tmp_path / "rank_0.ring"
    code = f"""
        import os, signal
        from pathlib import Path
        from stateroom.parallel.ring import Ring
        ring = Ring(Path({str(path)!r}), capacity=8)
        for i in range(20):
            sequence = ring.start("all_gather", "parameters", f"layers.{{i}}", 100 + i)
            if i < 19:
                ring.end(sequence)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=os.environ)
    assert done.returncode == -signal.SIGKILL
    records = read_ring(path)
    assert [r.sequence for r in records] == list(range(13, 21))
    assert records[-1].unit == "layers.19" and records[-1].num_bytes == 119 and records[-1].end_s is None
    assert all(r.end_s is not None and r.end_s >= r.start_s for r in records[:-1])


def test_a_file_that_is_no_ring_is_refused(tmp_path):
    other = tmp_path / "x"
    other.write_bytes(b"something else" * 10)
    with pytest.raises(ValueError, match="not a collective ring"):
        read_ring(other)


def test_ring_without_a_file_works_in_memory():
    ring = Ring(None, capacity=4)
    ring.end(ring.start("broadcast", "control", "u", 1))
    assert [r.kind for r in ring.records()] == ["broadcast"]
