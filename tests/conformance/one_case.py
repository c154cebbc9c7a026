"""Run one case at one stage as one of two processes: for cases whose ranks end each other."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

if __name__ == "__main__":
    import conform
    import torch
    from catalogue import CASES
    from stateroom import init_distributed

    name, stage, rendezvous, rank = sys.argv[1:]
    torch.set_num_threads(1)
    init_distributed(init_method=f"file://{rendezvous}", rank=int(rank), world_size=2)
    case = CASES[name]
    conform.sharded(case, int(stage), "fp32", case.optimizer, conform.STEPS)
