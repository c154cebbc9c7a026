"""A training script as it is written for accelerate with DeepSpeed; it knows nothing of Stateroom."""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.nn.functional.mse_loss(x, y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--plugin", action="store_true", help="choose DeepSpeed here, not on accelerate's command line")
    args = parser.parse_args()
    if args.plugin:
        plugin = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=2, gradient_clipping=1.0)
        accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    else:
        accelerator = Accelerator()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(64, 8)
    data = torch.utils.data.TensorDataset(x, torch.tanh(x.roll(1, 1)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
    losses = []
    for _ in range(4):
        total = 0.0
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(*batch)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += accelerator.gather(loss.detach().reshape(1)).mean().item() / len(loader)
        losses.append(total)
    if accelerator.is_main_process:
        found = {
            "engine": f"{type(model).__module__}.{type(model).__name__}",
            "kind": str(accelerator.distributed_type),
            "ranks": accelerator.num_processes,
            "stage": model.zero_optimization_stage(),
            "accumulation": model.gradient_accumulation_steps(),
            "losses": losses,
        }
        with open(args.out, "w") as file:
            json.dump(found, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()
