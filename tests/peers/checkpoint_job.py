"""Checkpoints that DeepSpeed writes, and runs that go on from universal ones: started by torchrun.

    torchrun --nproc-per-node 2 checkpoint_job.py write FOLDER CASE ...
    torchrun --nproc-per-node 2 checkpoint_job.py resume FOLDER CASE ...

`write` trains three steps, saves into FOLDER/CASE, and leaves in FOLDER/CASE/truth.pt what the checkpoint must mean: whole
weights of every rank, the states of a plain torch run on all ranks' samples, and the losses of three more steps. `resume`
starts fresh, loads the universal checkpoint in FOLDER/CASE/universal, trains those three steps, and writes resumed.pt.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from uncompiled import switch_off_compiling

STEPS = 3


class Net(nn.Module):
    """Tied weights, a frozen matrix, a buffer, odd sizes, a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 6)
        self.l1 = nn.Linear(6, 7)
        self.ln = nn.LayerNorm(7)
        self.l2 = nn.Linear(7, 6, bias=False)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.emb.weight
        self.frozen = nn.Linear(6, 6, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("buf", torch.arange(3.0))
        self.scale = nn.Parameter(torch.randn(1))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.emb(x)
        logits = self.head(self.l2(self.ln(self.l1(h))) + self.frozen(h)) * self.scale
        return nn.functional.cross_entropy(logits.float(), y)


class PerRow(torch.optim.Optimizer):
    """Momentum, a count, and a state of another shape than the parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(m=torch.zeros_like(p), count=0, corner=torch.zeros(2, 2))
                state["count"] += 1
                state["m"].mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] * state["m"])


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-1, momentum=0.9),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9, centered=True),
    "per_row": PerRow,
}


def split(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without."""
    named = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


def config_of(stage: int, dtype: str, zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1000000,
        "gradient_clipping": 0.0,
        "checkpoint": {"load_universal": False},
        "zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}), **zero},
        **more,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True, **({"initial_scale_power": 8} if dtype == "fp16" else {})}
    return config


def net_cases() -> dict[str, dict[str, Any]]:
    """Name -> stage, dtype, optimizer, and what else the config says."""
    cases: dict[str, dict[str, Any]] = {}
    for stage in range(4):
        for dtype in ("fp32", "fp16", "bf16"):
            cases[f"z{stage}_{dtype}_adamw"] = {"stage": stage, "dtype": dtype, "optimizer": "adamw"}
        for optimizer in ("sgd", "rmsprop", "amsgrad", "per_row"):
            cases[f"z{stage}_fp32_{optimizer}"] = {"stage": stage, "dtype": "fp32", "optimizer": optimizer}
    for stage in (1, 2):
        for name, zero in (
            ("round_robin", {"round_robin_gradients": True}),
            ("aligned", {"parameter_alignment": True}),
            ("aligned_round_robin", {"parameter_alignment": True, "round_robin_gradients": True}),
            ("elastic", {"elastic_checkpoint": True}),
        ):
            cases[f"z{stage}_bf16_{name}"] = {"stage": stage, "dtype": "bf16", "optimizer": "adamw", "zero": zero}
    cases["z2_fp32_round_robin"] = {"stage": 2, "dtype": "fp32", "optimizer": "adamw", "zero": {"round_robin_gradients": True}}
    in_fp32 = {"data_types": {"grad_accum_dtype": "fp32"}}
    cases["z1_bf16_optimizer"] = {"stage": 1, "dtype": "bf16", "optimizer": "adamw", "more": in_fp32}
    cases["z3_bf16_sub_groups"] = {"stage": 3, "dtype": "bf16", "optimizer": "adamw", "zero": {"sub_group_size": 50}}
    offload = {"offload_optimizer": {"device": "cpu"}}
    for stage in (2, 3):
        cases[f"z{stage}_bf16_offload"] = {"stage": stage, "dtype": "bf16", "optimizer": "adamw", "zero": offload}
    return cases


NET = net_cases()
PIPE = {
    f"p{stage}_{dtype}_{tied}": {"stage": stage, "dtype": dtype, "tied": tied}
    for stage in (0, 1)
    for dtype in ("fp32", "fp16", "bf16")
    for tied in ("tied", "plain")
}
MOE = {
    f"m{stage}_{dtype}_ep{ep}": {"stage": stage, "dtype": dtype, "ep": ep}
    for stage in (0, 1, 2)
    for dtype in ("fp32", "bf16")
    for ep in (1, 2)
}
TENSOR = {f"t{stage}_{dtype}": {"stage": stage, "dtype": dtype} for stage in range(4) for dtype in ("fp32", "bf16")}


def samples(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randint(10, (2,), generator=generator), torch.randint(10, (2,), generator=generator)) for _ in range(2 * STEPS)]


def reference(case: dict[str, Any], world: int) -> dict[str, Any]:
    """A plain torch run in fp32 on the samples of all ranks."""
    torch.manual_seed(0)
    net = Net()
    optimizer = OPTIMIZERS[case["optimizer"]](split(net))
    data = [samples(rank) for rank in range(world)]
    for step in range(STEPS):
        optimizer.zero_grad()
        for held in data:
            (net(*held[step]) / world).backward()
        optimizer.step()
    named = dict(net.named_parameters())
    return {name: dict(optimizer.state[p]) for name, p in named.items() if p in optimizer.state}


def net_engine(case: dict[str, Any], universal: bool) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    net = Net()
    config = config_of(case["stage"], case["dtype"], case.get("zero", {}), **case.get("more", {}))
    config["checkpoint"]["load_universal"] = universal
    engine, *_ = deepspeed.initialize(model=net, config=copy.deepcopy(config), optimizer=OPTIMIZERS[case["optimizer"]](split(net)))
    return engine, net


def train(engine: Any, data: list[Any]) -> list[float]:
    losses = []
    for x, y in data:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def write_net(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    engine, net = net_engine(case, universal=False)
    mine = samples(dist.get_rank())
    train(engine, mine[:STEPS])
    engine.save_checkpoint(str(folder), client_state={"my_epoch": 3})
    truth: dict[str, Any] = {"module": {}, "buffers": {name: b.clone() for name, b in net.named_buffers()}}
    for name, p in net.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([p]):
            truth["module"][name] = p.detach().clone()
    truth["states"] = reference(case, dist.get_world_size())
    truth["groups"] = [
        [n for n, p in net.named_parameters() if p.requires_grad and (len(truth["module"][n].shape) >= 2) == big] for big in (1, 0)
    ]
    truth["losses"] = train(engine, mine[STEPS:])
    return truth


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)

    @property
    def weight(self) -> torch.Tensor:
        return self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("factor", torch.full((5,), 1.5))
        self.back = nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.linear(x) * self.factor.to(x.dtype))


def write_pipe(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    if case["tied"] == "tied":
        first = TiedLayerSpec("embed", Embedding, tied_weight_attr="weight")
        last = TiedLayerSpec("embed", Embedding, forward_fn=lambda m, x: x @ m.embedding.weight.T, tied_weight_attr="weight")
    else:
        first, last = LayerSpec(nn.Embedding, 10, 6), LayerSpec(nn.Linear, 6, 10, bias=False)
    layers = [
        first,
        LayerSpec(nn.Linear, 6, 6),
        LayerSpec(nn.LayerNorm, 6),
        LayerSpec(Scaled),
        torch.tanh,
        LayerSpec(nn.Linear, 6, 6),
        last,
    ]
    torch.manual_seed(0)

    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out.float().view(-1, 10), y.view(-1))

    module = PipelineModule(layers, num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    config = config_of(case["stage"], case["dtype"], {}, gradient_accumulation_steps=2)
    params = [p for p in module.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=module, config=config, optimizer=torch.optim.AdamW(params, lr=1e-2))
    data = iter([pair for pair in samples(dist.get_rank() % 2) for _ in range(2)])
    for _ in range(STEPS):
        engine.train_batch(data)
    engine.save_checkpoint(str(folder), client_state={"my_epoch": 3})
    return {
        "params": {name: p.detach().clone() for name, p in module.named_parameters()},
        "buffers": {name: b.clone() for name, b in module.named_buffers()},
    }


def write_moe(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split_experts

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(6, 6)
            self.moe = MoE(6, nn.Linear(6, 6), num_experts=4, ep_size=case["ep"], k=1, min_capacity=4)
            self.mid = nn.Linear(6, 6)
            self.moe2 = MoE(6, nn.Linear(6, 6), num_experts=4, ep_size=case["ep"], k=1, min_capacity=4)
            self.o = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h, first, _ = self.moe(torch.tanh(self.l(x)))
            h, second, _ = self.moe2(self.mid(h) + x)
            return nn.functional.cross_entropy(self.o(h).float(), y) + 0.01 * (first + second)

    torch.manual_seed(0)
    net = Mixture()
    torch.manual_seed(100 + dist.get_rank() % case["ep"])  # replicas of an expert start alike
    for name, p in net.named_parameters():
        if "deepspeed_experts" in name:
            p.data.normal_()
    groups = split_experts({"params": list(net.parameters()), "name": "all"})
    config = config_of(case["stage"], case["dtype"], {})
    engine, *_ = deepspeed.initialize(model=net, config=config, optimizer=torch.optim.AdamW(groups, lr=1e-2))
    generator, dtype = torch.Generator().manual_seed(dist.get_rank()), next(net.parameters()).dtype
    for _ in range(STEPS):
        x, y = torch.randn(4, 6, generator=generator).to(dtype), torch.randint(4, (4,), generator=generator)
        engine.backward(engine(x, y))
        engine.step()
    engine.save_checkpoint(str(folder), client_state={"my_epoch": 3})
    return {"params": {name: p.detach().clone() for name, p in net.named_parameters()}, "ep": case["ep"]}


class Block(nn.Module):
    """Matrices cut by rows, by columns, and three in one."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out_proj = nn.Linear(8, 8)
        self.up_proj = nn.Linear(8, 12)
        self.down_proj = nn.Linear(12, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.emb(x)
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        h = h + self.out_proj(torch.tanh(q * k) + v)
        h = h + self.down_proj(torch.tanh(self.up_proj(h)))
        return nn.functional.cross_entropy(self.head(h).float(), y)


CUTS = [
    {"patterns": [r".*up_proj\.weight$"], "partition_type": "column"},
    {"patterns": [r".*qkv\.weight$"], "partition_type": "column", "shape": (3, -1), "partition_dim": 0},
    {"patterns": [r".*(down_proj|out_proj)\.weight$"], "partition_type": "row"},
]


def write_tensor(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Block()
    cut = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": CUTS}}
    config = config_of(case["stage"], case["dtype"], {}, tensor_parallel=cut)
    engine, *_ = deepspeed.initialize(model=net, config=config, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    train(engine, samples(dist.get_rank() // 2)[:STEPS])
    engine.save_checkpoint(str(folder), client_state={"my_epoch": 3})
    torch.manual_seed(0)
    plain = Block()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    data = [samples(rank) for rank in range(dist.get_world_size() // 2)]
    for step in range(STEPS):
        optimizer.zero_grad()
        for held in data:
            (plain(*held[step]) / len(data)).backward()
        optimizer.step()
    return {"states": {name: {"fp32": p.detach(), **optimizer.state[p]} for name, p in plain.named_parameters()}}


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def resume(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    engine, net = net_engine(case, universal=True)
    path, client = engine.load_checkpoint(str(folder / "universal"))
    weights = {}
    for name, p in net.named_parameters():
        with deepspeed.zero.GatheredParameters([p]):
            weights[name] = p.detach().clone()
    losses = train(engine, samples(dist.get_rank())[STEPS:])
    return {"weights": weights, "losses": losses, "step": engine.global_steps, "my_epoch": client["my_epoch"], "path": path}


KINDS = ((write_net, NET), (write_pipe, PIPE), (write_moe, MOE), (write_tensor, TENSOR))


def main() -> None:
    mode, folder, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    switch_off_compiling(deepspeed)
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # it is, only slow
    deepspeed.init_distributed("gloo")
    for name in names:
        here = folder / name
        if mode == "resume":
            value, file = gathered(resume(NET[name], here)), "resumed.pt"
        else:
            kind, table = next((k, t) for k, t in KINDS if name in t)
            value, file = gathered(kind(table[name], here)), "truth.pt"
        if dist.get_rank() == 0:
            torch.save(value, here / file)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
