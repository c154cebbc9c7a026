"""The name `deepspeed` in this process: a finder on sys.meta_path that hands out modules which forward to Stateroom's.

Nothing is patched. `import deepspeed.zero` finds a module object of its own whose attributes are looked up in
`stateroom.zero` when they are asked for, so every class exists once. The surface answered is that of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import StateroomError
from ..version import __version__
from .table import NAME, Target, children_of, names_of, target_of, why_absent

ANSWERED_VERSION = f"0.19.8+stateroom.{__version__}"  # the local part keeps bug reports honest


class AliasError(StateroomError, RuntimeError):
    """Stateroom cannot answer for `deepspeed` in this process."""


class MissingModule(StateroomError, ModuleNotFoundError):
    """A module of DeepSpeed's was imported that has no counterpart."""


class MissingName(StateroomError, AttributeError):
    """A name of DeepSpeed's was looked up that has no counterpart."""


class AliasModule(ModuleType):
    """Stands for one DeepSpeed module; what a script sets on it stays on it."""

    def __init__(self, fullname: str, target: Target) -> None:
        stands_for = target.source or "single names of stateroom"
        super().__init__(fullname, f"Answered by Stateroom: {stands_for}.")
        self.__dict__["_target"] = target

    def __getattr__(self, name: str) -> Any:
        target: Target = self.__dict__["_target"]
        if name == "__all__":
            return [item for item in dir(self) if not item.startswith("_")]
        if name.startswith("__") and name != "__version__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        single = names_of(target.path)
        if name in single:
            module, attribute = single[name]
            return getattr(importlib.import_module(module), attribute)
        child = f"{self.__name__}.{name}"
        if target_of(child) is not None:
            return importlib.import_module(child)
        if target.source is not None:
            source = importlib.import_module(target.source)
            if hasattr(source, name):
                return getattr(source, name)
        raise MissingName(_why(target, f"{target.path}.{name}".lstrip("."), name))

    def __dir__(self) -> list[str]:
        target: Target = self.__dict__["_target"]
        found = {*self.__dict__, *names_of(target.path), *children_of(target.path)} - {"_target"}
        if target.source is not None:
            source = importlib.import_module(target.source)
            found |= set(getattr(source, "__all__", dir(source)))
        return sorted(found)


def _why(parent: Target | None, path: str, name: str) -> str:
    """Return why there is nothing at `path`; our own module of the parent may know more than the table."""
    reason = ""
    if parent is not None and parent.source is not None:
        try:
            getattr(importlib.import_module(parent.source), name)
        except AttributeError as error:
            reason = str(error).partition(": ")[2]
    return why_absent(path, reason)


class AliasLoader(Loader):
    """Makes the module; there is no code to run."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that forwards to the target."""
        return AliasModule(spec.name, self._target)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: attributes are looked up when they are asked for."""


class AliasDistribution(Distribution):
    """What importlib.metadata tells of `deepspeed`."""

    def read_text(self, filename: str) -> str | None:
        """Return the metadata file, the only one that there is."""
        if filename != "METADATA":
            return None
        summary = "The name under which Hugging Face's libraries find Stateroom"
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {ANSWERED_VERSION}\nSummary: {summary}\nAuthor: Stateroom\n"

    def locate_file(self, path: Any) -> Any:
        """Return a path below this package's folder."""
        return Path(__file__).parents[1] / path


class AliasFinder(DistributionFinder):
    """Finds `deepspeed`, its modules and its version."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a DeepSpeed module, None for any other package.

        Raises:
            MissingModule: the module has no counterpart. Python would drop the reason of an ordinary "not found" on
                `from deepspeed.x import y`.
        """
        if fullname != NAME and not fullname.startswith(f"{NAME}."):
            return None
        found = target_of(fullname)
        if found is None:
            parent, _, name = fullname.rpartition(".")
            raise MissingModule(_why(target_of(parent), fullname.removeprefix(f"{NAME}."), name))
        return ModuleSpec(fullname, AliasLoader(found), is_package=True)

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:  # type: ignore[override]
        """Yield the one distribution, when it is asked for or all are."""
        if context is None or context.name is None or context.name.lower() == NAME:
            yield AliasDistribution()


def enable() -> None:
    """Let `deepspeed` mean Stateroom in this process, for transformers, accelerate, peft and any other library.

    Call it before accelerate, transformers' Trainer or its models are imported: they decide on import whether there is
    a DeepSpeed. Calling it twice is harmless. Importing stateroom alone never does this.

    Raises:
        AliasError: another `deepspeed` is imported already, or one of the libraries has decided that there is none.
    """
    if any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        return
    _refuse_another()
    _refuse_decided()
    sys.meta_path.insert(0, AliasFinder())


def disable() -> None:
    """Take the name away again. Libraries that were imported meanwhile keep what they took from it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AliasFinder)]
    for name in [name for name, module in sys.modules.items() if isinstance(module, AliasModule)]:
        del sys.modules[name]


def _refuse_another() -> None:
    for name, module in sys.modules.items():
        if (name == NAME or name.startswith(f"{NAME}.")) and not isinstance(module, AliasModule):
            where = getattr(module, "__file__", None) or "no file"
            raise AliasError(
                f"stateroom.hf.enable(): another {name!r} ({where}) is imported in this process already; call enable() before anything "
                "imports it, at the top of the script, or start the script with `python -m stateroom.hf script.py`"
            )


def _refuse_decided() -> None:
    """Look for what the libraries leave out for good when they are imported without a DeepSpeed."""
    # module -> a name that it has only when it found DeepSpeed while it was imported
    marks = {
        "accelerate.utils": "DummyOptim",
        "accelerate.accelerator": "DeepSpeedEngineWrapper",
        "transformers.trainer": "DeepSpeedSchedulerWrapper",
    }
    decided = [name for name, mark in marks.items() if name in sys.modules and not hasattr(sys.modules[name], mark)]
    glue = sys.modules.get("transformers.integrations.deepspeed")
    if glue is not None and glue.HfDeepSpeedConfig.__base__ is object:
        decided.append(glue.__name__)
    if decided:
        raise AliasError(
            f"stateroom.hf.enable(): {', '.join(decided)} was imported before, found no DeepSpeed and keeps to that; call enable() before "
            "importing accelerate, peft or names from transformers, or start the script with `python -m stateroom.hf script.py`"
        )
