"""The pipeline section: a model cut into stages along its depth."""

from __future__ import annotations

from .fields import Bool, Int, Section, Str, key


class Pipeline(Section):
    """How a PipelineModule is cut and run."""

    stages: Int = key(1, "Number of stages; auto means mesh.pp.", alters="result", ge=1)
    partition: Str = key("best", "How layers are shared out: best, uniform, parameters, or type:PATTERN.")
    seed_layers: Bool = key(False, "Seed every layer by itself, so that the cut does not change the start.")
    activation_checkpoint_interval: Int = key(0, "Recompute every so many layers; 0 means never.", ge=0)
    pipe_partitioned: Bool = key(True, "Send activations in slices when ranks share a matrix.")
    grad_partitioned: Bool = key(True, "Send gradients in slices when ranks share a matrix.")
    use_reentrant: Bool = key(True, "Kind of recomputation.")
