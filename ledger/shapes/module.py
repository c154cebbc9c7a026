"""Reads a model that exists, usually on the meta device: its units to the byte, and its sizes where they can be known.

The only module of the calculator's input that needs torch; it is imported when a module is read, and only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...zero.layout import Layout
from ...zero.model import UnitOptions, kept_dtypes, split_kinds
from ...zero.pick import pick_sites
from ..problems import LedgerError
from ..records import UnitRecord
from .count import count_parameters
from .hf import shape_from_config
from .shape import ModelShape

_HEADS = ("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")


@dataclass(frozen=True)
class ModuleFacts:
    """What a module says of itself.

    Attributes:
        parameters: elements, tied ones once. units: (name, elements, trainable, item size) in the engine's order.
        shape: its sizes. difference: parameters of the shape less those counted; 0 when the shape is exact.
    """

    parameters: int
    units: tuple[tuple[str, int, bool, int], ...]
    shape: ModelShape

    @property
    def difference(self) -> int:
        """Parameters that the shape's formula counts too many (or, below 0, too few)."""
        return int(count_parameters(self.shape).total) - self.parameters

    def records(self, world: int, dtype: torch.dtype = torch.bfloat16, grad_itemsize: int = 4) -> list[UnitRecord]:
        """Return the units as the engine hands them to the ledger, cut over `world` ranks."""
        found = []
        for name, numel, trainable, itemsize in self.units:
            layout = Layout.even([(name, (numel,))], world)
            master = 4 if itemsize == dtype.itemsize and itemsize < 4 else None
            found.append(UnitRecord(name, layout, trainable, name == "root", itemsize, grad_itemsize, grad_itemsize, master))
        return found


def read_module(module: nn.Module, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> ModuleFacts:
    """Return the facts of a module; nothing of it is run.

    Args:
        dtype: of the parameters in training.
        sizes: fields of the shape to set, for what the module does not say.

    Raises:
        LedgerError: a size cannot be found and is not given.
    """
    kept = kept_dtypes(module, UnitOptions().keep_dtype_of)
    units = []
    for site in pick_sites(module):
        for (trainable, kind), params in split_kinds(site.params, dtype, kept).items():
            units.append((site.name, sum(param.numel() for _, param in params), trainable, kind.itemsize))
    return ModuleFacts(sum(param.numel() for param in module.parameters()), tuple(units), _shape(module, sizes))


def _shape(module: nn.Module, sizes: Mapping[str, Any]) -> ModelShape:
    config = getattr(module, "config", None)
    data: Mapping[str, Any] = config if isinstance(config, Mapping) else {}
    if config is not None and hasattr(config, "to_dict"):
        data = config.to_dict()
    if data.get("model_type"):
        shape = shape_from_config(data, type(module).__name__)
        return ModelShape(**{**vars(shape), **sizes}) if sizes else shape
    return _guessed(module, dict(sizes))


def _guessed(module: nn.Module, sizes: dict[str, Any]) -> ModelShape:
    """Sizes of a plain stack of equal blocks: the largest list of modules, the widest embedding, and the linears inside."""
    lists = [each for each in module.modules() if isinstance(each, (nn.ModuleList, nn.Sequential)) and len(each) > 1]
    lists = [each for each in lists if len({type(block) for block in each}) == 1]
    if not lists and "layers" not in sizes:
        raise LedgerError("the module has no list of equal blocks; give layers, hidden, heads, ffn and vocab")
    blocks = max(lists, key=lambda each: sum(p.numel() for p in each.parameters())) if lists else nn.ModuleList()
    tables = [each for each in module.modules() if isinstance(each, nn.Embedding)]
    table = max(tables, key=lambda each: each.num_embeddings, default=None)
    found: dict[str, Any] = {"name": type(module).__name__, "layers": len(blocks), "source": "read from the module"}
    if table is not None:
        found |= {"vocab": table.num_embeddings, "hidden": table.embedding_dim}
    hidden = sizes.get("hidden", found.get("hidden"))
    linears = [each for each in (blocks[0].modules() if len(blocks) else []) if isinstance(each, nn.Linear)]
    wide = max((max(each.out_features, each.in_features) for each in linears), default=0)
    found["ffn"] = wide
    found["gated"] = sum(each.out_features == wide and each.in_features == hidden for each in linears) >= 2
    found["norm"] = "layernorm" if any(isinstance(each, nn.LayerNorm) for each in module.modules()) else "rms"
    biased = any(each.bias is not None for each in linears)
    found |= {"qkv_bias": biased, "output_bias": biased, "mlp_bias": biased}
    found["heads"] = _attribute(blocks, _HEADS)
    found["kv_heads"] = _attribute(blocks, _KV_HEADS)
    names = {id(param) for param in module.parameters()}
    heads = [
        each for each in module.modules() if isinstance(each, nn.Linear) and table is not None and each.out_features == table.num_embeddings
    ]
    found["tied"] = table is not None and (not heads or any(each.weight is table.weight for each in heads)) and id(table.weight) in names
    found |= sizes
    missing = [name for name in ("vocab", "hidden", "layers", "heads", "ffn") if not found.get(name)]
    if missing:
        raise LedgerError(f"{type(module).__name__} does not say {', '.join(missing)}; give {'them' if len(missing) > 1 else 'it'} by name")
    return ModelShape(**found)


def _attribute(blocks: nn.Module, names: tuple[str, ...]) -> int | None:
    for each in blocks.modules():
        for name in names:
            value = getattr(each, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None
