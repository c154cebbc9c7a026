"""A hand-written loop over accelerate with a DeepSpeedPlugin: equal to plain PyTorch, resumes exactly, hands out whole weights."""

from __future__ import annotations

import hf_jobs
import pytest
import torch
from hf_jobs import ACCUMULATION, LR, STEPS, Samples, launched, llama

CLIP = 1.0
GLOBAL_BATCH = 4


def plugin_for(stage, file):
    """The plugin as scripts build it: from its arguments, or around a config file's dict with "auto" in it."""
    from accelerate.utils import DeepSpeedPlugin

    if not file:
        arguments = {"gradient_accumulation_steps": ACCUMULATION, "gradient_clipping": CLIP, "zero3_save_16bit_model": True}
        return DeepSpeedPlugin(zero_stage=stage, **arguments)
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": [0.9, 0.999], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": "auto", "stage3_gather_16bit_weights_on_model_save": True},
        "units": {"min_numel": 0},
    }
    return DeepSpeedPlugin(hf_ds_config=config)


def prepared(accelerator, world, file):
    from accelerate.utils import DummyOptim, DummyScheduler

    model = llama()
    loader = torch.utils.data.DataLoader(Samples(), batch_size=GLOBAL_BATCH // world, shuffle=False)
    if file:
        optimizer = DummyOptim(model.parameters(), lr=LR, weight_decay=0.01)
        scheduler = DummyScheduler(optimizer, warmup_num_steps=2, total_num_steps=100)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step // world))
    return accelerator.prepare(model, optimizer, loader, scheduler)


def loop(stage, file, folder):
    """Train with a save in the middle, then load it and repeat the second half; return what a script can see."""
    with launched() as (_, world):
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs

        accelerator = Accelerator(deepspeed_plugin=plugin_for(stage, file), kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
        model, optimizer, loader, scheduler = prepared(accelerator, world, file)
        batches = list(loader)
        losses, norms, rates = [], [], []

        def steps(first, last):
            for index in range(first * ACCUMULATION, last * ACCUMULATION):
                with accelerator.accumulate(model):
                    loss = model(**batches[index]).loss
                    accelerator.backward(loss)
                    norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
                if accelerator.sync_gradients:
                    norms.append(norm)
                    rates.append(optimizer.param_groups[0]["lr"])

        steps(0, STEPS // 2)
        accelerator.save_state(str(folder / "state"))
        steps(STEPS // 2, STEPS)
        ended = accelerator.get_state_dict(model)
        steps(0, 1)
        accelerator.load_state(str(folder / "state"))
        steps(STEPS // 2, STEPS)
        half = STEPS // 2 * ACCUMULATION
        first, again = losses[half : 2 * half], losses[2 * half + ACCUMULATION :]
        state = accelerator.get_state_dict(model)
        same = state.keys() == ended.keys() and all(torch.equal(state[name], value) for name, value in ended.items())
        whole = accelerator.unwrap_model(model)
        names = type(model).__module__, type(whole).__name__, len(state)
        whole.save_pretrained(
            folder / "saved", is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=state
        )
        accelerator.save_model(model, str(folder / "also"))
        accelerator.free_memory()
        return losses[: 2 * half], norms[:STEPS], rates[:STEPS], first == again, same, names


def plain(file):
    """The same in one process: batches of all ranks at once, gradients accumulated and clipped by hand."""
    from stateroom.runtime.lr_schedules import WarmupLR

    hf_jobs.quiet()
    model = llama()
    options = {"lr": LR, "weight_decay": 0.01} if file else {"lr": LR}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    schedule = WarmupLR(optimizer, 0, LR, 2) if file else torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(Samples(), batch_size=GLOBAL_BATCH)
    losses, norms, rates = [], [], []
    for index, batch in enumerate(loader):
        loss = model(**batch).loss
        (loss / ACCUMULATION).backward()
        losses.append(loss.item())
        if (index + 1) % ACCUMULATION == 0:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
    return losses, norms, rates, model


@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize("stage", [2, 3, pytest.param(0, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.full)])
def test_a_hand_written_loop_equals_plain_pytorch(hf_ranks, tmp_path, stage, file):
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    losses, norms, rates, model = plain(file)
    for rank, found in enumerate(hf_ranks(2).run(loop, stage, file, tmp_path)):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(norms, rel=1e-5)
        assert found[2] == pytest.approx(rates, rel=1e-9)
        assert found[3] and found[4], "resumed steps differ"
        engine, inner, count = found[5]
        assert engine == "stateroom.engine.engine" and inner == "LlamaForCausalLM"
        assert count == (0 if rank and stage == 3 else len(model.state_dict()))
    wanted = model.state_dict()
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    also = load_file(tmp_path / "also" / "model.safetensors")
    assert saved.keys() == wanted.keys() == also.keys()
    for name, value in wanted.items():
        assert torch.allclose(saved[name], value, rtol=1e-5, atol=1e-5) and torch.equal(saved[name], also[name]), name


def moe():
    """Experts named as leaf modules through the plugin."""
    with launched():
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
        from stateroom.zero.leaf import z3_leaf_module

        plugin = DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names="LlamaMLP", gradient_clipping=0.5)
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
        model = llama()
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        marked = [z3_leaf_module(layer.mlp) for layer in model.module.model.layers]
        found = marked, model.gradient_clipping(), accelerator.num_processes
        accelerator.free_memory()
        return found


def test_leaf_classes_of_the_plugin_are_marked(hf_ranks):
    for marked, clip, ranks in hf_ranks(2).run(moe):
        assert marked == [True] * 3 and clip == 0.5 and ranks == 2
