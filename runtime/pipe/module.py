"""The list of layers where DeepSpeed scripts import it from."""

from __future__ import annotations

from ...pipe.module import PipelineModule
from ...pipe.specs import LayerSpec, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
