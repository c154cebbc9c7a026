"""Fine-tune a small Llama with the Trainer of transformers; nothing in here knows of Stateroom, and nothing is downloaded.

launcher --num_gpus 2 -m stateroom.hf examples/hf/finetune.py --deepspeed examples/hf/zero3.json --use_cpu --output_dir runs/hf

Without --use_cpu it runs on the accelerators. The model reads bytes; the text is the source of a module of Python's own
library, so that it learns to write something that looks like Python. `--model runs/hf` goes on from a saved model.
"""

from __future__ import annotations

import argparse as corpus
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments


@dataclass
class Options:
    """What to train on what."""

    model: str | None = field(default=None, metadata={"help": "Folder of a saved model to go on from; absent: a fresh one."})
    text: str = field(default=corpus.__file__, metadata={"help": "File whose bytes are learned."})
    block: int = field(default=128, metadata={"help": "Bytes of one sample."})
    prompt: str = field(default="def ", metadata={"help": "Start of the sample that is written at the end."})


class Blocks(torch.utils.data.Dataset):
    """A file cut into blocks of bytes."""

    def __init__(self, path: str, size: int) -> None:
        data = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()
        self.blocks = data[: len(data) // size * size].view(-1, size)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def build(folder: str | None) -> torch.nn.Module:
    """Return the model; under ZeRO-3 either way makes it come to life sharded."""
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder)
    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, **sizes))


def main() -> None:
    """Train, save, and let the model write."""
    options, args = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses()
    torch.manual_seed(args.seed)
    trainer = Trainer(build(options.model), args, train_dataset=Blocks(options.text, options.block))
    trainer.train()
    trainer.save_model()
    prompt = torch.tensor([list(options.prompt.encode())], device=args.device)
    written = trainer.model.generate(prompt, max_new_tokens=120, do_sample=False, pad_token_id=0)[0]
    if trainer.is_world_process_zero():
        print(bytes(written.tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
