"""The unmodified Trainer with a DeepSpeed config: equal to its run without one, resumes exactly, saves what plain transformers loads."""

from __future__ import annotations

import pytest
import torch
from hf_jobs import STEPS, Samples, arguments, config_file, launched, llama, logs, plain_run

NO_OPTIMIZER = {"optimizer": None, "scheduler": None}


def train(folder, stage, extra, options, resume=False):
    """Train, save, evaluate; return logs, whole weights and losses of evaluation."""
    with launched() as (_, world):
        from transformers import Trainer

        args = arguments(folder, world, config_file(folder, stage, **extra), **options)
        trainer = Trainer(llama(), args, train_dataset=Samples(), eval_dataset=Samples(8))
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}") if resume else None)
        trainer.save_model(str(folder / "final"))
        evaluated = trainer.evaluate()["eval_loss"]
        weights = {name: value.clone() for name, value in trainer.model_wrapped.module_state_dict().items()}
        kind = type(trainer.model_wrapped).__module__
        trainer.model_wrapped.destroy()
        return logs(trainer), weights, evaluated, kind


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Logs and weights of the plain run, with the optimizer and scheduler of the config and with the Trainer's own."""
    folder = tmp_path_factory.mktemp("plain")
    return {own: plain_run(folder, llama, own) for own in (True, False)}


def close(found, wanted, config_has_scheduler):
    for key in ("loss", "grad_norm"):
        assert found[key] == pytest.approx(wanted[key], rel=1e-5), key
    rates, plain_rates = found["learning_rate"], wanted["learning_rate"]
    if config_has_scheduler:  # the engine has moved its schedule on by the time that the Trainer reads the rate
        rates, plain_rates = rates[:-1], plain_rates[1:]
    assert rates == pytest.approx(plain_rates, rel=1e-9, abs=1e-12)


def same_weights(found, wanted, tolerance):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=tolerance, atol=tolerance), name


CASES = [(2, True), (3, True), (3, False)]
MORE = [(0, True), (0, False), (1, True), (1, False), (2, False)]


@pytest.mark.parametrize(("stage", "own_optimizer"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)])
def test_losses_norms_and_weights_equal_the_plain_trainer(hf_ranks, plain, tmp_path, stage, own_optimizer):
    wanted, model = plain[own_optimizer]
    (found, weights, evaluated, kind), (_, others, also, _) = hf_ranks(2).run(
        train, tmp_path, stage, {} if own_optimizer else NO_OPTIMIZER, {}
    )
    assert kind == "stateroom.engine.engine"
    assert len(found["loss"]) == STEPS and found["loss"][-1] < 0.95 * found["loss"][0]
    close(found, wanted, own_optimizer)
    same_weights(weights, {name: value.detach() for name, value in model.state_dict().items()}, 1e-5)
    assert evaluated == also and evaluated < found["loss"][0]
    assert all(torch.equal(others[name], value) for name, value in weights.items())

    resumed, again, *_ = hf_ranks(2).run(train, tmp_path, stage, {} if own_optimizer else NO_OPTIMIZER, {}, resume=True)[0]
    assert resumed == found  # the log of the first half is in the checkpoint
    assert all(torch.equal(again[name], value) for name, value in weights.items())

    from transformers import LlamaForCausalLM

    saved = LlamaForCausalLM.from_pretrained(tmp_path / "final").state_dict()
    assert saved.keys() == weights.keys() and all(torch.equal(saved[name], value) for name, value in weights.items())


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.full)])
def test_bf16(hf_ranks, plain, tmp_path, stage):
    wanted, _ = plain[True]
    options = {"bf16": True, "gradient_checkpointing": True}
    found, weights, *_ = hf_ranks(2).run(train, tmp_path, stage, {}, options)[0]
    assert weights["lm_head.weight"].dtype == torch.bfloat16
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-2) and found["loss"] != pytest.approx(wanted["loss"], rel=1e-5)
    resumed, again, *_ = hf_ranks(2).run(train, tmp_path, stage, {}, options, resume=True)[0]
    assert resumed == found and all(torch.equal(again[name], value) for name, value in weights.items())


def best(folder, stage):
    """Load the best model at the end, where "best" is the highest loss: that of the first evaluation."""
    with launched() as (_, world):
        from transformers import Trainer

        options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "greater_is_better": True}
        args = arguments(folder, world, config_file(folder, stage), **options)
        trainer = Trainer(llama(), args, train_dataset=Samples(), eval_dataset=Samples(8))
        trainer.train()
        seen = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        loss = trainer.predict(Samples(8)).metrics["test_loss"]
        trainer.model_wrapped.destroy()
        return seen, loss


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.full)])
def test_the_best_model_is_loaded_at_the_end(hf_ranks, tmp_path, stage):
    (seen, loss), _ = hf_ranks(2).run(best, tmp_path, stage)
    assert seen[0] > seen[-1] and loss == pytest.approx(seen[0], rel=1e-6)


def not_gathered(folder):
    with launched() as (_, world):
        from transformers import Trainer

        zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}
        trainer = Trainer(llama(), arguments(folder, world, config_file(folder, 3, zero_optimization=zero)), train_dataset=Samples())
        trainer.train()
        trainer.save_model(str(folder / "final"))
        trainer.model_wrapped.destroy()


def test_without_gathering_the_trainer_saves_a_checkpoint_instead(hf_ranks, tmp_path):
    hf_ranks(2).run(not_gathered, tmp_path)
    there = {path.name for path in (tmp_path / "final").iterdir()}
    assert f"global_step{STEPS}" in there and "model.safetensors" not in there


def a_script_that_trains_twice(folder):
    """The Trainer destroys the engine at the start of each train(), and hands the same one to the second."""
    with launched() as (_, world):
        from stateroom.errors import EngineError
        from transformers import Trainer

        trainer = Trainer(llama(), arguments(folder, world, config_file(folder, 2)), train_dataset=Samples())
        trainer.train()
        messages = []
        for resume in (None, str(folder / "checkpoint-3")):
            try:
                trainer.train(resume_from_checkpoint=resume)
            except EngineError as error:
                messages.append(str(error))
        return messages


def test_a_second_train_says_what_is_wrong(hf_ranks, tmp_path):
    for messages in hf_ranks(2).run(a_script_that_trains_twice, tmp_path):
        assert len(messages) == 2 and all("destroyed" in message for message in messages)
