"""Ranks as a grid with named axes: rank arithmetic under DeepSpeed's names, without tensors and without messages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError


class ProcessTopology:
    """Ranks 0, 1, … laid over a grid in row-major order: the last axis changes fastest.

    Args:
        axes: names, the slowest first. dims: their sizes.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(size < 1 for size in dims):
            raise ConfigError(
                f"a topology needs one positive size for each of its distinct axes, got axes {list(axes)} and dims {list(dims)}"
            )
        self.axes, self.dims = list(axes), list(dims)
        self._coords = [dict(zip(self.axes, at, strict=True)) for at in itertools.product(*map(range, dims))]

    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self._coords)

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis; 0 for one that is not there."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord: int) -> int:
        """Return the rank at a coordinate, which names every axis.

        Raises:
            ConfigError: an axis is missing or unknown, or the coordinate is outside the grid.
        """
        if sorted(coord) != sorted(self.axes):
            raise ConfigError(
                f"get_rank() needs a coordinate on each of {self.axes}, got {sorted(coord)}; filter_match() takes some of them"
            )
        found = self.filter_match(**coord)
        if not found:
            raise ConfigError(f"{coord} is outside the grid {dict(zip(self.axes, self.dims, strict=True))}")
        return found[0]

    def get_coord(self, rank: int) -> Any:
        """Return the coordinate of a rank: an object with the axes as attributes."""
        if not 0 <= rank < len(self._coords):
            raise ConfigError(f"rank {rank} is outside the grid of {len(self._coords)} ranks")
        return Coordinate(**self._coords[rank])

    def filter_match(self, **coord: int) -> list[int]:
        """Return the ranks whose coordinates have these values on these axes."""
        unknown = [axis for axis in coord if axis not in self.axes]
        if unknown:
            raise ConfigError(f"the grid has no axis {unknown[0]!r}; its axes are {self.axes}")
        return [rank for rank, at in enumerate(self._coords) if all(at[axis] == value for axis, value in coord.items())]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at position `idx` of an axis."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ on one axis alone; none for an axis that is not there."""
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        sizes = [range(self.get_dim(name)) for name in others]
        return [self.filter_match(**dict(zip(others, at, strict=True))) for at in itertools.product(*sizes)]

    def get_rank_repr(self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-") -> str:
        """Return a rank's coordinate as text, such as "model_01", without the axes of `omit_axes`."""
        at = self._coords[rank]
        return outer_sep.join(f"{axis}{inner_sep}{at[axis]:02d}" for axis in self.axes if axis not in omit_axes)

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in zip(self.axes, self.dims, strict=True))


class Coordinate:
    """Where a rank stands on each axis, as attributes."""

    def __init__(self, **at: int) -> None:
        self.__dict__.update(at)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Coordinate) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(sorted(vars(self).items())))

    def __repr__(self) -> str:
        return f"Coordinate({', '.join(f'{axis}={value}' for axis, value in vars(self).items())})"


class PipeDataParallelTopology(ProcessTopology):
    """Stages x data-parallel ranks; the ranks of a stage are neighbours."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(("pipe", "data"), (num_pp, num_dp))


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages x data-parallel ranks x ranks that share matrices."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(("pipe", "data", "model"), (num_pp, num_dp, num_mp))


class Grid:
    """Which ranks are the stages and copies of a pipelined model: `ranks[stage][copy]`."""

    def __init__(self, ranks: Sequence[Sequence[int]]) -> None:
        self.ranks = [list(row) for row in ranks]
        self._home = {rank: (stage, copy) for stage, row in enumerate(self.ranks) for copy, rank in enumerate(row)}

    @classmethod
    def over(cls, world: int, stages: int, topology: ProcessTopology | None = None) -> Grid:
        """Lay `world` ranks out as `stages` x the rest, or as a topology says.

        Raises:
            ConfigError: the ranks cannot be laid out so, or the topology has an axis beside pipe and data.
        """
        if topology is None:
            if world % stages:
                raise ConfigError(f"{world} rank(s) cannot be shared out over {stages} pipeline stages; start a multiple of {stages} ranks")
            copies = world // stages
            return cls([[stage * copies + copy for copy in range(copies)] for stage in range(stages)])
        for axis in topology.axes:
            if axis not in ("pipe", "data") and topology.get_dim(axis) > 1:
                raise ConfigError(
                    f"topology: the axis {axis!r} has {topology.get_dim(axis)} ranks; this version cuts no matrices over ranks"
                )
        if topology.world_size() != world:
            raise ConfigError(f"topology: {topology} are {topology.world_size()} ranks, but {world} were started")
        return cls([topology.get_axis_list("pipe", stage) for stage in range(max(topology.get_dim("pipe"), 1))])

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.ranks)

    @property
    def copies(self) -> int:
        """Number of data-parallel ranks of each stage."""
        return len(self.ranks[0])

    def seen_from(self, rank: int, data_group: Any = None, chain_group: Any = None) -> PipelineParallelGrid:
        """Return the answers of DeepSpeed's grid object for a rank."""
        return PipelineParallelGrid(self, rank, data_group, chain_group)

    def at(self, rank: int) -> tuple[int, int]:
        """Return (stage, copy) of a rank."""
        return self._home[rank]


class PipelineParallelGrid:
    """Where a rank stands, under the names by which scripts ask DeepSpeed's grid (`engine.grid`).

    As there, "model parallel" means the ranks that hold one copy of the model: here its stages, since no ranks share a
    matrix. "Tensor model parallel" and "slice parallel" mean ranks that share matrices: this rank alone.
    """

    def __init__(self, grid: Grid, rank: int, data_group: Any = None, chain_group: Any = None) -> None:
        self._grid, self._rank, self._data_group, self._chain_group = grid, rank, data_group, chain_group
        self._stage, self._copy = grid.at(rank)

    def topology(self) -> ProcessTopology:
        """Return the axes and their sizes."""
        return PipeDataParallelTopology(self._grid.stages, self._grid.copies)

    def get_global_rank(self) -> int:
        """Return the rank in the job."""
        return self._rank

    # ---- stages

    def get_stage_id(self) -> int:
        """Return the stage."""
        return self._stage

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = get_stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self._grid.stages

    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    @property
    def pp_group(self) -> list[int]:
        """The ranks that hold this rank's copy of the model, by stage."""
        return [row[self._copy] for row in self._grid.ranks]

    @property
    def is_first_stage(self) -> bool:
        """Whether this is stage 0."""
        return self._stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this is the stage with the highest number."""
        return self._stage + 1 == self._grid.stages

    def get_pipe_parallel_group(self) -> Any:
        """Return the process group of the stages of this rank's copy of the model, by stage; None where there is one stage."""
        return self._chain_group

    def stage_to_global(self, stage_id: int) -> int:
        """Return the rank that holds a stage of this rank's copy of the model."""
        return self._grid.ranks[stage_id][self._copy]

    # ---- copies of the model

    def get_data_parallel_id(self) -> int:
        """Return which copy of the model this rank is in."""
        return self._copy

    get_data_parallel_rank = get_data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Return the number of copies."""
        return self._grid.copies

    def get_data_parallel_group(self) -> Any:
        """Return the process group of the ranks that hold this stage."""
        return self._data_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the ranks that hold this stage, by copy."""
        return list(self._grid.ranks[self._stage])

    # ---- all ranks of one copy of the model

    get_model_parallel_rank = get_stage_id
    get_model_parallel_world_size = get_pipe_parallel_world_size
    get_model_parallel_group = get_pipe_parallel_group

    # ---- ranks that share matrices

    def get_slice_parallel_rank(self) -> int:
        """Return 0: no ranks share a matrix."""
        return 0

    def get_slice_parallel_world_size(self) -> int:
        """Return 1: no ranks share a matrix."""
        return 1

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
