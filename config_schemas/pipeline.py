"""The pipeline section: a model cut into stages along its depth."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from .fields import HONOURED, Bool, Int, Lower, Section, Str, as_int, key, no_effect

_ONE_WAY = no_effect("no ranks share a matrix, so payloads travel whole")


def _partition(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [as_int(item) for item in value]
    if isinstance(value, str) and (
        value.lower() in ("best", "parameters", "uniform", "memory", "flops") or value.lower().startswith("type:")
    ):
        return value
    raise ValueError("expected best, parameters, uniform, memory, flops, type:PATTERN, or a list of sizes or bounds")


class Pipeline(Section):
    """How a model is cut into stages and run."""

    stages: Int = key(1, "Number of stages; auto means mesh.pp.", effect=HONOURED, ge=1)
    schedule: Annotated[Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv", "dualpipev", "inference"], Lower] = key(
        "1f1b", "Order of forwards and backwards on each stage; `stateroom pipe show` draws it.", effect=HONOURED
    )
    chunks: Int = key(1, "Chunks of layers on each stage, for interleaved-1f1b (at least 2 there).", effect=HONOURED, ge=1)
    partition: Annotated[Any, BeforeValidator(_partition)] = key(
        "best",
        "How layers are shared out: best (parameters), uniform, memory, flops, type:PATTERN, or sizes or bounds as a list. "
        "Left out, a PipelineModule's own partition_method holds.",
        effect=HONOURED,
    )
    split: Str | None = key(
        None, "Cut a model that is no list of layers: auto, or the path of its one list of layers, such as model.layers.", effect=HONOURED
    )
    dynamic_shape: Bool = key(False, "Tell shapes with every message: for models whose shapes depend on values.", effect=HONOURED)
    seed_layers: Bool = key(
        False,
        "Seed every layer by itself, so that the cut does not change the start.",
        effect=no_effect("layers exist before the config is read; pass seed_layers to PipelineModule"),
    )
    activation_checkpoint_interval: Int = key(
        0, "Recompute every so many layers; 0 leaves it to PipelineModule's own argument.", effect=HONOURED, ge=0
    )
    pipe_partitioned: Bool = key(True, "Send activations in slices when ranks share a matrix.", effect=_ONE_WAY)
    grad_partitioned: Bool = key(True, "Send gradients in slices when ranks share a matrix.", effect=_ONE_WAY)
    use_reentrant: Bool = key(
        True, "Kind of recomputation.", effect=no_effect("recomputation never enters autograd twice, which gives the same gradients")
    )
