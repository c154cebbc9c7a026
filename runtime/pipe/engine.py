"""The engine of a model in stages where DeepSpeed scripts import it from."""

from __future__ import annotations

from ...engine.pipeline import PipelineEngine

__all__ = ["PipelineEngine"]
