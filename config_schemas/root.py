"""The whole config: the keys of the top level and every section, as one typed, frozen object."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PrivateAttr

from .activation import ActivationCheckpointing, Units
from .checkpointing import Checkpoint
from .compile import Compile
from .data import DataEfficiency
from .extras import HybridEngine, OpenBlock
from .fields import HONOURED, Bool, Dtype, Float, Int, Lower, Section, Str, key, later, no_effect, section
from .notes import Note, Verdict
from .observability import Autotuning, Comet, CommsLogger, CsvMonitor, FlopsProfiler, Tensorboard, Timers, Wandb
from .offload import Aio
from .optim import Optimizer
from .parallel import ExpertParallel, Mesh, TensorParallel
from .pipeline import Pipeline
from .precision import Bf16, DataTypes, Fp16, TorchAutocast
from .schedule import Scheduler
from .zero import ZeroOptimization

_MONITOR = later("monitors come with observability; metrics are in run_dir")


def _never(value: Any) -> Any:
    """Frameworks write infinity to keep the engine quiet."""
    return None if value in (math.inf, "Infinity", "inf") else value


class Config(Section):
    """A checked config in which every value is resolved. Build it with `load`."""

    train_batch_size: Int = key(None, "Samples of one optimizer step over all ranks.", effect=HONOURED, ge=1)
    train_micro_batch_size_per_gpu: Int = key(None, "Samples of one forward on one rank.", effect=HONOURED, ge=1)
    gradient_accumulation_steps: Int = key(None, "Micro batches of one optimizer step.", effect=HONOURED, ge=1)
    managed_gradient_accumulation: Bool = key(
        True, "The engine counts micro batches; false leaves the boundary and the division to the script.", effect=HONOURED
    )
    gradient_clipping: Float = key(1.0, "Largest global gradient norm; 0 turns clipping off. Absent means 1.0.", effect=HONOURED, ge=0)
    steps_per_print: Annotated[Int | None, BeforeValidator(_never)] = key(
        None, "Steps between two log lines; absent means none.", effect=HONOURED, ge=1
    )
    wall_clock_breakdown: Bool = key(False, "Time forward, backward, reduction and step.", effect=HONOURED)
    memory_breakdown: Bool = key(False, "Print memory at the phases of a step.", effect=HONOURED)
    zero_allow_untested_optimizer: Bool = key(
        False,
        "With states on nvme: trust an unknown optimizer to treat each tensor on its own. Elsewhere any is accepted.",
        effect=HONOURED,
    )
    zero_force_ds_cpu_optimizer: Bool = key(
        True, "With offload refuse torch's optimizers.", effect=no_effect("any optimizer may run on the host")
    )
    prescale_gradients: Bool = key(
        False, "Divide gradients before they are summed, not after.", effect=no_effect("gradients are always divided as they are collected")
    )
    gradient_predivide_factor: Float = key(
        1.0,
        "With prescale_gradients: divide by this before, by the rest after.",
        effect=no_effect("gradients are always divided as they are collected"),
        gt=0,
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], Lower] = key("mean", "Average or sum gradients over ranks.", effect=HONOURED)
    communication_data_type: Dtype | None = key(
        None, "Dtype in which gradients are reduced; absent means that of accumulation, fp32 by default.", effect=HONOURED
    )
    seq_parallel_communication_data_type: Dtype = key(
        "fp32", "Dtype in which gradients are reduced over a sequence group.", effect=later("sequences stay whole")
    )
    sequence_parallel_size: Int = key(1, "Ranks that share one sequence.", effect=later("sequences stay whole"), alters="result", ge=1)
    data_parallel_size: Int | None = key(
        None, "Beside sequence_parallel_size: data-parallel ranks.", effect=later("sequences stay whole"), ge=1
    )
    disable_allgather: Bool = key(
        False, "Broadcast updated weights in stages 1 and 2.", effect=no_effect("updated weights always travel by all-gather")
    )
    dump_state: Bool = key(False, "Print the engine's state at start.", effect=HONOURED)
    disable_python_gc: Bool = key(False, "Turn Python's automatic garbage collection off.", effect=HONOURED)
    dataloader_drop_last: Bool = key(False, "Drop an incomplete last batch of the built loader.", effect=HONOURED)
    log_level: Str | None = key(None, "Level of the package's logger, such as info.", effect=HONOURED)
    vocabulary_size: Int | None = key(
        None, "Warn about a vocabulary that tensor cores dislike.", effect=no_effect("no vocabulary is checked"), ge=1
    )
    use_data_before_expert_parallelism: Bool = key(
        False, "Order of data-parallel and expert-parallel ranks.", effect=later("experts stay together"), alters="placement"
    )
    optimizer: Optimizer | None = key(None, "The optimizer, when the script passes none.", effect=HONOURED)
    scheduler: Scheduler | None = key(None, "The learning-rate schedule, when the script passes none.", effect=HONOURED)
    fp16: Fp16 = section("Training in fp16.", effect=HONOURED)
    bf16: Bf16 = section("Training in bf16.", effect=HONOURED)
    torch_autocast: TorchAutocast = section("Forward under torch.autocast.", effect=HONOURED)
    data_types: DataTypes = section("Dtypes of gradients and buffers.", effect=HONOURED)
    zero_optimization: ZeroOptimization = section("Which states are sharded.", effect=HONOURED)
    aio: Aio = section("File I/O for nvme.", effect=HONOURED)
    activation_checkpointing: ActivationCheckpointing = section("Which activations are recomputed.", effect=HONOURED)
    units: Units = section("Which parameters travel together.", effect=HONOURED)
    mesh: Mesh = section("The grid of ranks.", effect=HONOURED)
    pipeline: Pipeline = section("A model cut into stages.", effect=HONOURED)
    tensor_parallel: TensorParallel = section("Matrices shared by ranks.", effect=later("matrices stay whole in compute"))
    expert_parallel: ExpertParallel = section("Experts shared by ranks.", effect=later("experts stay together"))
    compile: Compile = section("torch.compile over the units.", effect=HONOURED)
    checkpoint: Checkpoint = section("Saving and loading.", effect=HONOURED)
    flops_profiler: FlopsProfiler = section("FLOPs of a step.", effect=later("profiling comes with the ledger"))
    comms_logger: CommsLogger = section("Log of collectives.", effect=later("the log of collectives comes with the ledger"))
    tensorboard: Tensorboard = section("Events for TensorBoard.", effect=_MONITOR)
    wandb: Wandb = section("Events for Weights & Biases.", effect=_MONITOR)
    csv_monitor: CsvMonitor = section("Events as CSV.", effect=_MONITOR)
    comet: Comet = section("Events for Comet.", effect=_MONITOR)
    timers: Timers = section("Timers.", effect=later("throughput is always measured"))
    autotuning: Autotuning = section("Search for a fast config.", effect=later("the planner does the search; see stateroom plan"))
    data_efficiency: DataEfficiency = section("Fewer samples or tokens.", effect=later("samples and tokens are used as they come"))
    hybrid_engine: HybridEngine = section("Training and generation in turn.", effect=later("the engine only trains"))
    weight_quantization: dict[str, Any] | None = key(
        None, "Quantized weights for inference.", effect=no_effect("it concerns inference, and this engine trains")
    )
    datastates_ckpt: OpenBlock | None = key(
        None, "Asynchronous checkpoints by the DataStates package.", effect=no_effect("checkpoint.async does this without another package")
    )
    run_dir: Str | None = key(None, "Folder for the resolved config, metrics, ledger and checkpoints of a run.", effect=HONOURED)
    seed: Int | None = key(None, "Seed of Python, NumPy and torch on every rank.", effect=HONOURED, ge=0)
    deterministic: Bool = key(
        False,
        "Deterministic kernels where torch has them, and one order of reduction at every ZeRO stage, also under accumulation.",
        effect=HONOURED,
    )

    _notes: list[Note] = PrivateAttr(default_factory=list)
    _origin: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def notes(self) -> list[Note]:
        """What was chosen, renamed or left out while loading."""
        return self._notes

    @property
    def origin(self) -> dict[str, str]:
        """Dotted path of every value to where it came from: "line N", "config", "default", "auto" or "derived"."""
        return self._origin

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved config as plain values, defaults included; loading it gives the same config."""
        return self.model_dump(by_alias=True)

    def verdicts(self, defaults: bool = False) -> list[Verdict]:
        """Return what becomes of every key that the config sets (or, with `defaults`, of every key)."""
        from .verdicts import verdicts

        return verdicts(self, defaults)

    def unsupported(self, kind: Literal["result", "placement"] | None = None) -> list[str]:
        """Return a line for each key that is not honoured yet although it would change the result, or a placement."""
        from .verdicts import unsupported

        return unsupported(self, kind)
