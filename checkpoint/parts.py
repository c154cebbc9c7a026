"""A checkpoint of a model whose parts lie on different ranks: which part a rank has, and what the parts say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..parallel.collectives import Collectives


@dataclass(frozen=True)
class Part:
    """What this rank's part of the model is; without a pipeline it is the whole, on all ranks.

    Attributes:
        comm: the ranks that hold this part. ranks: their numbers in the job.
        stored_names: id of a parameter -> the name under which the part that owns it stores it, where it is owned elsewhere.
        foreign: beginnings of names of buffers that another part owns.
        is_whole: there are no other parts.
    """

    comm: Collectives
    ranks: Sequence[int]
    stored_names: Mapping[int, str] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    is_whole: bool = True

    @classmethod
    def whole(cls, comm: Collectives) -> Part:
        """Return the part of a model that every rank has."""
        return cls(comm, range(comm.world))

    def owns(self, buffer: str) -> bool:
        """Whether this part saves a buffer."""
        return not buffer.startswith(self.foreign) if self.foreign else True


def joined(parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return what a manifest says of a model, from what its parts say; the first part speaks for what is the same everywhere."""
    said = [part for part in parts if part is not None]
    found = dict(said[0])
    for key in ("units", "excluded", "buffers"):
        found[key] = [item for part in said for item in part[key]]
    for key in ("parameters", "aliases"):
        found[key] = {name: value for part in said for name, value in part[key].items()}
    found["groups"] = _joined_groups([group for part in said for group in part["groups"]])
    return found


def _joined_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join groups with the same options, and drop those without parameters where there are others like them."""
    found: list[dict[str, Any]] = []
    for group in groups:
        options = {key: value for key, value in group.items() if key != "params"}
        like = next((other for other in found if {key: value for key, value in other.items() if key != "params"} == options), None)
        if like is None:
            found.append({**group, "params": list(group["params"])})
        else:
            like["params"] = list(dict.fromkeys([*like["params"], *group["params"]]))
    return found
