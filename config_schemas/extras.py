"""Blocks near zero use that are still checked: hybrid engine, inference quantization, DataStates checkpoints."""

from __future__ import annotations

from pydantic import ConfigDict

from .fields import Bool, Int, Section, key


class HybridEngine(Section):
    """Training and generation in turn on one model."""

    enabled: Bool = key(False, "Use it.", alters="result")
    max_out_tokens: Int = key(512, "Longest generation.", gt=0)
    inference_tp_size: Int = key(1, "Ranks that share a matrix while generating.", ge=1)
    release_inference_cache: Bool = key(False, "Free the cache after each generation.")
    pin_parameters: Bool = key(True, "Pinned parameters.")
    tp_gather_partition_size: Int = key(8, "Layers gathered at once.", ge=1)
    enable_cuda_graph: Bool = key(False, "Replay a captured graph.")


class OpenBlock(Section):
    """A block whose keys belong to another package; they pass as they are."""

    model_config = ConfigDict(extra="allow")
