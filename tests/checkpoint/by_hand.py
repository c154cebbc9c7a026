"""The fixtures read in another way: whole pickles through torch.load with stub classes, assembled by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoint_truth import raw

FIXTURES = Path(__file__).parent / "fixtures"


def optimizer(folder: Path, rank: int) -> dict[str, Any]:
    (file,) = folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return raw(file)["optimizer_state_dict"]


def flat_states(folder: Path, keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq")) -> dict[str, dict[str, torch.Tensor]]:
    """ZeRO-1 and 2 over two ranks: the flat tensors of both ranks laid end to end and cut in the order of `param_shapes`."""
    model, ranks = raw(folder / "mp_rank_00_model_states.pt"), [optimizer(folder, rank) for rank in range(2)]
    found: dict[str, dict[str, torch.Tensor]] = {}
    for group, shapes in enumerate(model["param_shapes"]):
        whole = {"fp32": torch.cat([held["single_partition_of_fp32_groups"][group] for held in ranks])}
        for key in keys:
            whole[key] = torch.cat([held["base_optimizer_state"]["state"][group][key] for held in ranks])
        at = 0
        for name, shape in shapes.items():
            numel = torch.Size(shape).numel()
            found[name] = {key: value[at : at + numel].view(shape) for key, value in whole.items()}
            at += numel
    return found


def sharded_states(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """ZeRO-3 over two ranks: each parameter is half of it on rank 0 and half on rank 1."""
    model, ranks = raw(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"), [optimizer(folder, rank) for rank in range(2)]
    found: dict[str, dict[str, torch.Tensor]] = {}
    for sub, shapes in enumerate(model["param_shapes"]):
        at = 0
        for name, shape in shapes.items():
            half = -(-torch.Size(shape).numel() // 2)
            held = [{"fp32": one["fp32_flat_groups"][sub], **one["optimizer_state_dict"]["state"][sub]} for one in ranks]
            found[name] = {
                key: torch.cat([one[key][at : at + half] for one in held])[: torch.Size(shape).numel()].view(shape)
                for key in ("fp32", "exp_avg", "exp_avg_sq")
            }
            at += half
    return found


def moe_states(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """`moe2`: the dense group is cut over both ranks, each rank holds one expert, which it calls 0, whole."""
    model, ranks = raw(folder / "mp_rank_00_model_states.pt"), [optimizer(folder, rank) for rank in range(2)]
    dense, experts = model["param_shapes"]
    found: dict[str, dict[str, torch.Tensor]] = {}

    def cut(shapes: dict[str, Any], parts: list[dict[str, Any]], group: int, expert: int | None) -> None:
        whole = {"fp32": torch.cat([held["single_partition_of_fp32_groups"][group] for held in parts])}
        for key in ("exp_avg", "exp_avg_sq"):
            whole[key] = torch.cat([held["base_optimizer_state"]["state"][group][key] for held in parts])
        at = 0
        for name, shape in shapes.items():
            numel = torch.Size(shape).numel()
            known = name if expert is None else name.replace("deepspeed_experts.0", f"deepspeed_experts.{expert}")
            found[known] = {key: value[at : at + numel].view(shape) for key, value in whole.items()}
            at += numel

    cut(dense, ranks, 0, None)
    for expert, held in enumerate(ranks):
        cut(experts, [held], 1, expert)
    return found


def pipe_states(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """`pipe_fp32`: stage 0 holds the tied embedding, layer 1 and layer 2; stage 1 the embedding again and layer 3."""
    names = ["0.embedding.weight", "1.weight", "1.bias", "2.weight", "2.bias"], ["0.embedding.weight", "3.weight", "3.bias"]
    found: dict[str, dict[str, torch.Tensor]] = {}
    for stage, held in enumerate(names):
        states = raw(folder / f"mp_rank_{stage:02d}_model_states.pt")["optimizer"]["state"]
        for index, name in enumerate(held):
            layer, _, local = name.partition(".")
            weight = raw(folder / f"layer_{int(layer):02d}-model_states.pt")[local]
            moments = {key: states[index][key] for key in ("exp_avg", "exp_avg_sq")}
            assert name not in found or all(torch.equal(found[name][key], value) for key, value in moments.items())
            found[name] = {"fp32": weight, "param": weight, **moments}
    return found
