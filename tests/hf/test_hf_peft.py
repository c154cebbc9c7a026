"""LoRA by peft, through the Trainer and through accelerate: trains, leaves the base bit for bit, saves adapters that plain peft loads."""

from __future__ import annotations

import hf_jobs
import pytest
import torch
from hf_jobs import ACCUMULATION, LR, Samples, arguments, config_file, launched, llama, logs, plain_run


def with_lora(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    hf_jobs.quiet()
    folder = tmp_path_factory.mktemp("base")
    llama().save_pretrained(folder)
    return folder


def lora_with_trainer(folder, base, stage, resume):
    with launched() as (_, world):
        from transformers import AutoModelForCausalLM, Trainer

        args = arguments(folder, world, config_file(folder, stage))  # alive from here on: from_pretrained shards at stage 3
        model = with_lora(AutoModelForCausalLM.from_pretrained(base))
        trainer = Trainer(model, args, train_dataset=Samples())
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
        trainer.save_model(str(folder / "adapter"))
        state = {name: value.clone() for name, value in trainer.model_wrapped.module_state_dict().items()}
        trainer.model_wrapped.destroy()
        return logs(trainer), state


def same_base(state, plain):
    """Whether the frozen weights are bit for bit those of the plain model."""
    frozen = {name: value for name, value in state.items() if "lora_" not in name}
    wanted = {f"base_model.model.{name}": value for name, value in plain.state_dict().items()}
    wanted = {name if name in frozen else name.replace("_proj.weight", "_proj.base_layer.weight"): v for name, v in wanted.items()}
    return frozen.keys() == wanted.keys() and all(torch.equal(frozen[name], value) for name, value in wanted.items())


def check_adapter(folder, base, state, plain_model):
    """The saved folder holds adapters only; loaded and merged by plain peft it equals the plain run."""
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    saved = load_file(folder / "adapter_model.safetensors")
    lora = {name.replace(".default", ""): value for name, value in state.items() if "lora_" in name}
    assert saved.keys() == lora.keys() and all(torch.equal(saved[name], value) for name, value in lora.items())
    assert not (folder / "model.safetensors").exists()
    assert any(value.abs().max() > 1e-3 for name, value in saved.items() if "lora_B" in name), "lora_B starts at zero and was not trained"
    merged = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder).merge_and_unload().state_dict()
    wanted = plain_model.merge_and_unload().state_dict()
    assert merged.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(merged[name], value, rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.full)])
def test_lora_through_the_trainer(hf_ranks, tmp_path, base, stage):
    wanted, model = plain_run(tmp_path / "plain", lambda: with_lora(llama()), own_optimizer=True)
    (found, state), (_, others) = hf_ranks(2).run(lora_with_trainer, tmp_path, base, stage, False)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    assert same_base(state, llama()) and all(torch.equal(others[name], value) for name, value in state.items())
    check_adapter(tmp_path / "adapter", base, state, model)
    resumed, again = hf_ranks(2).run(lora_with_trainer, tmp_path, base, stage, True)[0]
    assert resumed == found and all(torch.equal(again[name], value) for name, value in state.items())


def lora_with_accelerate(folder, base, stage):
    with launched() as (_, world):
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
        from transformers import AutoModelForCausalLM

        options = {"gradient_accumulation_steps": ACCUMULATION, "gradient_clipping": 1.0, "zero3_save_16bit_model": True}
        plugin = DeepSpeedPlugin(zero_stage=stage, **options)
        accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
        model = with_lora(AutoModelForCausalLM.from_pretrained(base))
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=LR)
        model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(Samples(), batch_size=4 // world))
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        state = accelerator.get_state_dict(model)
        whole = accelerator.unwrap_model(model)
        kind = type(whole).__name__
        whole.save_pretrained(folder, is_main_process=accelerator.is_main_process, state_dict=state)
        state = {name: value.clone() for name, value in model.module_state_dict().items()}
        with torch.no_grad():  # the adapter can be switched off, as for a reference model in preference tuning
            batch = next(iter(loader))
            with whole.disable_adapter():
                reference = accelerator.gather(model(**batch).loss.reshape(1)).mean().item()
        accelerator.free_memory()
        return losses, state, kind, reference


def plain_loop():
    hf_jobs.quiet()
    model = with_lora(llama())
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=LR)
    losses = []
    for index, batch in enumerate(torch.utils.data.DataLoader(Samples(), batch_size=4)):
        loss = model(**batch).loss
        (loss / ACCUMULATION).backward()
        losses.append(loss.item())
        if (index + 1) % ACCUMULATION == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.full)])
def test_lora_through_accelerate(hf_ranks, tmp_path, base, stage):
    wanted, model = plain_loop()
    for losses, state, kind, reference in hf_ranks(2).run(lora_with_accelerate, tmp_path, base, stage):
        assert losses == pytest.approx(wanted, rel=1e-5) and kind == "PeftModelForCausalLM"
        assert same_base(state, llama())
        assert reference == pytest.approx(wanted[0], rel=1e-6)  # without the adapter it is the model as it was
    check_adapter(tmp_path, base, state, model)


def head_trained_whole(base):
    """A head trained whole beside the adapters: peft copies the sharded one."""
    with launched():
        import stateroom
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3},
            "units": {"min_numel": 0},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
        keep = HfDeepSpeedConfig(config)
        torch.manual_seed(0)
        lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
        engine, *_ = stateroom.initialize(model, config=config)
        ids = torch.tensor([[5, 6, 7, 8]])
        losses = []
        for _ in range(3):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        state = engine.module_state_dict()
        engine.destroy()
        del keep
        return losses, state


def test_modules_to_save_start_as_copies_and_train(hf_ranks, base):
    plain = llama().state_dict()
    (losses, state), (others, _) = hf_ranks(2).run(head_trained_whole, base)
    assert losses == others and losses[2] < losses[1] < losses[0]
    hf_jobs.quiet()
    ids = torch.tensor([[5, 6, 7, 8]])
    assert losses[0] == pytest.approx(llama()(input_ids=ids, labels=ids).loss.item(), rel=1e-6)
    head = "base_model.model.lm_head"
    assert torch.equal(state[f"{head}.original_module.weight"], plain["lm_head.weight"])
    assert not torch.equal(state[f"{head}.modules_to_save.default.weight"], plain["lm_head.weight"])
