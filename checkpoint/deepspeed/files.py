"""The files of a DeepSpeed checkpoint: which rank wrote which, and which one is missing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from .. import archive
from ..pickles import Inert

# classes that DeepSpeed pickles into its files; they become inert records
DEEPSPEED_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.pt.loss_scaler.LossScaler",
    "deepspeed.pt.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
)

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:(bf16|fp16)_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


@dataclass
class Files:
    """Paths by the ranks in their names. dp counts data-parallel ranks, mp model-parallel ones (pipeline-major)."""

    folder: Path
    model: dict[tuple[int, int], Path] = field(default_factory=dict)  # (dp, mp); dp is 0 when the name has none
    sharded_model: bool = False  # stage 3: one file of model states for each data-parallel rank
    optimizer: dict[tuple[int, int], Path] = field(default_factory=dict)  # (dp, mp)
    layers: dict[tuple[int, int], Path] = field(default_factory=dict)  # (layer, tp)
    experts: dict[tuple[int, int, int], Path] = field(default_factory=dict)  # (layer, expert, mp)
    expert_optimizer: dict[tuple[int, int], Path] = field(default_factory=dict)  # (ep, mp)
    swapped: bool = False

    def need(self, kind: str, key: tuple[int, ...]) -> Path:
        """Return the path of a file that must be there.

        Raises:
            CheckpointError: it is not there; the message names it.
        """
        found: dict[Any, Path] = getattr(self, kind)
        if key not in found:
            raise CheckpointError(
                f"{self.folder / self._name(kind, key)} is missing: the checkpoint is incomplete. "
                "Copy it from the host that wrote it (each host may have kept its own files), or choose another tag"
            )
        return found[key]

    def _name(self, kind: str, key: tuple[int, ...]) -> str:
        if kind == "optimizer":
            like = next(iter(self.optimizer.values())).name if self.optimizer else ""
            prefix = "bf16_" if like.startswith("bf16_") else ""
            return f"{prefix}zero_pp_rank_{key[0]}_mp_rank_{key[1]:02d}_optim_states.pt"
        if kind == "model":
            return f"{f'zero_pp_rank_{key[0]}_' if self.sharded_model else ''}mp_rank_{key[1]:02d}_model_states.pt"
        if kind == "layers":
            return f"layer_{key[0]:02d}-{f'model_{key[1]:02d}-' if any(tp for _, tp in self.layers) else ''}model_states.pt"
        if kind == "experts":
            return f"layer_{key[0]}_expert_{key[1]}_mp_rank_{key[2]:02d}_model_states.pt"
        return f"expp_rank_{key[0]}_mp_rank_{key[1]:02d}_optim_states.pt"


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder holds the files of one tag."""
    return any(_MODEL.fullmatch(path.name) or _OPTIMIZER.fullmatch(path.name) for path in folder.iterdir())


def find(folder: Path) -> Files:
    """Sort the files of one tag by their names.

    Raises:
        CheckpointError: there are optimizer files but none with model states.
    """
    files = Files(folder)
    other: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.iterdir()):
        if match := _MODEL.fullmatch(path.name):
            dp, mp = match.groups()
            if dp is not None and not files.sharded_model:
                files.sharded_model, files.model = True, {}
            if (dp is not None) == files.sharded_model:
                files.model[int(dp or 0), int(mp)] = path
        elif match := _OPTIMIZER.fullmatch(path.name):
            # a run that changed its precision under one tag leaves both kinds; the newer save is the one that counts
            key = int(match[2]), int(match[3])
            (files.optimizer if match[1] else other)[key] = path
        elif match := _LAYER.fullmatch(path.name):
            files.layers[int(match[1]), int(match[2] or 0)] = path
        elif match := _EXPERT.fullmatch(path.name):
            files.experts[int(match[1] or 0), int(match[2]), int(match[3])] = path
        elif match := _EXPERT_OPTIMIZER.fullmatch(path.name):
            files.expert_optimizer[int(match[1]), int(match[2])] = path
    files.optimizer = _newer(files.optimizer, other)
    files.swapped = (folder / "offloaded_tensors").is_dir()
    if not files.model:
        raise CheckpointError(f"{folder / 'mp_rank_00_model_states.pt'} is missing: there are optimizer files but none with model states")
    return files


def _newer(left: dict[tuple[int, int], Path], right: dict[tuple[int, int], Path]) -> dict[tuple[int, int], Path]:
    if not left or not right:
        return left or right
    return max((left, right), key=lambda found: max(path.stat().st_mtime_ns for path in found.values()))


def load(path: Path, inert: tuple[str, ...]) -> dict[str, Any]:
    """Return the dictionary that one of these files holds, tensors unread.

    Raises:
        CheckpointError: it is damaged, names a class that could run code, or holds no dictionary.
    """
    value = archive.load(path, (*DEEPSPEED_CLASSES, *inert))
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__} where a dictionary was expected; is it a file of this checkpoint?")
    return value


def number(value: Any) -> Any:
    """Return the number behind an enum record, anything else as it is."""
    return value.args[0] if isinstance(value, Inert) and value.args else value
