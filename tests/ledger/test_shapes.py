"""Parameters of public models equal what their makers state, and what transformers builds; bad sizes are refused by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stateroom.ledger.problems import LedgerError
from stateroom.ledger.shapes import ModelShape, active_parameters, blocks, count_parameters, known_model, layer_parameters, read_shape
from stateroom.ledger.shapes.catalogue import catalogue
from stateroom.ledger.shapes.hf import _TYPES, shape_from_config

ENTRIES = {entry.shape.name: entry for entry in catalogue().values()}
NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_intermediate_size": 1408},
    "nemotron": {"num_key_value_heads": 8},
}
UNBUILDABLE = {"dbrx"}  # its class cannot be built from its own default config
COPIES = {"kimi_k2"}  # deepseek_v3 under another name, which transformers does not have


@pytest.mark.parametrize("name", ENTRIES)
def test_the_table_counts_what_the_makers_state(name):
    entry = ENTRIES[name]
    if entry.published is not None:
        assert count_parameters(entry.shape).total == pytest.approx(entry.published, rel=0.011)
    if entry.active is not None:
        assert active_parameters(entry.shape) == pytest.approx(entry.active, rel=0.02)
    assert entry.shape.source


@pytest.mark.parametrize("kind", sorted(set(_TYPES) - UNBUILDABLE - COPIES))
def test_a_config_json_counts_what_transformers_builds(kind):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **NEEDED.get(kind, {}))
    classes = {"t5": transformers.AutoModelForSeq2SeqLM, "bert": transformers.AutoModel, "vit": transformers.AutoModel}
    with torch.device("meta"):
        model = classes.get(kind, transformers.AutoModelForCausalLM).from_config(config)
    assert count_parameters(shape_from_config(config.to_dict())).total == sum(p.numel() for p in model.parameters())


def test_sums_add_up_and_parts_are_what_blocks_say():
    for name in ("llama3-8b", "deepseek-v3", "t5-large", "gemma2-9b", "gpt-oss-20b"):
        shape = known_model(name).shape
        counted = count_parameters(shape)
        assert counted.total == sum(block.repeat * block.numel for block in blocks(shape))
        assert counted.to_dict()["total"] == sum(term["value"] for term in counted.to_dict()["terms"])
        assert layer_parameters(shape) in {block.numel for block in blocks(shape)}
        without = count_parameters(shape, embeddings="none").total
        assert without <= count_parameters(shape, embeddings="no input").total < counted.total  # tied: the head is the table


def test_names_are_found_whatever_their_separators_and_nearest_ones_are_named():
    assert read_shape("Llama-3.1 8B") is known_model("llama3.1-8b").shape
    with pytest.raises(LedgerError, match=r"unknown model 'lama3-8b'; nearest: .*llama3-8b"):
        read_shape("lama3-8b")
    with pytest.raises(LedgerError, match=r"no file nothing.json"):
        read_shape("nothing.json")


def test_a_config_without_a_model_type_or_of_an_unknown_one_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"hidden_size": 64, "num_hidden_layers": 2}))
    with pytest.raises(LedgerError, match=r"names no model_type.*llama.*hidden, layers, heads"):
        read_shape(path)
    path.write_text(json.dumps({"model_type": "llama5", "hidden_size": 64}))
    with pytest.raises(LedgerError, match=r"unknown model_type 'llama5'; nearest: llama"):
        read_shape(path)
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    with pytest.raises(LedgerError, match=r"needs vocab_size"):
        read_shape(path)


def test_an_hjson_file_with_the_ledgers_own_keys(tmp_path):
    path = tmp_path / "mine.hjson"
    path.write_text(
        "{\n  # sizes\n  vocab: 1000\n  hidden: 64\n  layers: 2\n  heads: 4\n  ffn: 256\n  mixture: {experts: 4, top_k: 2, ffn: 32}\n}"
    )
    shape = read_shape(path)
    assert (shape.name, shape.mixture.experts, shape.mixture_layers) == ("mine", 4, 2)
    path.write_text("{vocab: 10, hidden: 64, layers: 2, heads: 4, fnn: 9}")
    with pytest.raises(LedgerError, match=r"unknown size 'fnn'; nearest: ffn"):
        read_shape(path)
    path.write_text("{vocab: 10, hidden: 64, layers: 2, heads: 4, mixture: {expert: 4}}")
    with pytest.raises(LedgerError, match=r"mixture cannot be read.*experts"):
        read_shape(path)


@pytest.mark.parametrize(
    "sizes, says",
    [
        ({"heads": 3}, r"hidden 64 does not divide by heads 3; give head_dim, or heads 2 or 4"),
        ({"heads": 8, "kv_heads": 3}, r"heads 8 do not divide by kv_heads 3; nearest legal: [24] or [24]"),
        ({"norm": "batch"}, r"norm is 'batch'; known: rms, layernorm"),
        ({"ffn": 0}, r"ffn is 0, but 2 layers have a plain MLP"),
        ({"layers": 0}, r"layers is 0"),
    ],
)
def test_sizes_that_do_not_fit(sizes, says):
    with pytest.raises(LedgerError, match=says):
        ModelShape(**{"name": "x", "vocab": 10, "hidden": 64, "layers": 2, "heads": 4, "ffn": 128, **sizes})


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 4), st.booleans(), st.booleans())
def test_parameters_grow_with_every_size(layers, width, kv, gated, tied):
    def count(**more):
        given_sizes = {
            "vocab": 100,
            "hidden": 64 * width,
            "layers": layers,
            "heads": 4 * kv,
            "ffn": 96 * width,
            "kv_heads": kv,
            "head_dim": 16,
        }
        return count_parameters(ModelShape(name="x", gated=gated, tied=tied, **{**given_sizes, **more})).total

    base = count()
    assert (
        count(layers=layers + 1) > base and count(vocab=101) > base and count(ffn=96 * width + 1) > base and count(kv_heads=4 * kv) > base
    )


def test_a_module_on_the_meta_device_is_read_to_the_element():
    torch = pytest.importorskip("torch")
    from models import TiedGPT
    from stateroom.ledger.shapes.module import read_module

    with torch.device("meta"):
        model = TiedGPT(layers=3)
    facts = read_module(model, heads=2)
    assert facts.parameters == sum(p.numel() for p in model.parameters()) == sum(numel for _, numel, _, _ in facts.units)
    assert (facts.shape.layers, facts.shape.hidden, facts.shape.vocab, facts.shape.tied, facts.shape.gated) == (3, 16, 17, True, False)
    with pytest.raises(LedgerError, match=r"TiedGPT does not say heads; give it by name"):
        read_module(model)


def test_a_module_of_transformers_says_all():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from stateroom.ledger.shapes.module import read_module

    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=101
    )
    with torch.device("meta"):
        facts = read_module(transformers.LlamaForCausalLM(config))
    assert facts.difference == 0 and facts.shape.kv == 2
    assert [numel for name, numel, _, _ in facts.units if name != "root"] == [layer_parameters(facts.shape)] * 3
