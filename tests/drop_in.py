"""Run the script that was written for DeepSpeed on two ranks, as it is or with the line changed that imports it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "engine" / "scripts" / "deepspeed_script.py"
LINE = "import deepspeed\n"
STEPS, LR = 12, 1e-2


def config_for(stage: int, **extra: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": LR,
                "warmup_num_steps": 3,
                "total_num_steps": 2 * STEPS,
                "warmup_type": "linear",
            },
        },
        "zero_optimization": {"stage": stage},
        **extra,
    }


def changed() -> str:
    """The script with one line changed."""
    text = SCRIPT.read_text()
    assert text.count(LINE) == 1
    return text.replace(LINE, "import stateroom as deepspeed\n")


def run(
    folder: Path, source: str, config: dict[str, Any], *options: str, python: str = sys.executable, through: tuple[str, ...] = ()
) -> tuple[dict[str, Any], str]:
    """Return what the script wrote and what it printed; `through` names a program that starts it."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(source)
    (folder / "ds_config.json").write_text(json.dumps(config))
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    env = {**kept, "STATEROOM_ACCELERATOR": "cpu", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *through, "script.py"]
    command = [*torchrun, "--deepspeed", "--deepspeed_config", "ds_config.json", "--save", "saved", "--out", "out.json", *options]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((folder / "out.json").read_text()), done.stdout + done.stderr
