"""Bytes that go round between threads: all of them arrive, buffers are few, the first error ends it, nothing hangs."""

from __future__ import annotations

import threading

import pytest
from stateroom.checkpoint.flow import Buffers, in_turn, side_by_side

ITEMS = list(range(40))


def _fill(item, buffer):
    buffer.fill_(item)
    return item


class CountingBuffers(Buffers):
    def __init__(self):
        super().__init__(4096)
        self.made = set()

    def take(self):
        buffer = super().take()
        self.made.add(buffer.data_ptr())
        return buffer


@pytest.mark.parametrize("lanes", [0, 1, 2, 3])
def test_every_item_is_used_with_what_was_read_for_it(lanes):
    buffers, seen, lock = CountingBuffers(), [], threading.Lock()

    def use(item, buffer, got):
        assert got == item and bool((buffer == item).all())
        with lock:
            seen.append(item)

    if lanes:
        side_by_side(ITEMS, _fill, use, buffers, lanes)
    else:
        in_turn(ITEMS, _fill, use, buffers)
    assert sorted(seen) == ITEMS
    assert len(buffers.made) <= 2 * lanes + 1


def test_readers_wait_for_buffers_when_nobody_uses_what_they_read():
    buffers, release, reads = CountingBuffers(), threading.Event(), []
    full = threading.Event()

    def read(item, buffer):
        reads.append(item)
        if len(reads) == 3:
            full.set()
        return item

    thread = threading.Thread(target=side_by_side, args=(ITEMS, read, lambda *_: release.wait(60), buffers, 1))
    thread.start()
    assert full.wait(60)
    assert len(reads) == 3
    release.set()
    thread.join(60)
    assert not thread.is_alive() and reads == ITEMS and len(buffers.made) == 3


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("where", ["read", "use"])
@pytest.mark.parametrize("at", [0, 17, 39])
def test_an_error_ends_it_and_is_raised(lanes, where, at):
    buffers, done = Buffers(4096), {"read": [], "use": []}

    def step(name, item):
        if name == where and item == at:
            raise OSError(f"{name} {item}")
        done[name].append(item)
        return item

    with pytest.raises(OSError, match=f"{where} {at}"):
        side_by_side(ITEMS, lambda item, buffer: step("read", item), lambda item, *_: step("use", item), buffers, lanes)
    if lanes == 1:  # in order, so that what comes after the error is known
        assert done[where] == ITEMS[:at]
