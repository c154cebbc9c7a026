"""Real text without a download: the Python standard library's own sources, as bytes or as tokens of a BPE trained on them."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

SKIP_FOLDERS = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__"}
END = "<|end|>"  # stands between two files; in bytes mode a zero byte does
VALID_ONE_IN = 20


@dataclass(frozen=True)
class Corpus:
    """Token ids of both splits, and the way from text to ids and back."""

    train: np.ndarray
    valid: np.ndarray
    vocab_size: int
    bytes_per_token: float
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


class TextDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of seq_len ids with the ids that follow them, in an order shuffled once by the seed.

    The order is a function of the seed alone, so a run that continues finds the same window at the same index.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, seed: int = 0) -> None:
        self.tokens, self.seq_len = tokens, seq_len
        num_windows = (len(tokens) - 1) // seq_len
        if num_windows < 1:
            raise ValueError(f"{len(tokens)} tokens hold no window of seq_len={seq_len} and its targets; use a shorter seq_len")
        self.order = np.random.default_rng(seed).permutation(num_windows)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = int(self.order[index]) * self.seq_len
        window = torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))
        return window[:-1], window[1:]


def source_files(root: Path | None = None) -> list[Path]:
    """Return the standard library's .py files without its tests, sorted by path."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in SKIP_FOLDERS]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


def split_files(files: list[Path], root: Path) -> tuple[list[Path], list[Path]]:
    """Return (training, validation) files; a file's side depends on its name alone, so other files do not move it."""
    valid = [f for f in files if zlib.crc32(f.relative_to(root).as_posix().encode()) % VALID_ONE_IN == 0]
    return sorted(set(files) - set(valid)), valid


def load_corpus(folder: Path, vocab_size: int | None, is_first: bool = True, barrier: Callable[[], None] = lambda: None) -> Corpus:
    """Return the corpus as bytes (vocab_size None) or as BPE tokens, which are built once and kept in `folder`.

    The rank for which is_first holds builds, the others wait at the barrier; a host that does not see its files builds its own.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    train, valid = split_files(source_files(root), root)
    if vocab_size is None:
        return _bytes_corpus(train, valid)
    _need_tokenizers()
    sizes = [(f.relative_to(root).as_posix(), f.stat().st_size) for f in (*train, *valid)]
    key = zlib.crc32(json.dumps([vocab_size, VALID_ONE_IN, END, sizes]).encode())
    cache = folder / f"bpe-{vocab_size}-{key:08x}"  # other settings or another Python have another name
    if is_first and not _is_complete(cache):
        _build_bpe(cache, train, valid, vocab_size)
    barrier()
    if not _is_complete(cache):
        _build_bpe(cache, train, valid, vocab_size)
    return _read_bpe(cache)


def _bytes_corpus(train: list[Path], valid: list[Path]) -> Corpus:
    def joined(files: list[Path]) -> np.ndarray:
        return np.frombuffer(b"\0".join(f.read_bytes() for f in files), dtype=np.uint8)

    return Corpus(joined(train), joined(valid), 256, 1.0, lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace"))


def _need_tokenizers() -> None:
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        raise SystemExit("BPE tokens need the tokenizers package: pip install 'stateroom[data]', or train on --bytes") from None


def _is_complete(cache: Path) -> bool:
    return cache.with_suffix(".json").exists() and cache.with_suffix(".npz").exists()


def _build_bpe(cache: Path, train: list[Path], valid: list[Path], vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    begin = time.perf_counter()
    texts = [[f.read_text(encoding="utf-8", errors="replace") for f in files] for files in (train, valid)]
    num_bytes = sum(len(t.encode()) for side in texts for t in side)
    print(f"data: {len(train)} + {len(valid)} files, {num_bytes / 1e6:.1f} MB; training a BPE of {vocab_size} tokens …", flush=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=sys.stderr.isatty())
    tokenizer.train_from_iterator(texts[0], trainer, length=len(texts[0]))  # the validation text stays unseen
    print(f"data: tokenizer ready after {time.perf_counter() - begin:.1f} s; encoding …", flush=True)
    end = tokenizer.token_to_id(END)
    sides = {}
    for name, side in zip(("train", "valid"), texts, strict=True):
        ids = [np.array([*encoding.ids, end], dtype=np.uint16) for encoding in tokenizer.encode_batch(side)]
        sides[name] = np.concatenate(ids)
    cache.parent.mkdir(parents=True, exist_ok=True)
    bytes_per_token = num_bytes / sum(len(ids) for ids in sides.values())
    _replace(cache.with_suffix(".json"), lambda part: tokenizer.save(str(part)))
    _replace(cache.with_suffix(".npz"), lambda part: _save_npz(part, bytes_per_token=np.float64(bytes_per_token), **sides))
    count = len(sides["train"])
    print(f"data: {count:,} training tokens of {bytes_per_token:.2f} bytes, {time.perf_counter() - begin:.1f} s in all", flush=True)


def _save_npz(path: Path, **arrays: np.ndarray) -> None:
    with path.open("wb") as file:  # given a name, numpy would add a suffix to it
        np.savez(file, **arrays)


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write beside the path and rename, so that a reader sees the whole file or none."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    write(part)
    os.replace(part, path)


def _read_bpe(cache: Path) -> Corpus:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(cache.with_suffix(".json")))
    arrays = np.load(cache.with_suffix(".npz"))
    return Corpus(
        train=arrays["train"],
        valid=arrays["valid"],
        vocab_size=tokenizer.get_vocab_size(),
        bytes_per_token=float(arrays["bytes_per_token"]),
        encode=lambda text: tokenizer.encode(text).ids,
        decode=tokenizer.decode,
    )
