"""Marks on modules that are gathered as a whole, such as mixtures of experts whose order of use changes with the data."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..errors import LayoutError

_MARK = "stateroom_leaf"  # an attribute of the module instance, so that copies of a model keep it


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether this very module is marked."""
    return bool(getattr(model, _MARK, False))


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark this very module, or take its mark off; read when the model is given to initialize()."""
    setattr(model, _MARK, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of `model`, itself included, in module order."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str] | type | str, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark every module of the classes: its parameters become one unit, gathered and reduced together. Call it before initialize().

    Args:
        leaf_module_classes: classes (subclasses count too), or their names, plain or with the module's path.

    Returns:
        the modules that matched.

    Raises:
        LayoutError: no module matches, and raise_if_not_found is set.
    """
    return _set_by_class(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str] | type | str, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the marks of set_z3_leaf_modules off again; arguments, result and errors are the same."""
    return _set_by_class(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their full names in the model; returns the modules found and the names that are not there.

    Raises:
        LayoutError: a name is not there, and raise_if_not_found is set.
    """
    modules = dict(model.named_modules())
    return _set_found({name: [modules[name]] if name in modules else [] for name in module_names}, flag, raise_if_not_found, "name")


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules whose full name ends in one of the suffixes; returns the modules found and the suffixes that match nothing.

    Raises:
        LayoutError: a suffix matches nothing, and raise_if_not_found is set.
    """
    named = list(model.named_modules())
    found = {suffix: [module for name, module in named if name.endswith(suffix)] for suffix in module_name_suffixes}
    return _set_found(found, flag, raise_if_not_found, "name suffix")


def _set_by_class(model: nn.Module, classes: Sequence[type | str] | type | str, flag: bool, strict: bool) -> list[nn.Module]:
    wanted = [classes] if isinstance(classes, (type, str)) else list(classes)
    kinds = tuple(item for item in wanted if isinstance(item, type))
    names = {item for item in wanted if isinstance(item, str)}
    found = [module for module in model.modules() if isinstance(module, kinds) or is_named(module, names)]
    if not found and strict:
        listed = sorted(names | {kind.__name__ for kind in kinds})
        raise LayoutError(f"no module of class {listed} in {type(model).__name__}; give classes or their names as type(module) has them")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _set_found(found: dict[str, list[nn.Module]], flag: bool, strict: bool, kind: str) -> tuple[list[nn.Module], list[str]]:
    missing = [key for key, modules in found.items() if not modules]
    if missing and strict:
        raise LayoutError(f"no module with {kind} {missing}; full names are those of model.named_modules()")
    marked = list(dict.fromkeys(module for modules in found.values() for module in modules))
    for module in marked:
        set_z3_leaf_module(module, flag)
    return marked, missing


def is_named(module: nn.Module, classes: set[str]) -> bool:
    """Return whether the module's class is among the names, plain or with its path."""
    cls = type(module)
    return cls.__name__ in classes or f"{cls.__module__}.{cls.__qualname__}" in classes
