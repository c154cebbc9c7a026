"""Train a model under a limit of the address space; run as a program by tests/zero/test_tier_budget.py.

Prints one JSON object: bytes of the states, peak resident bytes of the process, and what the ledger predicted of it.
"""

from __future__ import annotations

import json
import resource
import sys

import stateroom
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 6 * dim), nn.Linear(6 * dim, dim)

    def forward(self, x):
        return x + 0.1 * self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, dim, layers, vocab=256):
        super().__init__()
        self.emb, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab, bias=False)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def status(key):
    """Return a line of /proc/self/status in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def train(dim, layers, config, steps):
    with torch.device("meta"):
        model = Model(dim, layers)
    numel = sum(param.numel() for param in model.parameters())
    engine, *_ = stateroom.initialize(model, config=config)
    losses = []
    for step in range(steps):
        ids = torch.randint(256, (1, 8), generator=torch.Generator().manual_seed(step))
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    ledger, peak = engine.ledger(show=False), status("VmHWM")  # destroy() gives a module its own copy of what is whole
    engine.destroy()
    return numel, ledger, peak, losses


def main():
    job = json.loads(sys.argv[1])
    stateroom.init_distributed()
    train(64, 2, job["config"], 2)  # what the process needs for any model: code, threads, what torch sets up once
    base, size = status("VmRSS"), status("VmSize")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # peak resident starts from here
    if job["budget"]:
        resource.setrlimit(resource.RLIMIT_AS, (size + job["budget"],) * 2)
    numel, ledger, peak, losses = train(job["dim"], job["layers"], job["config"], job["steps"])
    found = {
        "states": 16 * numel,  # fp32: parameters, gradients and two states of Adam
        "base": base,
        "peak": peak,
        "grown": status("VmPeak") - size,
        "predicted": ledger.predicted_peak_bytes,
        "working": dict(ledger.working),
        "losses": losses,
    }
    print(json.dumps(found), flush=True)


main()
