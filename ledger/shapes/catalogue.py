"""Public models by name: sizes from their published configs, with the parameter count that their makers state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from .shape import ModelShape


@dataclass(frozen=True)
class Entry:
    """A model of the table.

    Attributes:
        published: parameters that its makers state; None where they state none.
        active: parameters one token uses as its makers state them, for mixtures.
        aliases: further names.
    """

    shape: ModelShape
    published: float | None = None
    active: float | None = None
    aliases: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def catalogue() -> Mapping[str, Entry]:
    """Return name -> entry; aliases are names of their own."""
    from .catalogue_dense import DENSE
    from .catalogue_mixtures import MIXTURES
    from .catalogue_older import OLDER

    found: dict[str, Entry] = {}
    for entry in (*DENSE, *MIXTURES, *OLDER):
        for name in (entry.shape.name, *entry.aliases):
            assert name not in found, name
            found[name] = entry
    return found
