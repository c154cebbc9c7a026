"""The engine's answers about ranks under DeepSpeed's names; all ranks are data-parallel in this version."""

from __future__ import annotations

from ..parallel import Collectives


class RankGetters:
    """Mixed into Engine; reads `self.comm` and nothing else."""

    comm: Collectives

    def get_data_parallel_rank(self) -> int:
        """Rank of this process among those that average gradients."""
        return self.comm.rank

    def get_model_parallel_rank(self) -> int:
        """0: no ranks share a matrix."""
        return 0

    get_tensor_parallel_rank = get_model_parallel_rank
