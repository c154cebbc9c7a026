"""The engine's answers about ranks under DeepSpeed's names; ranks that share matrices do not exist in this version."""

from __future__ import annotations

from ..parallel import Collectives


class RankGetters:
    """Mixed into Engine; reads `self.dp` and nothing else."""

    dp: Collectives

    def get_data_parallel_rank(self) -> int:
        """Rank of this process among those that average gradients."""
        return self.dp.rank

    def get_model_parallel_rank(self) -> int:
        """0: no ranks share a matrix."""
        return 0

    get_tensor_parallel_rank = get_model_parallel_rank
