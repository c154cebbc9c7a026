"""The Llama of examples/, at test size."""

from __future__ import annotations

import sys
from pathlib import Path

from models import DIM, VOCAB


def tiny_llama():
    folder = str(Path(__file__).parents[1] / "examples" / "llama")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from model import Llama, LlamaConfig

    return Llama(LlamaConfig(vocab_size=VOCAB, dim=DIM, num_layers=3, num_heads=4, num_kv_heads=2, max_seq_len=16))
