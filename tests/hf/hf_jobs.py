"""What the rank processes of the Hugging Face tests share: a launched environment, small models and data, whole runs."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

VOCAB, SEQ, SAMPLES = 64, 12, 48
STEPS, LR, DECAY, WARMUP, ACCUMULATION, GLOBAL_MICRO = 6, 5e-3, 0.01, 2, 2, 4


@contextlib.contextmanager
def launched() -> Iterator[tuple[int, int]]:
    """Make this pool process look like one that torchrun started, with the alias on; yields (rank, world).

    At the end it forgets what a Trainer or an Accelerator leaves in the process, so that the next run starts afresh.
    """
    import stateroom.hf
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    quiet()
    stateroom.hf.enable()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield rank, world
    finally:
        forget()


def quiet() -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false", MASTER_PORT="1")


def forget() -> None:
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    gc.collect()


# ---- model and data


def llama_config(**options: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**{"vocab_size": VOCAB, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, **sizes, **options})


def llama(**options: Any) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(llama_config(**options))


class Samples(torch.utils.data.Dataset):
    """Token ids in arithmetic sequences, so that a loss falls within a few steps."""

    def __init__(self, count: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(1)
        starts = torch.randint(VOCAB, (count, 1), generator=generator)
        self.ids = (starts + 3 * torch.arange(SEQ)) % VOCAB

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def config_file(folder: Path, stage: int, **extra: Any) -> str:
    """Write a config as people do for the Trainer, "auto" wherever it is allowed, and return its path."""
    config = {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
        },
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
        "units": {"min_numel": 0},  # each block a unit, though all are tiny here
        **extra,
    }
    path = folder / f"ds_{stage}_{os.environ.get('RANK', 0)}.json"
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return str(path)


# ---- Trainer


def arguments(folder: Path, world: int, deepspeed: str | None, **options: Any) -> Any:
    """TrainingArguments of a run whose global batch is the same for any number of ranks."""
    from transformers import TrainingArguments

    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "deepspeed": deepspeed,
            "use_cpu": True,
            "per_device_train_batch_size": GLOBAL_MICRO // world,
            "gradient_accumulation_steps": ACCUMULATION,
            "max_steps": STEPS,
            "learning_rate": LR,
            "weight_decay": DECAY,
            "warmup_steps": WARMUP,
            "logging_steps": 1,
            "save_steps": STEPS // 2,
            "report_to": [],
            "disable_tqdm": True,
            **options,
        }
    )


def logs(trainer: Any) -> dict[str, list[float]]:
    """Losses, gradient norms and learning rates that the Trainer logged, a step each."""
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return {key: [row[key] for row in rows] for key in ("loss", "grad_norm", "learning_rate")}


def plain_run(folder: Path, make: Callable[[], Any], own_optimizer: bool, **options: Any) -> tuple[dict[str, list[float]], Any]:
    """Train in this one process without any engine; returns what was logged, and the model.

    `own_optimizer` builds what a config's optimizer and scheduler mean: AdamW over one group, WarmupDecayLR.
    """
    from stateroom.runtime.lr_schedules import WarmupDecayLR
    from transformers import Trainer

    quiet()
    model = make()
    optimizers: Any = (None, None)
    if own_optimizer:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=DECAY)
        optimizers = optimizer, WarmupDecayLR(optimizer, STEPS, 0, LR, WARMUP)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        args = arguments(folder, 1, None, save_strategy="no", **options)
        trainer = Trainer(model, args, train_dataset=Samples(), optimizers=optimizers)
        trainer.train()
    forget()
    return logs(trainer), model
