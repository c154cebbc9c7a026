"""The example's model and data keep what training relies on: causality, relative positions, reproducible starts and windows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "llama"


def _load(name: str) -> ModuleType:
    """Import a file of the example under a name that no other test can mean."""
    spec = importlib.util.spec_from_file_location(f"example_llama_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


model, data, plot, sample = (_load(name) for name in ("model", "data", "plot", "sample"))
SMALL = model.LlamaConfig(vocab_size=50, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=16)
IDS = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(1))


def build(config: object = SMALL, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return model.Llama(config)


def test_logits_have_the_shape_and_an_untrained_model_guesses_evenly() -> None:
    llama = build()
    assert llama(IDS).shape == (2, 16, 50)
    assert float(llama(IDS, IDS.roll(-1, 1)).detach()) == pytest.approx(np.log(50), abs=0.05)


def test_no_position_sees_a_later_one() -> None:
    llama, changed = build(), IDS.clone()
    changed[:, 9:] = 0
    torch.testing.assert_close(llama(changed)[:, :9], llama(IDS)[:, :9])
    assert not torch.allclose(llama(changed)[:, 9:], llama(IDS)[:, 9:])


def test_attention_scores_depend_on_the_distance_alone() -> None:
    rope = model.Rope(head_dim=8, max_seq_len=16, theta=10_000.0)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    scores = rope(q.expand(1, 1, 16, 8))[0, 0] @ rope(k.expand(1, 1, 16, 8))[0, 0].T
    for distance in range(16):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert not torch.allclose(scores[5, 5], scores[5, 3])


def test_grouped_heads_equal_key_and_value_heads_repeated() -> None:
    grouped, full = build(), build(model.LlamaConfig(**{**vars(SMALL), "num_kv_heads": 4}))
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if "wk" in name or "wv" in name:
            weights[name] = weight.view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(weights)
    torch.testing.assert_close(full(IDS), grouped(IDS))


def test_a_model_from_the_meta_device_comes_to_life_module_by_module() -> None:
    expected = build(seed=7)
    with torch.device("meta"):
        llama = model.Llama(SMALL)
    torch.manual_seed(7)
    for module in llama.modules():
        if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()
    for (name, ours), (_, theirs) in zip(llama.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert torch.equal(llama(IDS), expected(IDS))


def test_tied_embeddings_are_one_parameter() -> None:
    tied = build(model.LlamaConfig(**{**vars(SMALL), "tied": True}))
    assert tied.lm_head.weight is tied.embedding.weight
    assert sum(p.numel() for p in build().parameters()) - sum(p.numel() for p in tied.parameters()) == 50 * 32


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        model.LlamaConfig(num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match="dim=36"):
        model.LlamaConfig(dim=36)


def test_a_few_steps_learn() -> None:
    llama = build()
    optimizer = torch.optim.AdamW(llama.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = llama(IDS[:, :-1], IDS[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.5


def test_the_same_seed_draws_the_same_text_and_temperature_zero_needs_none() -> None:
    llama = build().train()
    first = sample.generate(llama, [1, 2], 20, max_seq_len=16, seed=3)
    assert first == sample.generate(llama, [1, 2], 20, max_seq_len=16, seed=3)
    assert len(first) == 22 and llama.training
    assert first != sample.generate(llama, [1, 2], 20, max_seq_len=16, seed=4)
    assert sample.generate(llama, [1], 5, 16, temperature=0, seed=0) == sample.generate(llama, [1], 5, 16, temperature=0, seed=1)


def test_windows_follow_the_seed_and_cover_the_text_once() -> None:
    tokens = np.arange(101, dtype=np.uint16)
    windows = data.TextDataset(tokens, seq_len=10, seed=5)
    x, y = windows[3]
    assert x.dtype == torch.int64 and torch.equal(y, x + 1)
    assert torch.equal(x, data.TextDataset(tokens, seq_len=10, seed=5)[3][0])
    assert sorted(int(windows[i][0][0]) for i in range(len(windows))) == list(range(0, 100, 10))
    assert list(windows.order) != list(data.TextDataset(tokens, 10, seed=6).order)
    with pytest.raises(ValueError, match="shorter seq_len"):
        data.TextDataset(tokens, seq_len=101)


def test_files_fall_on_one_side_each_wherever_they_lie(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"m{number}.py").write_text("pass\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_x.py").write_text("pass\n")
    files = data.source_files(tmp_path)
    train, valid = data.split_files(files, tmp_path)
    assert len(files) == 200 and files == sorted(files)
    assert not set(train) & set(valid) and set(train) | set(valid) == set(files)
    assert 1 <= len(valid) <= 30
    assert data.split_files(files[50:], tmp_path)[1] == [f for f in valid if f in files[50:]]


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library = tmp_path / "lib"
    library.mkdir()
    for number in range(60):
        (library / f"m{number}.py").write_text(f"def name_{number}(x):\n    return x + {number}  # é\n" * 5)
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    return library


def test_bytes_come_back_as_text(small_library: Path, tmp_path: Path) -> None:
    corpus = data.load_corpus(tmp_path / "cache", None)
    assert corpus.vocab_size == 256 and corpus.train.max() < 256 and len(corpus.valid) > 0
    assert corpus.decode(corpus.encode("naïve")) == "naïve"
    assert not (tmp_path / "cache").exists()


def test_bpe_is_built_once_by_the_first_rank_and_again_when_the_text_changes(small_library: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder, calls = tmp_path / "cache", []
    first = data.load_corpus(folder, 300, is_first=True, barrier=lambda: calls.append(sorted(p.suffix for p in folder.iterdir())))
    assert calls == [[".json", ".npz"]]  # whole when the others are let through, and no part left beside it
    stamps = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    second = data.load_corpus(folder, 300, is_first=False)
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == stamps
    assert np.array_equal(first.train, second.train) and np.array_equal(first.valid, second.valid)
    assert second.train.max() < second.vocab_size <= 300 and second.bytes_per_token > 1
    assert second.decode(second.encode("return é")) == "return é"
    (small_library / "m0.py").write_text("another text\n")
    data.load_corpus(folder, 300)
    assert len(list(folder.iterdir())) == 4


def test_a_missing_tokenizers_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SystemExit, match=r"stateroom\[data\]"):
        data.load_corpus(tmp_path, 300)


def test_the_loss_curve_is_a_picture_and_a_missing_matplotlib_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = {"step": [1, 2, 3], "loss": [3.0, 2.0, 1.5], "valid": [(0, 3.0), (2, 2.2), (3, 1.6)]}
    if importlib.util.find_spec("matplotlib"):
        assert str(tmp_path) in plot.plot_history(history, tmp_path / "loss.png")
        assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "stateroom[bench]" in plot.plot_history(history, tmp_path / "other.png")
