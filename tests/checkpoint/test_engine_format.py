"""The pieces of the format without any rank: boxes, checksums, items, images, values, directories that become complete."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import shutil
import zipfile
import zlib
from collections import Counter, OrderedDict, deque
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stateroom.checkpoint import container, directory, image, portable
from stateroom.checkpoint.boxes import box_at, boxes
from stateroom.checkpoint.crc import combine
from stateroom.checkpoint.directory import commit, find, partial_path, tidy
from stateroom.checkpoint.manifest import pack_bounds, read_manifest, unpack_bounds, write_manifest
from stateroom.checkpoint.plan import Piece, place
from stateroom.checkpoint.values import from_json, to_json
from stateroom.errors import CheckpointError

shapes = st.lists(st.integers(1, 6), max_size=5).map(tuple)


@given(shape=shapes, data=st.data())
def test_boxes_cover_an_interval_once_and_in_order(shape, data):
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    found = boxes(shape, start, stop)
    assert len(found) <= max(2 * len(shape) - 1, 1)
    whole, seen = torch.arange(numel).view(shape), []
    for box in found:
        part = whole
        for axis, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(axis, offset, size)
        assert box_at(shape, int(part.flatten()[0]), part.numel()) == box
        seen += part.flatten().tolist()
    assert seen == list(range(start, stop))


@given(data=st.data())
def test_items_follow_one_another_and_none_is_too_long(data):
    """Whatever the pieces and the limit: items cover them in order, aligned, each with room for what stands around it."""
    limit_bytes = data.draw(st.integers(8, 200))
    framing = container.FRAMING._replace(limit_bytes=limit_bytes)
    pieces = []
    for number in range(data.draw(st.integers(0, 8))):
        shape = data.draw(shapes)
        start = data.draw(st.integers(0, prod(shape) - 1))
        pieces.append(
            Piece(str(number), shape, start, data.draw(st.integers(start + 1, prod(shape))), data.draw(st.sampled_from([1, 2, 4, 8])))
        )
    end, covered = 0, {piece.key: piece.start for piece in pieces}
    for item in place(pieces, framing):
        assert item.at - framing.header_bytes(len(item.sizes)) == end and end % framing.align == 0
        assert item.numel == prod(item.sizes) and item.numel * item.itemsize <= limit_bytes
        assert item.start == covered[item.key]
        covered[item.key] += item.numel
        end = framing.after(item.end)
    assert covered == {piece.key: piece.stop for piece in pieces}


@given(first=st.binary(max_size=80), second=st.binary(max_size=3000))
def test_checksums_of_joined_pieces(first, second):
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.uint16,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_item_is_what_torch_save_writes(dtype):
    """torch.load reads it without running code, zip tools find it whole, and its length follows from its shape."""
    for sizes in ((), (3,), (0,), (4, 5), (2, 1, 3, 1, 2, 1, 2, 1)):
        tensor = (torch.rand(sizes) * 10).to(dtype)
        frame = container.item_frame(sizes, dtype)
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        content = frame.header + data + frame.trailer(zlib.crc32(data))
        assert len(frame.header) == container.header_bytes(len(sizes)) and len(frame.header) % container.ALIGN == 0
        assert len(content) == container.item_bytes(len(sizes), len(data))
        loaded = torch.load(io.BytesIO(content), weights_only=True)
        assert loaded.dtype == dtype and loaded.shape == tensor.shape
        assert loaded.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)) or not tensor.numel()
        assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None


def test_items_of_huge_axes_have_room():
    """Lengths are promised before the pickle is made, so the largest must fit."""
    limit = container.ITEM_LIMIT_BYTES
    for sizes in ((limit,), (1,) * 11 + (limit,), (limit,) + (1,) * 11, (2,) * 30):
        container.item_frame(sizes, torch.float8_e5m2)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(image, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(image, "CHUNK_BYTES", 8192)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_an_image_is_the_items_one_behind_the_other(data, tmp_path_factory):
    """Streamed and staged writing give the same file, whose items load and whose checksums hold."""
    folder = tmp_path_factory.mktemp("image")
    pieces, values = [], {}
    for number in range(data.draw(st.integers(0, 30))):
        shape = data.draw(st.lists(st.integers(1, 40), max_size=3).map(tuple))
        start = data.draw(st.integers(0, prod(shape) - 1))
        stop = data.draw(st.integers(start + 1, prod(shape)))
        pieces.append(Piece(f"p{number}", shape, start, stop, 4))
        values[f"p{number}"] = (start, torch.randn(stop - start))
    items = place(pieces, container.FRAMING)
    tensors = [values[i.key][1][i.start - values[i.key][0] :][: i.numel] for i in items]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image, "BLOCK_BYTES", 4096)
        patch.setattr(image, "CHUNK_BYTES", 8192)
        streamed, staged, writer = image.Image(items, tensors), image.Image(items, tensors), image.ImageWriter()
        writer.write(streamed, folder / "a")
        copy, before = writer.stage(staged), [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor += 1  # what was staged may change
        writer.write(staged, folder / "b", copy)
        content = (folder / "a").read_bytes()
        assert len(content) == streamed.num_bytes
        assert (folder / "b").read_bytes() == content and staged.checksums == streamed.checksums
        for item, tensor, crcs in zip(items, before, streamed.checksums, strict=True):
            lead = container.header_bytes(len(item.sizes))
            loaded = torch.load(io.BytesIO(content[item.at - lead : item.end + container.TRAILER_BYTES]), weights_only=True)
            assert loaded.shape == item.sizes and torch.equal(loaded.flatten(), tensor)
            assert crcs == [zlib.crc32(content[a:b]) for a, b in image.segments(item.at, item.end)]
            assert image.joined_crc(item.at, item.end, crcs) == zlib.crc32(content[item.at : item.end])


def test_an_error_while_writing_ends_the_writer(tmp_path, small_blocks):
    """No thread waits for a buffer or a checksum that never comes."""
    items = place([Piece("p", (100_000,), 0, 100_000, 4)], container.FRAMING)
    whole = image.Image(items, [torch.zeros(100_000)])
    with pytest.raises(OSError, match="No such file"):
        image.ImageWriter().write(whole, tmp_path / "missing" / "file")

    class Full(image.Output):
        def write(self, buffer, at):
            if at >= 40_960:
                raise OSError(28, "No space left on device")
            super().write(buffer, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image, "Output", Full)
        for staged in (None, image.ImageWriter().stage(whole)):
            with pytest.raises(OSError, match="No space"):
                image.ImageWriter().write(whole, tmp_path / "file", staged)


def test_values_come_back_with_their_types():
    value = {
        "plain": [1, 1.5, True, None, "text", {"a": 1}],
        "odd floats": [math.inf, -math.inf],
        "containers": [(1, (2, 3)), {1: 2}, {"$x": 1}, Counter({3: 1}), OrderedDict(a=1), deque([1]), {4}, torch.Size((2, 3))],
        "tensors": [torch.tensor(3), torch.tensor([1.0, math.inf], dtype=torch.bfloat16), torch.float16],
        "numpy": [np.float32(0.1), np.arange(3), np.int64(2)],
    }
    back = from_json(json.loads(json.dumps(to_json(value, "x"), allow_nan=False)))
    flat, again = ([*itertools.chain(*v.values())] for v in (value, back))
    for a, b in zip(flat, again, strict=True):
        assert type(a) is type(b)
        assert bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else str(a) == str(b)
    assert math.isnan(from_json(to_json(math.nan, "x")))
    with pytest.raises(CheckpointError, match=r"scheduler\.a\[1\] holds a builtins\.object"):
        to_json({"a": [1, object()]}, "scheduler")


def test_own_files_load_without_code_or_are_refused_by_name():
    import argparse

    good = {"args": argparse.Namespace(lr=1), "numpy": np.random.get_state(), "scalar": np.float64(2), "set": {1}, "bytes": b"x"}
    back = portable.load(portable.dump(good, "client_state"), "file")
    assert back["args"] == good["args"] and np.array_equal(back["numpy"][1], good["numpy"][1]) and back["set"] == {1}
    with pytest.raises(CheckpointError, match=r"client_state\['a'\]\['b'\]\[1\] is a pathlib"):
        portable.dump({"a": {"b": [1, Path("x")]}}, "client_state")
    with pytest.raises(CheckpointError, match=r"client_state\['f'\] is a builtins\.function"):
        portable.dump({"f": lambda: 0}, "client_state")

    class Evil:
        def __reduce__(self):
            return os.mkdir, ("must-not-exist-either",)

    file = io.BytesIO()
    torch.save(Evil(), file)
    with pytest.raises(CheckpointError, match="cannot be read"):
        portable.load(file.getvalue(), "file")
    assert not Path("must-not-exist-either").exists()


@given(share=st.integers(1, 50), world=st.integers(1, 9))
def test_bounds_come_back(share, world):
    even = tuple(rank * share for rank in range(world + 1))
    assert unpack_bounds(pack_bounds(even), world) == even
    ragged = (*even[:-1], even[-1] + 1)
    assert unpack_bounds(pack_bounds(ragged), world) == ragged


# ---- a directory becomes complete


class Crash(Exception):
    """Stands for the end of the process."""


def written(folder, tag, step):
    """Write a tiny checkpoint up to the point where it is committed."""
    target = partial_path(folder, tag)
    target.mkdir(parents=True)
    (target / "data").write_bytes(b"%d" % step)
    facts = {"format": 1, "created": float(step), "counters": {"global_steps": step}, "save_latest": True}
    write_manifest(target, {**facts, "files": {"data": {"bytes": len(b"%d" % step)}}})


def crash_after(patch, count):
    """Let the `count`-th change of the file system, counted from 0, be the last one."""
    left = [count]

    def counted(function):
        def call(*args, **kwargs):
            if left[0] == 0:
                raise Crash
            left[0] -= 1
            return function(*args, **kwargs)

        return call

    for owner, name in ((Path, "rename"), (Path, "replace"), (shutil, "rmtree"), (directory, "write_durably"), (directory, "sync_folder")):
        patch.setattr(owner, name, counted(getattr(owner, name)))
    return left


@pytest.mark.parametrize("same_tag", [False, True])
def test_a_crash_between_any_two_steps_of_a_commit_leaves_a_checkpoint(tmp_path, same_tag):
    """Old and new under the same tag or under two: one of them is found, whole, and the next save tidies up."""
    for count in itertools.count():
        folder = tmp_path / str(count)
        written(folder, "a", 1)
        commit(folder, "a", True)
        tag = "a" if same_tag else "b"
        written(folder, tag, 2)
        with pytest.MonkeyPatch.context() as patch:
            left = crash_after(patch, count)
            with contextlib.suppress(Crash):
                commit(folder, tag, True)
        done = left[0] > 0

        def check(folder=folder):
            candidates, _ = find(folder, None)
            step = candidates[0].manifest["counters"]["global_steps"]
            assert (candidates[0].path / "data").read_bytes() == b"%d" % step
            return step

        steps = [check(), (tidy(folder), check())[1], (written(folder, "c", 3), commit(folder, "c", True), check())[2]]
        assert steps[0] in (1, 2) and steps[1] >= steps[0] and steps[2] == 3
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        if done:
            assert steps[0] == 2
            break
    assert count > (6 if same_tag else 4), "the test did not crash anywhere"


def test_what_may_be_loaded(tmp_path):
    """`latest` that names a broken or missing tag, no `latest`, no tag, half-written folders."""
    for tag, step in (("a", 1), ("b", 2), ("c", 3)):
        written(tmp_path, tag, step)
        commit(tmp_path, tag, True)
    assert [tag.name for tag in find(tmp_path, None)[0]] == ["c", "b", "a"]
    (tmp_path / "c" / "data").write_bytes(b"33")
    candidates, remarks = find(tmp_path, None)
    assert candidates[0].name == "b" and "data has 2 bytes instead of 1" in remarks[0]
    with pytest.raises(CheckpointError, match=r"data has 2 bytes instead of 1.*complete checkpoints in .*: b, a"):
        find(tmp_path, "c")
    with pytest.raises(CheckpointError, match=r"does not exist; complete checkpoints in .*: b, a"):
        find(tmp_path, "d")
    (tmp_path / "latest").write_text("nowhere")
    candidates, remarks = find(tmp_path, None)
    assert candidates[0].name == "b" and "'nowhere'" in remarks[0]
    (tmp_path / "latest").unlink()
    candidates, remarks = find(tmp_path, None)
    assert candidates[0].name == "b" and "is missing" in remarks[0]
    (tmp_path / ".x.partial").mkdir()
    assert find(tmp_path, None)[0][0].name == "b"
    assert ["half-written" in line for line in tidy(tmp_path)] == [True]
    assert find(tmp_path / "b", None)[0][0].path == tmp_path / "b"
    assert find(tmp_path / "nothing", None) == ([], [])


def test_a_newer_format_is_refused_with_a_way_out(tmp_path):
    written(tmp_path, "a", 1)
    commit(tmp_path, "a", True)
    manifest = read_manifest(tmp_path / "a")
    write_manifest(tmp_path / "a", {**manifest, "format": 99, "stateroom": "7.0"})
    with pytest.raises(CheckpointError, match=r"format 99, written by stateroom 7\.0.*update stateroom"):
        read_manifest(tmp_path / "a")


def test_a_damaged_manifest_is_seen(tmp_path):
    written(tmp_path, "a", 1)
    commit(tmp_path, "a", True)
    path = tmp_path / "a" / "manifest.json"
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match="damaged"):
            read_manifest(tmp_path / "a")


@pytest.mark.parametrize("tag", ["", ".hidden", "a/b", "latest"])
def test_tags_are_folder_names(tag):
    with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
        directory.check_tag(tag)
