"""What rank processes run in the tests of pipelines: small models as lists of layers, and their plain single-process twin."""

from __future__ import annotations

import copy
from typing import Any

import stateroom
import torch
from stateroom.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

WIDTH, VOCABULARY = 8, 11


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int = WIDTH, hidden: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def head(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ module.weight.t()  # type: ignore[operator, union-attr]


def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.reshape(-1, output.shape[-1]), labels.reshape(-1))


def layers(blocks: int = 6, tied: bool = True) -> list[Any]:
    """Embedding, blocks, norm, head; the head is the embedding again."""
    first = TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH) if tied else LayerSpec(nn.Embedding, VOCABULARY, WIDTH)
    last = TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=head) if tied else LayerSpec(nn.Linear, WIDTH, VOCABULARY)
    return [first, *(LayerSpec(Block) for _ in range(blocks)), LayerSpec(nn.LayerNorm, WIDTH), last]


class Twin(nn.Module):
    """The same layers in one process, with the same names and start values, in plain PyTorch."""

    def __init__(self, specs: list[Any], seed: int = 1234) -> None:
        super().__init__()
        tied: dict[str, nn.Module] = {}
        self.steps: list[Any] = []
        for number, spec in enumerate(specs):
            torch.manual_seed(seed + number)
            if isinstance(spec, TiedLayerSpec):
                if spec.key not in tied:
                    self.add_module(str(number), spec.build())
                    tied[spec.key] = getattr(self, str(number))
                module = tied[spec.key]
                self.steps.append((lambda x, m=module, f=spec.forward_fn: f(m, x)) if spec.forward_fn else module)
            elif isinstance(spec, LayerSpec):
                self.add_module(str(number), spec.build())
                self.steps.append(getattr(self, str(number)))
            else:
                self.steps.append(spec)

    def forward(self, x: Any) -> Any:
        for step in self.steps:
            x = step(x)
        return x


def batches(steps: int, count: int, copies: int, lengths: tuple[int, ...] = (5,), seed: int = 7) -> list[list[list[Any]]]:
    """Return [step][copy][micro-batch] of (ids, labels); lengths are taken in turn by micro-batches, and by steps."""
    made = torch.Generator().manual_seed(seed)
    found = []
    for step in range(steps):
        rows = []
        for _ in range(copies):
            row = []
            for number in range(count):
                length = lengths[(step + number) % len(lengths)]
                ids = torch.randint(0, VOCABULARY, (2, length + 1), generator=made)
                row.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
            rows.append(row)
        found.append(rows)
    return found


def config(count: int, stages: int = 2, **more: Any) -> dict[str, Any]:
    """Return a config of SGD with momentum and little else."""
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": count,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "steps_per_print": None,
    }
    pipeline = {"stages": stages, **more.pop("pipeline", {})}
    return {**base, "pipeline": pipeline, **more}


def plain_run(
    specs: list[Any], data: list[list[list[Any]]], clip: float = 0.0, freeze: tuple[int, ...] = (), loss: Any = loss_fn
) -> dict[str, Any]:
    """Train the twin on the global batch; the oracle."""
    torch.manual_seed(0)
    net = Twin(specs)
    for number in freeze:
        for param in getattr(net, str(number)).parameters():
            param.requires_grad_(False)
    trained = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    losses, norms = [], []
    for step in data:
        micro = [each for copy_ in step for each in copy_]
        optimizer.zero_grad()
        total = 0.0
        for inputs, labels in micro:
            part = loss(net(inputs), labels) / len(micro)
            part.backward()
            total += float(part.detach())
        norm = torch.nn.utils.clip_grad_norm_(trained, clip if clip else float("inf"))
        optimizer.step()
        losses.append(total)
        norms.append(float(norm))
    return {"losses": losses, "norms": norms, "weights": {name: value.clone() for name, value in net.state_dict().items()}}


def piped_run(
    specs: list[Any], data: list[list[list[Any]]], cfg: dict[str, Any], freeze: tuple[int, ...] = (), loss: Any = loss_fn, **module: Any
) -> dict[str, Any]:
    """Train the list in stages on this rank, and return losses, norms, this stage's weights and what the schedule cost."""
    net = PipelineModule(specs, num_stages=cfg["pipeline"]["stages"], loss_fn=loss, seed_layers=True, **module)
    for number in freeze:
        if hasattr(net, str(number)):
            for param in getattr(net, str(number)).parameters():
                param.requires_grad_(False)
    engine, *_ = stateroom.initialize(model=net, config=copy.deepcopy(cfg))
    losses, norms, held = [], [], 0
    for step in data:
        losses.append(float(engine.train_batch(iter(step[engine.cut.copy]))))
        norms.append(engine.get_global_grad_norm())
        held = max(held, engine.last_batch.held)
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    plan = engine._plan(engine.gradient_accumulation_steps(), True)
    found = {
        "losses": losses,
        "norms": norms,
        "weights": weights,
        "held": held,
        "predicted": plan.activations()[engine.cut.stage],
        "stage": engine.cut.stage,
    }
    engine.destroy()
    return found


def fp16_run(specs: list[Any], data: list[list[list[Any]]], cfg: dict[str, Any]) -> dict[str, Any]:
    """Train in fp16 and say how the loss scale went."""
    net = PipelineModule(specs, num_stages=cfg["pipeline"]["stages"], loss_fn=loss_fn, seed_layers=True)
    engine, *_ = stateroom.initialize(model=net, config=cfg)
    losses, scales = [], []
    for step in data:
        losses.append(float(engine.train_batch(iter(step[engine.cut.copy]))))
        scales.append(engine.loss_scale)
    skipped = engine.skipped_steps
    engine.destroy()
    return {"losses": losses, "scales": scales, "skipped": skipped}


def saving_run(specs: list[Any], data: list[list[list[Any]]], cfg: dict[str, Any], folder: str, at: int, **module: Any) -> list[float]:
    """Train `at` steps, save, and train the rest."""
    net = PipelineModule(specs, num_stages=cfg["pipeline"]["stages"], loss_fn=loss_fn, seed_layers=True, **module)
    engine, *_ = stateroom.initialize(model=net, config=copy.deepcopy(cfg))
    losses = []
    for number, step in enumerate(data):
        if number == at:
            engine.save_checkpoint(folder, client_state={"seen": number})
        losses.append(float(engine.train_batch(iter(step[engine.cut.copy]))))
    engine.destroy()
    return losses


def resuming_run(specs: list[Any], data: list[list[list[Any]]], cfg: dict[str, Any], folder: str, at: int, **module: Any) -> dict[str, Any]:
    """Load and train the rest, from other start values."""
    net = PipelineModule(specs, num_stages=cfg["pipeline"]["stages"], loss_fn=loss_fn, seed_layers=True, base_seed=99, **module)
    engine, *_ = stateroom.initialize(model=net, config=copy.deepcopy(cfg))
    path, client = engine.load_checkpoint(folder)
    steps = engine.global_steps
    losses = [float(engine.train_batch(iter(step[engine.cut.copy]))) for step in data[at:]]
    engine.save_16bit_model(folder, f"weights_{engine.cut.stages}.pt")
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()
    return {"losses": losses, "path": path, "client": client, "steps": steps, "weights": weights}


class Sequence(nn.Sequential):
    """The untied layers as an ordinary model that returns its loss."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_fn(super().forward(ids), labels)


def plain_resuming_run(specs: list[Any], data: list[list[list[Any]]], cfg: dict[str, Any], folder: str, at: int) -> list[float]:
    """Load into the same model without a pipeline and train the rest."""
    torch.manual_seed(5)
    net = Sequence(*(spec.build() for spec in specs))
    engine, *_ = stateroom.initialize(model=net, config={key: value for key, value in cfg.items() if key != "pipeline"})
    engine.load_checkpoint(folder)
    losses = [float(engine.train_batch(iter(step[engine.get_data_parallel_rank()]))) for step in data[at:]]
    engine.destroy()
    return losses


def plain_saving_run(specs: list[Any], data: list[list[list[Any]]], cfg: dict[str, Any], folder: str, at: int) -> list[float]:
    """Train the model without a pipeline, saving at a step."""
    torch.manual_seed(5)
    net = Sequence(*(spec.build() for spec in specs))
    engine, *_ = stateroom.initialize(model=net, config={key: value for key, value in cfg.items() if key != "pipeline"})
    losses = []
    for number, step in enumerate(data):
        if number == at:
            engine.save_checkpoint(folder)
        losses.append(float(engine.train_batch(iter(step[engine.get_data_parallel_rank()]))))
    engine.destroy()
    return losses


class Table(nn.Module):
    """An embedding inside a module of its own, as the fixture of DeepSpeed's pipeline has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids)


def table_head(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ module.embedding.weight.t()  # type: ignore[operator, union-attr]


def deepspeed_run(folder: str, stages: int) -> dict[str, Any]:
    """Load a checkpoint that DeepSpeed's pipeline wrote, and take a step."""
    specs = [
        TiedLayerSpec("embed", Table, tied_weight_attr="embedding.weight"),
        *(LayerSpec(nn.Linear, 6, 6), LayerSpec(nn.LayerNorm, 6), LayerSpec(nn.Linear, 6, 6)),
        TiedLayerSpec("embed", Table, forward_fn=table_head, tied_weight_attr="embedding.weight"),
    ]
    net = PipelineModule(specs, num_stages=stages, loss_fn=loss_fn)
    cfg = {**config(2, stages), "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1}}
    engine, *_ = stateroom.initialize(model=net, config=cfg)
    _, client = engine.load_checkpoint(folder)
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    ids = torch.arange(8).view(2, 4)
    losses = [float(engine.train_batch(iter([(ids, ids)] * 2))) for _ in range(2)]
    found = {"weights": weights, "client": client, "steps": engine.global_steps, "losses": losses}
    engine.destroy()
    return found
