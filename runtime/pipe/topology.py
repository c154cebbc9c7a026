"""Grids of ranks where DeepSpeed scripts import them from."""

from __future__ import annotations

from ...pipe.topology import PipeDataParallelTopology, PipelineParallelGrid, PipeModelDataParallelTopology, ProcessTopology

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"]
