"""A training script as one writes it for DeepSpeed; the tests exchange the one line that imports it."""

import argparse
import json

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM, SEQ, SAMPLES = 32, 32, 8, 192


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, checkpoint_activations=False):
        super().__init__()
        self.checkpoint_activations = checkpoint_activations
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x) if self.checkpoint_activations else block(x)
        return F.cross_entropy(self.head(x).float().view(-1, VOCAB), labels.view(-1))


class Successors(torch.utils.data.Dataset):
    """The label of a token is the token behind it in the alphabet."""

    def __init__(self):
        self.tokens = torch.randint(VOCAB, (SAMPLES, SEQ), generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index], (self.tokens[index] + 1) % VOCAB


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--fused_adam", action="store_true")
    parser.add_argument("--checkpoint_activations", action="store_true")
    parser.add_argument("--save", required=True)
    parser.add_argument("--out", required=True)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def build(args):
    torch.manual_seed(1)
    model = Model(args.checkpoint_activations)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = deepspeed.ops.adam.FusedAdam(params, lr=1e-2, weight_decay=0.01) if args.fused_adam else None
    if args.checkpoint_activations:
        deepspeed.checkpointing.configure(None, deepspeed_config=args.deepspeed_config)
        assert deepspeed.checkpointing.is_configured()
    return deepspeed.initialize(args=args, model=model, optimizer=optimizer, model_parameters=params, training_data=Successors())


def evaluate(model_engine):
    tokens, labels = (part.to(model_engine.device) for part in torch.utils.data.default_collate([Successors()[i] for i in range(8)]))
    model_engine.eval()
    with torch.no_grad():
        loss = model_engine(tokens, labels).item()
    model_engine.train()
    return loss


def look_inside(model_engine):
    weight = model_engine.module.head.weight
    with deepspeed.zero.GatheredParameters(weight):
        gathered = weight.detach().float().sum().item()
    master = deepspeed.utils.safe_get_full_fp32_param(weight)
    return {"gathered": gathered, "master": None if master is None else master.float().sum().item()}


def train(args, model_engine, trainloader):
    found = {"losses": [], "lrs": [], "norms": []}
    window = torch.zeros((), device=model_engine.device)
    for index, (tokens, labels) in enumerate(trainloader):
        tokens, labels = tokens.to(model_engine.device), labels.to(model_engine.device)
        loss = model_engine(tokens, labels)
        model_engine.backward(loss)
        boundary = model_engine.is_gradient_accumulation_boundary()
        model_engine.step()
        window += loss.detach() / model_engine.gradient_accumulation_steps()
        if not boundary:
            continue
        deepspeed.comm.all_reduce(window)
        found["losses"].append(window.item() / deepspeed.comm.get_world_size())
        found["lrs"].append(model_engine.get_lr()[0])
        norm = model_engine.get_global_grad_norm()
        found["norms"].append(None if norm is None else float(norm))
        window.zero_()
        if model_engine.global_steps == 6:
            model_engine.save_checkpoint(args.save, tag="middle", client_state={"index": index})
            found["at_save"] = evaluate(model_engine)
    return found


def main():
    args = parse()
    deepspeed.init_distributed()
    model_engine, optimizer, trainloader, lr_scheduler = build(args)
    deepspeed.utils.logger.info(f"rank {model_engine.global_rank}, local rank {model_engine.local_rank}, {model_engine.device}")
    found = train(args, model_engine, trainloader)
    found["inside"] = look_inside(model_engine)
    found["at_end"] = evaluate(model_engine)
    path, client_state = model_engine.load_checkpoint(args.save, tag="middle")
    found["after_load"] = evaluate(model_engine)
    found["index"], found["steps_after_load"] = client_state["index"], model_engine.global_steps
    found["is_engine"] = isinstance(model_engine, deepspeed.DeepSpeedEngine)
    assert path is not None and optimizer is model_engine.optimizer and lr_scheduler is model_engine.lr_scheduler
    deepspeed.comm.barrier()
    if deepspeed.comm.get_rank() == 0:
        with open(args.out, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
