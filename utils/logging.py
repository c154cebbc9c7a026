"""The package's logger, and messages from chosen ranks, under DeepSpeed's names."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..engine.progress import get_logger
from ..parallel.comm import get_rank, is_initialized

logger = get_logger()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log from the given ranks; -1 among them means all, as does a process without group. None: from rank 0."""
    wanted = [0] if ranks is None else ranks
    if not is_initialized() or -1 in wanted or get_rank() in wanted:
        logger.log(level, "[Rank %d] %s", get_rank(), message)
