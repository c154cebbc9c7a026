"""A DeepSpeed checkpoint as a `Source`: which files there are, and which reader understands each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from .. import archive
from ..elements import Elements
from ..pickles import Inert, Stored
from ..source import MASTER, WEIGHT, Parameter, Table
from . import pipeline, sharded, stages, tensor_parallel
from .experts import Experts, expert_ranks, find_experts
from .files import Files, find, load, number
from .flat import Partition, read_flat, read_fragments
from .found import Found, shape_of, split_states, whole
from .tensor_parallel import Rule
from .whole import names_with, read_whole

# what DeepSpeed itself keeps beside the user's client state, in one dictionary
OWN_KEYS = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "num_experts",
        "ds_autoep_layers",
        "autoep_layers",
        "universal_checkpoint_info",
        "sparse_tensor_module_names",
        "csr_tensor_module_names",
        "folding",
    ]
)
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


@dataclass
class DeepSpeedSource(Table):
    """What DeepSpeed saved under one tag; beside the common interface, what a universal checkpoint is made of."""

    files: Files = field(default_factory=lambda: Files(Path()))
    stage: int = 0
    rules: dict[str, Rule] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)  # what the first rank's optimizer file holds beside shards
    model_files: list[Path] = field(default_factory=list)


def open_deepspeed(folder: Path, inert: tuple[str, ...] = ()) -> DeepSpeedSource:
    """Open the files of one tag.

    Args:
        folder: the tag's folder.
        inert: full names of classes in the client state that may be read as plain records.

    Raises:
        CheckpointError: a rank's file is missing or damaged, or the files do not fit one another.
    """
    return _Opening(folder, inert).source()


class _Opening:
    """One checkpoint while it is being opened."""

    def __init__(self, folder: Path, inert: tuple[str, ...]) -> None:
        self.folder, self.inert, self.where = folder, inert, str(folder)
        self.files = find(folder)
        self.head = self.model(0, 0)
        self.dp = int(self.head.get("dp_world_size") or 1 + max((dp for dp, _ in self.files.optimizer), default=0))
        self.pp, self.tp = self._degrees()
        self.inner: dict[int, dict[int, dict[str, Any]]] = {}  # mp -> dp -> inner optimizer dictionary

    def model(self, dp: int, mp: int) -> dict[str, Any]:
        """Return the model states of a rank."""
        return load(self.files.need("model", (dp, mp)), self.inert)

    @cached_property
    def layers(self) -> pipeline.Layers:
        """The weights of a pipeline's layers."""
        return pipeline.read_layers(self.files, self.tp, self.inert)

    def _degrees(self) -> tuple[int, int]:
        """Return the numbers of pipeline stages and of tensor-parallel ranks."""
        listed = self.head.get("checkpoint_parallel_dimensions") or {}
        ranks = int(self.head.get("mp_world_size") or 1)
        tp = int(listed.get("tp_degree") or 0)
        if not tp:
            tp = len({rank for _, rank in self.files.layers}) if self.files.layers else ranks
        if ranks % tp:
            raise CheckpointError(f"{self.where}: {ranks} model-parallel ranks cannot consist of {tp} tensor-parallel ones")
        return ranks // tp, tp

    def source(self) -> DeepSpeedSource:
        """Read all structure."""
        source = DeepSpeedSource(path=self.folder, files=self.files)
        experts = find_experts(self.files, self.head, self.dp, self.inert)
        heads = [self.head, *(self.model(0, mp) for mp in range(1, self.pp * self.tp))]
        if self.files.optimizer:
            self._load_optimizers()
        found, source.rules = self._states(heads, experts)
        self._name_weights(source, found, heads, experts)
        self._describe(source, found)
        return source

    # ---- the optimizer's states

    def _load_optimizers(self) -> None:
        first = _inner(load(self.files.need("optimizer", (0, 0)), self.inert), self.where)
        ranks = self.dp
        if "fp32_flat_groups" in first:
            ranks = int(first.get("partition_count") or ranks)
        for mp in range(self.pp * self.tp):
            self.inner[mp] = {}
            for dp in range(ranks):
                path = self.files.need("optimizer", (dp, mp))
                self.inner[mp][dp] = first if (dp, mp) == (0, 0) else _inner(load(path, self.inert), str(path))

    def _states(self, heads: list[dict[str, Any]], experts: Experts) -> tuple[Found, dict[str, Rule]]:
        """Return what the optimizer files hold of the whole model."""
        total, rules = Found(), {}
        if not self.inner and self.files.layers:
            by_stage = self._stages_without_zero(heads)
        elif not self.inner:
            by_stage = [self._without_zero(heads, experts)]
        else:
            by_stage = [self._zero(stage, heads, experts) for stage in range(self.pp)]
        for by_rank in by_stage:
            merged, more = tensor_parallel.merge(by_rank, self._rules_of(heads), self.where)
            total.add(merged)
            rules.update(more)
        return total, rules

    def _rules_of(self, heads: list[dict[str, Any]]) -> Mapping[str, Any] | None:
        inner = self.inner.get(0, {}).get(0, {})
        info: Mapping[str, Any] | None = heads[0].get("universal_checkpoint_info") or inner.get("universal_checkpoint_info")
        return info

    def _zero(self, stage: int, heads: list[dict[str, Any]], experts: Experts) -> list[Found]:
        by_rank = []
        for mp in range(stage * self.tp, (stage + 1) * self.tp):
            inner, shapes = self.inner[mp], heads[mp].get("param_shapes")
            shapes = [shapes] if isinstance(shapes, Mapping) else shapes
            if shapes is None:
                by_rank.append(read_fragments(inner[0], self._shape_in_layers()))
            elif "fp32_flat_groups" in inner[0]:
                by_rank.append(sharded.read_sharded(inner, shapes, self.where))
            else:
                by_rank.append(read_flat(inner, shapes, partial(_partitions, inner[0], experts), self.where))
        return by_rank

    def _without_zero(self, heads: list[dict[str, Any]], experts: Experts) -> list[Found]:
        by_rank = []
        for mp, head in enumerate(heads):
            weights, _ = names_with(head.get("module") or {}, head.get("buffer_names") or ())
            if not experts:
                optimizer = head.get("optimizer")
                by_rank.append(read_whole(optimizer, weights, lambda *_: True) if optimizer else Found())
                continue
            total = Found()
            for rank in sorted(rank for rank, at in self.files.expert_optimizer if at == mp):
                optimizer = load(self.files.need("expert_optimizer", (rank, mp)), self.inert)["optimizer"]
                size = expert_ranks(optimizer)
                held = {**weights, **experts.local(rank % size, size)}
                total.add(read_whole(optimizer, held, lambda name, group: bool(group.get("moe")) == experts.is_expert(name)))
            by_rank.append(total)
        return by_rank

    def _stages_without_zero(self, heads: list[dict[str, Any]]) -> list[list[Found]]:
        layers = self.layers
        buffers = {name for head in heads for name in head.get("buffer_names") or ()}
        optimizers: list[dict[str, Any]] = [head["optimizer"] for head in heads if head.get("optimizer")]
        if len(optimizers) < len(heads):
            return [[Found()] for _ in range(self.pp)]
        if "param_slice_mappings" in optimizers[0]:
            return [[read_fragments(optimizer, self._shape_in_layers())] for optimizer in optimizers]
        by_tp = []
        for rank in range(self.tp):
            mine = {
                layer: {f"{layer}.{name}": held[rank] for name, held in named.items() if f"{layer}.{name}" not in buffers}
                for layer, named in layers.weights.items()
            }
            by_tp.append(stages.read_stages(optimizers[rank :: self.tp], mine))
        return [list(ranks) for ranks in zip(*by_tp, strict=True)]

    def _shape_in_layers(self) -> Callable[[str], tuple[int, ...] | None]:
        """Return a function from a pipeline's parameter name to its shape, None where the layers' files leave it open."""
        layers = self.layers
        shapes = {name: held[0].shape for name, held in layers.flat().items()}

        def shape_of_name(name: str) -> tuple[int, ...] | None:
            if not name.startswith(pipeline.TIED):
                return shapes.get(name)
            rest = name[len(pipeline.TIED) :].partition(".")[2]
            fitting = {named[rest][0].shape for named in layers.weights.values() if rest in named}
            return fitting.pop() if len(fitting) == 1 else None

        return shape_of_name

    # ---- weights, buffers, aliases

    def _name_weights(self, source: DeepSpeedSource, found: Found, heads: list[dict[str, Any]], experts: Experts) -> None:
        buffers = [name for head in heads for name in head.get("buffer_names") or ()]
        weights, aliases = self._weights(heads, found, buffers)
        weights.update({name: (stored.shape, whole(stored)) for name, stored in experts.weights.items()})
        expected = {name: shape_of(shape) for name, shape in (heads[0].get("frozen_param_shapes") or {}).items()}
        known = {*weights, *found.shapes, *expected}
        order = [name for name in heads[0].get("module") or () if name in known]  # stage 3 lists names without elements
        for name in dict.fromkeys([*order, *weights, *found.shapes, *expected]):
            if name in buffers:
                shape, elements = weights[name]
                source.stored_buffers[name], source.buffer_shapes[name] = elements, shape
                continue
            trainable = name in found.shapes or bool(found.lost)
            held = dict(found.where.get(name, {}))
            if name in weights:
                held[WEIGHT] = weights[name][1]
            shape = found.shapes[name] if name in found.shapes else weights[name][0] if name in weights else expected[name]
            dtype = held[WEIGHT].dtype if WEIGHT in held else self._dtype(held)
            source.table[name] = Parameter(name, shape, dtype, trainable, tuple(aliases.get(name, ())))
            source.where[name] = held
            if found.lost and name not in found.shapes:
                source.missing[name, MASTER] = found.lost
            if name in expected and WEIGHT not in held and not trainable:
                source.missing[name, WEIGHT] = "the ranks' fragments of this frozen parameter are not all there"
        source.shapes, source.numbers, source.param_groups = found.own_shapes, found.numbers, found.groups
        source.missing.update(found.gaps)

    def _weights(self, heads: list[dict[str, Any]], found: Found, buffers: list[str]) -> tuple[dict[str, Any], dict[str, list[str]]]:
        """Return name -> (shape, elements) of what lies in the model's dtype, buffers too, and name -> its aliases."""
        if self.files.layers or heads[0].get("module") is None:
            return self._layer_weights(found, buffers)
        shared = heads[0].get("shared_params") or {}
        by_rank: list[dict[str, Stored]] = []
        aliases: dict[str, list[str]] = {}
        for head in heads:
            held, tied = names_with(head["module"], head.get("buffer_names") or ())
            by_rank.append(held | {name: head["module"][name] for name in head.get("buffer_names") or () if name in head["module"]})
            aliases = aliases or tied
        if self.files.sharded_model:
            return self._sharded_weights(heads, by_rank, shared, found)
        for alias, owner in shared.items():
            if alias in by_rank[0] and owner in found.shapes and alias not in found.shapes:
                aliases.setdefault(owner, []).append(alias)
                for held in by_rank:
                    held.pop(alias, None)
        return {name: self._join(name, [held[name] for held in by_rank], heads, buffers) for name in by_rank[0]}, aliases

    def _sharded_weights(
        self, heads: list[Any], by_rank: list[Any], shared: Any, found: Found
    ) -> tuple[dict[str, Any], dict[str, list[str]]]:
        """Stage 3 stores the names of parameters without their elements; only buffers and frozen parameters are there."""
        models = [self.head, *(self.model(dp, 0) for dp in range(1, self.dp))] if self.head.get("frozen_param_shapes") else [self.head]
        weights: dict[str, Any] = {name: (stored.shape, whole(stored)) for name, stored in by_rank[0].items() if stored.numel}
        weights.update(sharded.frozen(models))
        aliases: dict[str, list[str]] = {}
        frozen = self.head.get("frozen_param_shapes") or {}
        for alias, owner in shared.items():
            if owner in found.shapes or owner in frozen:
                aliases.setdefault(owner, []).append(alias)
        known = {*weights, *found.shapes, *frozen, *shared}
        lost = [name for name in by_rank[0] if name not in known]
        if lost:
            found.notes.append(
                f"{', '.join(lost[:5])}: named in the model states, but no file has their elements (tied to others, perhaps)"
            )
            found.gaps.update({(name, WEIGHT): "no file has its elements" for name in lost})
        return weights, aliases

    def _layer_weights(self, found: Found, buffers: list[str]) -> tuple[dict[str, Any], dict[str, list[str]]]:
        layers = self.layers
        masters = {name: held[MASTER] for name, held in found.where.items() if MASTER in held}
        tied = pipeline.tie(layers, masters, found.shapes, buffers)
        self._require_layers(found, layers)
        weights: dict[str, Any] = {}
        aliases: dict[str, list[str]] = {}
        for name, held in layers.flat().items():
            full = tied.get(name, name)
            if full != name:
                aliases.setdefault(full, []).append(name)
            if full not in weights:
                weights[full] = self._join(full, held, [self.head] * len(held), buffers)
        return weights, aliases

    def _require_layers(self, found: Found, layers: pipeline.Layers) -> None:
        for name in found.shapes:
            number_, _, _ = name.partition(".")
            if number_.isdigit() and int(number_) not in layers.weights:
                self.files.need("layers", (int(number_), 0))

    def _join(self, name: str, held: list[Stored], heads: list[dict[str, Any]], buffers: list[str]) -> tuple[tuple[int, ...], Elements]:
        """Return shape and elements of one weight whose slices the tensor-parallel ranks hold; buffers are alike on all."""
        parts = [whole(stored) for stored in held[: self.tp]]
        if len(parts) == 1 or name in buffers:
            return held[0].shape, parts[0]
        rule = tensor_parallel.rule_for(name, [stored.shape for stored in held[: self.tp]], self._rules_of(heads) or {}, self.where)
        return rule.shape, tensor_parallel.apply(rule, parts, self.where, name)

    def _dtype(self, held: Mapping[str, Elements]) -> torch.dtype:
        """Return the dtype in which the model computed, when its weights were not stored."""
        config = self.head.get("ds_config") or {}
        for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
            if isinstance(config.get(key), Mapping) and config[key].get("enabled") in (True, "true"):
                return dtype
        return held[MASTER].dtype if MASTER in held else torch.float32

    # ---- the rest

    def _describe(self, source: DeepSpeedSource, found: Found) -> None:
        inner = self.inner.get(0, {}).get(0, {})
        stored = self.head.get("optimizer") or {}
        source.stage = int(number(inner.get("zero_stage", 1))) if inner else 0
        source.scheduler_state = archive.materialize(self.head.get("lr_scheduler"))
        source.scaler_state = scaler_of(inner or stored)
        source.counts = {key: int(self.head[key]) for key in COUNTERS if isinstance(self.head.get(key), int)}
        source.client = {key: archive.materialize(value) for key, value in self.head.items() if key not in OWN_KEYS}
        source.common = _common(inner)
        source.model_files = [self.files.model[key] for key in sorted(self.files.model)]
        notes = list(found.notes)
        if isinstance(inner.get("base_optimizer_state"), list):
            notes.append("elastic_checkpoint was on: the options of parameter groups (lr, betas, ...) were not saved")
        if self.files.swapped:
            notes.append("part of the states was on NVMe when it was saved (offloaded_tensors/); what lies only there is not read")
        source.about = {
            "writer": "DeepSpeed",
            "version": self.head.get("ds_version"),
            "tag": self.folder.name,
            "stage": source.stage,
            "ranks": {"dp": self.dp, "pp": self.pp, "tp": self.tp},
            "notes": notes,
        }


def _inner(outer: dict[str, Any], where: str) -> dict[str, Any]:
    inner = outer.get("optimizer_state_dict")
    if not isinstance(inner, dict):
        raise CheckpointError(f"{where} holds no optimizer_state_dict; is it a file of a DeepSpeed optimizer?")
    return inner


def _common(inner: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer file's values that are no shards, with the parameter groups where a universal directory has them."""
    sharded_keys = ("base_optimizer_state", "single_partition_of_fp32_groups", "param_slice_mappings", "fp32_flat_groups")
    common = {key: archive.materialize(value) for key, value in inner.items() if key not in (*sharded_keys, "optimizer_state_dict")}
    if "optimizer_state_dict" in inner:
        base = inner["optimizer_state_dict"]
        numbers = {
            index: {key: kept for key, _, kept in split_states(states) if kept is not None} for index, states in base["state"].items()
        }
        common["optimizer_state_dict"] = {"state": numbers, "param_groups": base["param_groups"]}
    else:
        base = inner.get("base_optimizer_state")
    if isinstance(base, dict):
        common["param_groups"] = archive.materialize(base["param_groups"])
    elif base is not None:  # with elastic_checkpoint the groups' options are not saved
        common["param_groups"] = [{"params": [index]} for index in range(len(base))]
    return common


def _partitions(inner: dict[str, Any], experts: Experts, group: int) -> list[Partition]:
    base = inner["base_optimizer_state"]
    options = base["param_groups"][group] if isinstance(base, dict) and group < len(base["param_groups"]) else {}
    count = inner.get("partition_count")
    return experts.partitions(options, int(count[group]) if isinstance(count, (list, tuple)) else int(count or experts.ranks))


def scaler_of(held: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the loss scaler's state as plain values; None when none was kept."""
    scaler = held.get("loss_scaler")
    if isinstance(scaler, Inert) and isinstance(scaler.state, dict):
        return {key: value for key, value in scaler.state.items() if isinstance(value, (bool, int, float))} | {
            "dynamic": bool(held.get("dynamic_loss_scale", scaler.get("dynamic", False)))
        }
    if "cur_scale" in held:
        keys = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
        return {key: held[key] for key in keys if key in held} | {"dynamic": bool(held.get("dynamic_loss_scale"))}
    return None
