"""Models of transformers that come to life sharded: from_pretrained, resizing, generating, saving, and reading only one's own bytes."""

from __future__ import annotations

import functools

import hf_jobs
import pytest
import torch
from hf_jobs import launched, llama, llama_config

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3},
    "units": {"min_numel": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
IDS = [[5, 6, 7, 8, 9]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with one file, and one with the same weights in several."""
    hf_jobs.quiet()
    folder = tmp_path_factory.mktemp("models")
    llama().save_pretrained(folder / "one")
    llama().save_pretrained(folder / "many", max_shard_size="40KB")
    assert len(list((folder / "many").glob("*.safetensors"))) > 2
    return folder


def is_sharded(model):
    """Whether every parameter rests as this rank's share: nothing whole is left behind any of them."""
    from stateroom.zero.parameter import slot_of

    units = [slot_of(param).unit for param in model.parameters()]
    return all(unit.sharded and not unit.gathered and unit.full.untyped_storage().nbytes() == 0 for unit in units)


def shard_numel(model):
    from stateroom.zero.parameter import slot_of

    return sum(unit.shard.numel() for unit in {id(u): u for u in (slot_of(p).unit for p in model.parameters())}.values())


def equal_to(model, wanted):
    """Names of parameters that differ from `wanted` (a plain model of the same kind)."""
    from stateroom.zero import GatheredParameters

    plain, different = dict(wanted.named_parameters()), []
    for name, param in model.named_parameters():
        with GatheredParameters(param):
            if not torch.equal(param, plain[name].to(param.dtype)):
                different.append(name)
    return different


def from_pretrained(folder, dtype):
    with launched():
        from transformers import AutoModelForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        keep = HfDeepSpeedConfig({**CONFIG, "bf16": {"enabled": dtype == torch.bfloat16}})
        model = AutoModelForCausalLM.from_pretrained(folder)
        listed = model.state_dict()
        found = {
            "sharded": is_sharded(model),
            "numel": shard_numel(model),
            "dtypes": {param.dtype for param in model.parameters()},
            "different": equal_to(model, llama()),
            "listed": {name: (tuple(value.shape), value.device.type) for name, value in listed.items()},
            "kept": sorted(name for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.nn.Parameter)),
            "rotary": model.model.rotary_emb.inv_freq.dtype,
        }
        del keep
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["one", "many"])
def test_from_pretrained_leaves_each_rank_its_share(hf_ranks, saved, kind, dtype):
    plain = llama()
    whole = sum(param.numel() for param in plain.parameters())
    for found in hf_ranks(2).run(from_pretrained, saved / kind, dtype):
        assert found["sharded"] and found["different"] == [] and found["dtypes"] == {dtype}
        assert found["numel"] <= whole // 2 + len(list(plain.parameters()))
        assert found["listed"] == {name: (tuple(value.shape), "meta") for name, value in plain.state_dict().items()}
        assert found["kept"] == sorted(name for name, _ in plain.named_parameters())
        assert found["rotary"] == torch.float32  # positions keep their precision whatever the parameters have


def whole_tensors_alive(folder):
    """Return, while from_pretrained runs, the most elements that gathered units held at once on this rank."""
    with launched():
        from stateroom.zero.unit import Unit
        from transformers.integrations import HfDeepSpeedConfig

        keep = HfDeepSpeedConfig(CONFIG)
        alive, most = {}, 0
        gather, release = Unit.gather, Unit.release

        def watch(method):
            def run(unit, *args, **kwargs):
                nonlocal most
                method(unit, *args, **kwargs)
                alive[id(unit)] = unit.layout.padded if unit.gathered else 0
                most = max(most, sum(alive.values()))

            return run

        Unit.gather, Unit.release = watch(gather), watch(release)
        try:
            from transformers import LlamaForCausalLM

            model = LlamaForCausalLM.from_pretrained(folder)
        finally:
            Unit.gather, Unit.release = gather, release
        del keep
        return most, max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())


def test_from_pretrained_gathers_one_module_at_a_time(hf_ranks, saved):
    for most, largest in hf_ranks(2).run(whole_tensors_alive, saved / "one"):
        assert largest <= most <= largest + 8  # the padding of a unit


def resize(folder):
    with launched():
        from stateroom.zero import GatheredParameters
        from transformers import LlamaForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        keep = HfDeepSpeedConfig(CONFIG)
        model = LlamaForCausalLM.from_pretrained(folder)
        torch.manual_seed(0)
        model.resize_token_embeddings(70, mean_resizing=False)
        plain = llama()
        with GatheredParameters(model.parameters()):
            sizes = [tuple(model.get_input_embeddings().weight.shape), tuple(model.get_output_embeddings().weight.shape)]
            kept = torch.equal(model.get_input_embeddings().weight[:64], plain.get_input_embeddings().weight)
            kept = kept and torch.equal(model.lm_head.weight[:64], plain.lm_head.weight)
        import stateroom

        engine, *_ = stateroom.initialize(model, config=CONFIG)
        ids = torch.tensor([[65, 66, 69]])
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        stepped = engine.was_step_applied()
        engine.destroy()
        del keep
        return sizes, kept, loss.item(), stepped


def test_resized_embeddings_keep_their_rows_and_train(hf_ranks, saved):
    first, second = hf_ranks(2).run(resize, saved / "one")
    assert first == second and first[0] == [(70, 32), (70, 32)] and first[1] and first[3]


# ---- generation and saving


def generate(folder, stage):
    with launched() as (rank, _):
        import stateroom
        from transformers import LlamaForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        keep = HfDeepSpeedConfig({**CONFIG, "zero_optimization": {"stage": stage}})
        model = LlamaForCausalLM.from_pretrained(folder)
        engine, *_ = stateroom.initialize(model, config=keep.config)
        ids = torch.tensor(IDS)
        same = engine.module.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()
        different = engine.generate(ids, max_new_tokens=2 + 6 * rank, do_sample=False, pad_token_id=0).tolist()
        prompts = torch.tensor([[5, 6, 7, 8, 9][: 3 + rank]])
        ragged = engine.generate(prompts, max_new_tokens=3, do_sample=False, pad_token_id=0).tolist()
        loss = engine(input_ids=ids, labels=ids).loss  # training goes on afterwards
        engine.backward(loss)
        engine.step()
        saved_to = folder.parent / f"saved_{stage}"
        engine.module.save_pretrained(saved_to, is_main_process=rank == 0)
        state = engine.module_state_dict()
        engine.destroy()
        del keep
        return same, different, ragged, state, saved_to


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.full)])
def test_generate_and_save_pretrained(hf_ranks, saved, stage):
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.from_pretrained(saved / "one")

    def wanted(ids, count):
        return plain.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0).tolist()

    found = hf_ranks(2).run(generate, saved / "one", stage)
    for rank, (same, different, ragged, *_) in enumerate(found):
        assert same == wanted(IDS[0], 6)
        assert different == wanted(IDS[0], 2 + 6 * rank)
        assert ragged == wanted(IDS[0][: 3 + rank], 3)
    *_, state, saved_to = found[0]
    back = LlamaForCausalLM.from_pretrained(saved_to).state_dict()
    assert back.keys() == state.keys() and all(torch.equal(back[name], value) for name, value in state.items())


def seq2seq():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, dropout_rate=0.0, **sizes))


def generate_from_encoder(held):
    with launched() as (rank, _):
        import stateroom
        from transformers.integrations import HfDeepSpeedConfig

        keep = HfDeepSpeedConfig(CONFIG)
        model = seq2seq()
        engine, *_ = stateroom.initialize(model, config=CONFIG)
        engine.eval()
        with stateroom.zero.GatheredParameters(model, enabled=held):
            written = model.generate(torch.tensor(IDS), max_new_tokens=4 + rank, do_sample=False).tolist()
        engine.destroy()
        del keep
        return written


@pytest.mark.parametrize("held", [True, False])
def test_an_encoder_decoder_generates(hf_ranks, held):
    """Its encoder is called by itself; held, its weights are whole meanwhile."""
    hf_jobs.quiet()
    for rank, written in enumerate(hf_ranks(2).run(generate_from_encoder, held)):
        assert written == seq2seq().eval().generate(torch.tensor(IDS), max_new_tokens=4 + rank, do_sample=False).tolist()


# ---- reading only what a rank owns


def read_into_sharded(folder):
    with launched():
        import stateroom
        from stateroom.hf import load_safetensors
        from transformers import LlamaForCausalLM

        with stateroom.zero.Init():
            model = LlamaForCausalLM(llama_config())
        before = equal_to(model, llama())
        loaded = load_safetensors(model, folder)
        return len(before), equal_to(model, llama()), is_sharded(model), loaded.read_bytes, shard_numel(model)


def read_into_engine(folder, stage, bf16):
    """A model that starts on the meta device; the engine brings it to life, then each rank reads its share."""
    with launched():
        import stateroom
        from stateroom.hf import load_safetensors
        from stateroom.utils import safe_get_full_fp32_param
        from transformers import LlamaForCausalLM

        with torch.device("meta"):
            model = LlamaForCausalLM(llama_config())
        config = {**CONFIG, "zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16}}
        engine, *_ = stateroom.initialize(model, config=config)
        loaded = load_safetensors(engine, folder)
        plain = llama()
        masters = all(
            torch.equal(safe_get_full_fp32_param(param), plain.get_parameter(name).to(param.dtype).float())
            for name, param in model.named_parameters()
        )
        different = equal_to(model, plain)
        ids = torch.tensor(IDS)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        found = different, masters, loss.item(), loaded.read_bytes
        engine.destroy()
        return found


@pytest.mark.parametrize("kind", ["one", "many"])
def test_a_rank_reads_its_own_bytes_and_no_others(hf_ranks, saved, kind):
    whole = 4 * sum(param.numel() for param in llama().parameters())
    found = hf_ranks(2).run(read_into_sharded, saved / kind)
    for before, different, sharded, read_bytes, numel in found:
        assert before > 0 and different == [] and sharded
        assert read_bytes <= 4 * numel
    assert sum(read_bytes for *_, read_bytes, _ in found) == whole


@pytest.mark.parametrize(("stage", "bf16"), [(3, False), (3, True), (2, True), pytest.param(0, True, marks=pytest.mark.full)])
def test_an_engine_is_filled_from_files(hf_ranks, saved, stage, bf16):
    hf_jobs.quiet()
    plain = llama().to(torch.bfloat16 if bf16 else torch.float32)
    ids = torch.tensor(IDS)
    wanted = plain(input_ids=ids, labels=ids).loss.item()
    whole = 4 * sum(param.numel() for param in plain.parameters())
    found = hf_ranks(2).run(read_into_engine, saved / "many", stage, bf16)
    for different, masters, loss, _ in found:
        assert different == [] and masters and loss == pytest.approx(wanted, rel=1e-6)
    assert sum(read_bytes for *_, read_bytes in found) == whole


def other_names(folder):
    """The base model from a file of the whole one, the whole from a file of the base, and what is refused."""
    with launched() as (rank, _):
        import stateroom
        from stateroom.errors import CheckpointError
        from stateroom.hf import load_safetensors
        from stateroom.zero import GatheredParameters
        from transformers import LlamaForCausalLM, LlamaModel

        messages = []

        def refused(model, source, **options):
            try:
                load_safetensors(model, source, **options)
            except CheckpointError as error:
                messages.append(str(error))

        with stateroom.zero.Init():
            base, whole = LlamaModel(llama_config()), LlamaForCausalLM(llama_config())
        loose = load_safetensors(base, folder / "one", strict=False)
        base_equal = equal_to(base, llama().model) == []
        if rank == 0:
            llama().model.save_pretrained(folder / "base")
        torch.distributed.barrier()
        part = load_safetensors(whole, folder / "base", strict=False)
        refused(base, folder / "one")
        refused(whole, folder / "base")
        refused(LlamaForCausalLM(llama_config(hidden_size=16)), folder / "one")
        refused(whole, folder / "nowhere")
        with torch.device("meta"):
            refused(LlamaForCausalLM(llama_config()), folder / "one")
        with GatheredParameters(whole.parameters()):
            refused(whole, folder / "one")
        plain = LlamaForCausalLM(llama_config())
        load_safetensors(plain, folder / "one")
        equal = all(torch.equal(a, b) for a, b in zip(plain.parameters(), llama().parameters(), strict=True))
        return base_equal, loose.unexpected, part.missing, equal, messages


def test_names_with_and_without_the_base_prefix_and_what_is_refused(hf_ranks, saved):
    for base_equal, unexpected, missing, equal, messages in hf_ranks(2).run(other_names, saved):
        assert base_equal and equal and unexpected == ["lm_head.weight"] and missing == ["lm_head.weight"]
        hints = ["unexpected ['lm_head.weight']", "missing ['lm_head.weight']", "shapes differ", "no model.safe", "meta", "Gathered"]
        assert len(messages) == len(hints) and all(hint in text for hint, text in zip(hints, messages, strict=True)), messages


def tied(folder):
    with launched() as (rank, _):
        import stateroom
        from stateroom.hf import load_safetensors
        from transformers import LlamaForCausalLM

        config = llama_config(tie_word_embeddings=True)
        if rank == 0:
            llama(tie_word_embeddings=True).save_pretrained(folder / "tied")
        torch.distributed.barrier()
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
            model.tie_weights()
        engine, *_ = stateroom.initialize(model, config=CONFIG)
        load_safetensors(engine, folder / "tied")
        different = equal_to(model, llama(tie_word_embeddings=True))
        first = engine._zero3_consolidated_16bit_state_dict()
        shared = not first or first["lm_head.weight"] is first["model.embed_tokens.weight"]
        names = sorted(first)
        engine.destroy()
        return different, shared, names


def test_tied_weights_are_read_once_and_stay_tied_in_the_saved_state(hf_ranks, saved):
    (different, shared, names), (also, _, none) = hf_ranks(2).run(tied, saved)
    assert different == also == [] and shared and none == []
    assert names == sorted(llama(tie_word_embeddings=True).state_dict())


def finish_by_hand(folder):
    """What libraries do with a sharded model before an engine has it: pad a bias, copy a head; and a rank that reads alone."""
    with launched() as (rank, _):
        import copy

        from stateroom.errors import RankError
        from stateroom.zero import GatheredParameters
        from stateroom.zero.parameter import slot_of
        from transformers import BertConfig, BertForMaskedLM, LlamaForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        keep = HfDeepSpeedConfig(CONFIG)
        model = LlamaForCausalLM.from_pretrained(folder)
        head = copy.deepcopy(model.lm_head)
        model.model.norm.weight.data.fill_(1.0 + rank)  # as in a constructor, what rank 0 wrote is kept
        for layer in model.model.layers:
            copy.deepcopy(layer)
        with GatheredParameters(model.model.norm.weight):
            written = model.model.norm.weight.detach().clone()
        open_now = sum(not is_sharded(layer) for layer in model.model.layers)
        torch.manual_seed(0)
        config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
        bert = BertForMaskedLM(config)
        if rank == 0:
            bert.save_pretrained(folder.parent / "bert")
        torch.distributed.barrier()
        different = equal_to(BertForMaskedLM.from_pretrained(folder.parent / "bert"), bert)  # its tied head pads a bias
        message = ""
        if rank == 0:
            comm = slot_of(model.lm_head.weight).unit.comm
            comm.meet = functools.partial(comm.meet, timeout_s=0.2)
            try:
                model.lm_head.weight.sum()
            except RankError as error:
                message = str(error)
        torch.distributed.barrier()
        del keep
        return torch.equal(head.weight, llama().lm_head.weight), written, open_now, different, message


def test_sharded_parameters_are_brought_to_libraries_that_finish_a_model(hf_ranks, saved):
    for rank, (copied, written, open_now, different, message) in enumerate(hf_ranks(2).run(finish_by_hand, saved / "one")):
        assert copied and torch.equal(written, torch.ones(32)) and open_now <= 1 and different == []
        assert rank or ("'weight'" in message and "[1] of 2 never called it" in message)
