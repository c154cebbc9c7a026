"""Pick units from a module tree without touching the user's code: repeated children, then whatever is left as the root."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import nn

from .leaf import is_named, z3_leaf_module

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
MIN_NUMEL = 1 << 18  # repeated children are grouped to at least this: below it a unit's host time weighs more than what it sends


@dataclass
class Site:
    """Where a unit is used: the modules whose forward needs it, in order, and the parameters it will hold."""

    name: str
    modules: list[nn.Module]
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)


def pick_sites(
    model: nn.Module,
    *,
    classes: Sequence[str] = (),
    min_numel: int | None = None,
    max_numel: int | None = None,
    closed: Sequence[str] = (),
) -> list[Site]:
    """Return the sites of `model`, the root first; every parameter is in exactly one of them.

    Args:
        classes: class names (or dotted paths) whose every outermost instance is a site; empty: repeated children of
            Sequential, ModuleList and ModuleDict.
        min_numel: consecutive candidates are grouped until they hold this many elements; None: MIN_NUMEL, and 0 for
            classes that were named.
        max_numel: a candidate with more elements is opened and its own repeated children are taken.
        closed: class names, module paths or ends of paths that are one site, never opened or grouped; so are modules marked as leaf.

    A parameter that several sites use belongs to the root, which stays gathered while any of them runs.
    """
    numel_of = cache(_numel)  # walks all that is below a module
    repeated = _repeated(model, "", max_numel, set(closed), numel_of)
    candidates = list(_named_class_instances(model, "", set(classes))) if classes else list(repeated)
    if min_numel is None:
        min_numel = 0 if classes else MIN_NUMEL
    sites = [Site("root", [model]), *_grouped(candidates, min_numel, set(closed))]
    names = {id(param): name for name, param in model.named_parameters()}
    users: dict[int, list[int]] = {}
    inside = {id(m) for site in sites[1:] for top in site.modules for m in top.modules()}
    for module in model.modules():
        if id(module) not in inside:
            for param in module._parameters.values():
                if param is not None:
                    users.setdefault(id(param), []).append(0)
    for index, site in enumerate(sites[1:], start=1):
        for module in site.modules:
            for param in module.parameters():
                users.setdefault(id(param), []).append(index)
    by_id = {id(param): param for param in model.parameters()}
    for key, param in by_id.items():
        owners = set(users[key])
        owner = owners.pop() if len(owners) == 1 else 0
        sites[owner].params.append((names[key], param))
    return [sites[0], *(site for site in sites[1:] if site.params)]


def _has_forward(module: nn.Module) -> bool:
    """Return whether hooks on the module run: lists of modules and of parameters are not called, and TorchScript takes no hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _holds_blocks(module: nn.Module) -> bool:
    """Return whether a module's children are blocks: the containers of torch, and modules that say so of themselves."""
    return isinstance(module, CONTAINERS) or getattr(module, "holds_blocks", False) is True


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _is_closed(module: nn.Module, path: str, closed: set[str]) -> bool:
    return is_named(module, closed) or z3_leaf_module(module) or path in closed or any(path.endswith(f".{name}") for name in closed)


def _named_class_instances(module: nn.Module, prefix: str, classes: set[str]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if is_named(child, classes) or z3_leaf_module(child):
            yield path, child
        else:
            yield from _named_class_instances(child, f"{path}.", classes)


def _repeated(
    module: nn.Module, prefix: str, max_numel: int | None, closed: set[str], numel_of: Callable[[nn.Module], int], is_row: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Yield children of containers whose class occurs there at least twice; look inside everything else.

    Where the repeated children are lists themselves (`for attention, mlp in self.layers`), each entry of such a row is taken.
    """
    kinds = Counter(type(child) for child in module.children() if numel_of(child)) if _holds_blocks(module) else Counter()
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_repeated = kinds[type(child)] >= 2 or (is_row and bool(numel_of(child)))
        inside = list(_repeated(child, f"{path}.", max_numel, closed, numel_of, is_repeated and not _has_forward(child)))
        holds_blocks = isinstance(child, CONTAINERS) and any(list(module.children()) for _, module in inside)
        is_candidate = is_repeated and not holds_blocks and _has_forward(child)
        small_enough = max_numel is None or numel_of(child) <= max_numel or not list(child.children())
        if _is_closed(child, path, closed):
            # A list that nobody calls can be a unit of the module around it only: its parameters are left to the root.
            yield from [(path, child)] if _has_forward(child) else []
        elif is_candidate and small_enough:
            yield path, child
        else:
            yield from inside


def _grouped(candidates: list[tuple[str, nn.Module]], min_numel: int, closed: set[str]) -> list[Site]:
    """Join consecutive candidates of one parent until each group is large enough; closed ones stand alone."""
    sites: list[Site] = []
    size, parent = 0, None
    for path, module in candidates:
        here, alone = path.rpartition(".")[0], _is_closed(module, path, closed)
        if sites and here == parent and size < min_numel and not alone:
            sites[-1].modules.append(module)
            sites[-1].name = f"{sites[-1].name.split('..')[0]}..{path.rpartition('.')[2]}"
            size += _numel(module)
        else:
            sites.append(Site(path, [module]))
            size, parent = max(_numel(module), min_numel * alone), here
    return sites


def tensors_in(tree: object, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module's inputs or outputs: nested containers, dataclasses and plain objects."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(tree, (list, tuple, set, frozenset)):
        for item in tree:
            yield from tensors_in(item, depth + 1)
    elif depth < 8 and hasattr(tree, "__dict__") and not isinstance(tree, (nn.Module, type)):
        yield from tensors_in(vars(tree), depth + 1)
