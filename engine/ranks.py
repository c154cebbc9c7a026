"""The engine's answers about ranks under DeepSpeed's names; ranks that share matrices do not exist in this version."""

from __future__ import annotations

from ..parallel import Collectives


class RankGetters:
    """Mixed into Engine; reads `self.dp` and `self.comm` and nothing else."""

    dp: Collectives
    comm: Collectives

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.comm.world

    @property
    def dp_world_size(self) -> int:
        """Number of data-parallel ranks: of copies of the model."""
        return self.dp.world

    @property
    def mp_world_size(self) -> int:
        """Number of ranks that hold one copy of the model: of pipeline stages."""
        return self.comm.world // self.dp.world

    def get_data_parallel_rank(self) -> int:
        """Rank of this process among those that average gradients."""
        return self.dp.rank

    def get_model_parallel_rank(self) -> int:
        """Rank of this process among those that hold one copy of the model: its pipeline stage, 0 without stages."""
        return 0

    def get_tensor_parallel_rank(self) -> int:
        """0: no ranks share a matrix."""
        return 0
