"""The compile section: torch.compile over the units, and DeepCompile's keys."""

from __future__ import annotations

from .fields import HONOURED, Bool, Int, Section, Str, key, later, no_effect

_PASSES = no_effect("torch.compile runs inside a unit, and the unit's hooks already gather, reduce and release around it")
_OFFLOAD = later("compiled graphs offload nothing")


class Compile(Section):
    """torch.compile applied to each unit."""

    enabled: Bool = key(False, "Compile the units.", effect=HONOURED)
    backend: Str = key("inductor", "Backend of torch.compile.", effect=HONOURED)
    mode: Str | None = key(None, "Mode of torch.compile, such as max-autotune.", effect=HONOURED)
    fullgraph: Bool = key(False, "Make a graph break an error.", effect=HONOURED)
    dynamic: Bool | None = key(None, "Dynamic shapes: true, false, or absent to let torch decide.", effect=HONOURED)
    deepcompile: Bool = key(False, "DeepSpeed's compiler; here the same as enabled.", effect=HONOURED)
    passes: list[Str] | None = key(None, "DeepCompile passes: z1, z3, autosp, autotp.", effect=_PASSES)
    free_activation: Bool = key(False, "Free activations early.", effect=_PASSES)
    free_activation_threshold: Int = key(10 * 1024 * 1024, "Bytes from which they are freed.", effect=_PASSES, ge=0)
    offload_activation: Bool = key(False, "Move activations to the host.", effect=_OFFLOAD, alters="placement")
    offload_activation_pin_memory: Bool = key(True, "Pinned buffers for them.", effect=_OFFLOAD)
    offload_opt_states: Bool = key(False, "Move optimizer states to the host.", effect=_OFFLOAD, alters="placement")
    offload_parameters: Bool = key(False, "Move parameters to the host.", effect=_OFFLOAD, alters="placement")
    double_buffer: Bool = key(True, "Two gather buffers in turn.", effect=_PASSES)
    symmetric_memory: Bool = key(False, "Use symmetric memory for gathers.", effect=_PASSES)
    sync_before_reduce: Bool = key(False, "Wait before a reduction.", effect=_PASSES)
    sync_after_reduce: Bool = key(False, "Wait after a reduction.", effect=_PASSES)
    sync_before_allgather: Bool = key(False, "Wait before a gather.", effect=_PASSES)
    sync_after_allgather: Bool = key(False, "Wait after a gather.", effect=_PASSES)
    keep_int_input_tensors: Bool = key(True, "Keep integer inputs for profiling.", effect=_PASSES)
    keep_all_input_tensors: Bool = key(False, "Keep all inputs for profiling.", effect=_PASSES)
    autoep_non_moe: Bool = key(False, "Compile what is not a mixture layer under expert parallelism.", effect=_PASSES)
    debug_log: Bool = key(False, "Write the compiler's graphs.", effect=_PASSES)
