"""A unit's home on a drive: what is read after a write is what was written, however the threads are scheduled."""

from __future__ import annotations

import threading

import pytest
import torch
from stateroom.errors import EngineError
from stateroom.zero.tiers.drive import Crew, Drive
from stateroom.zero.tiers.home import DiskHome, Stored
from stateroom.zero.tiers.space import Space
from stateroom.zero.tiers.staging import Staging


def home_of(folder, numel=10_000, dtype=torch.float32, count=2, num_bytes=8192):
    drive = Drive(folder, 0, request_bytes=4096, requests=2)
    return DiskHome(drive, Staging(count, num_bytes, False), "exp_avg", dtype, Space(4096).add(0, 5, 5 + numel))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 4096, 10_001])
def test_what_was_stored_is_loaded(tmp_path, numel, dtype):
    home = home_of(tmp_path, numel, dtype)
    values = torch.arange(numel).to(dtype)
    home.store(values)
    out = torch.zeros(numel, dtype=dtype)
    home.load(out).wait()
    assert torch.equal(out, values)
    home.drive.close()


def test_a_read_waits_for_the_write_before_it(tmp_path):
    """The write is held back until a read begins, or for a while where none does: then the read has waited."""
    home = home_of(tmp_path, 1000)
    home.store(torch.zeros(1000))
    home.flush()
    read_began, real = threading.Event(), home.drive.transfer

    def transfer(direction, file, at, buffer):
        if direction == "read":
            real(direction, file, at, buffer)
            read_began.set()
        else:
            read_began.wait(0.5)
            real(direction, file, at, buffer)

    home.drive.transfer = transfer
    home.store(torch.ones(1000))
    out = torch.empty(1000)
    home.load(out).wait()
    assert bool((out == 1).all())
    home.drive.close()


def test_the_storage_that_is_filled_can_be_freed(tmp_path):
    """A gathered unit's buffer is resized to nothing when it is released."""
    home = home_of(tmp_path)
    out = torch.empty(10_000)
    home.load(out).wait()
    out.untyped_storage().resize_(0)
    assert out.untyped_storage().resizable()
    home.drive.close()


def test_slices_read_the_right_bytes_across_tiles(tmp_path):
    home = home_of(tmp_path)
    values = torch.randn(10_000)
    home.store(values)
    home.flush()
    for start, stop in ((0, 10_000), (4090, 4100), (4096, 4097), (9_999, 10_000), (17, 8193)):
        stored = Stored(home, start, stop)[1:] if stop - start > 1 else Stored(home, start, stop)
        first = start + (stop - start > 1)
        found = stored.bytes_at(0, stored.numel() * 4).view(torch.float32)
        assert torch.equal(found, values[first:stop])
    home.drive.close()


def test_a_failed_request_gives_its_buffer_back(tmp_path):
    """Else the next transfer would wait for ever."""
    home = home_of(tmp_path, count=1)
    home.drive.transfer, real = _fail, home.drive.transfer
    for _ in range(3):
        with pytest.raises(EngineError, match="no such luck"):
            home.load(torch.empty(10_000)).wait()
    home.drive.transfer = real
    home.store(torch.ones(10_000))
    out = torch.empty(10_000)
    home.load(out).wait()
    assert bool((out == 1).all())
    home.drive.close()


def _fail(*args):
    raise EngineError("no such luck")


def test_threads_end_with_their_crew():
    crew = Crew(3, "test-crew")
    assert crew.submit(lambda: None).result() is None
    crew.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-crew")]
