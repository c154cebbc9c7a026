"""What scripts ask an engine for besides its step: rates, ranks, weights, saves, the ledger; and DeepSpeed's names for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..checkpoint.parts import Part
from ..errors import ConfigError, EngineError
from ..ledger import Ledger, TrafficRow
from ..parallel import Collectives, axis_sizes, build_mesh
from ..zero.access import state_on_first_rank
from . import resuming, saving, tracing
from .data import EngineLoader
from .reporting import ledger_of
from .resuming import LoadOptions

if TYPE_CHECKING:
    from ..ledger.trace import ParameterTrace
    from ..zero.model import ShardedModel
    from ..zero.optimizer import ShardedOptimizer
    from ..zero.tiers.parking import Parking
    from .loss_scale import LossScale
    from .progress import Progress
    from .regions import Regions
    from .saving import Saving


class EngineSurface:
    """Mixed into Engine; reads the parts that Engine owns and holds no state of its own."""

    module: nn.Module
    optimizer: ShardedOptimizer | None
    sharded: ShardedModel
    comm: Collectives
    dp: Collectives
    device: torch.device
    config: Any
    scaler: LossScale
    progress: Progress
    regions: Regions
    saving: Saving
    last_checkpoint: Path | None
    parking: Parking
    _mesh: DeviceMesh | None
    _repeating: Any
    _step_applied: bool
    _in_no_sync: bool

    def was_step_applied(self) -> bool:
        """Whether the last step() changed the parameters."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """Global L2 norm of the last update's gradients before clipping; None before the first."""
        return None if self.optimizer is None else self.optimizer.grad_norm

    def get_lr(self) -> list[float]:
        """Learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer else []

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group; a scheduler overrides it at its next step."""
        for group in self.optimizer.param_groups if self.optimizer else ():
            if isinstance(group["lr"], torch.Tensor):  # compiled and captured steps read this very tensor
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Momentum (or betas) of each group."""
        groups = self.optimizer.param_groups if self.optimizer else []
        return [group.get("momentum", group.get("betas", 0.0)) for group in groups]

    def get_type(self) -> list[Any]:
        """The option `type` of each group; 0.0 where a group has none, as in DeepSpeed."""
        return [group.get("type", 0.0) for group in self.optimizer.param_groups] if self.optimizer else []

    @property
    def loss_scale(self) -> float:
        """The current loss scale; 1 without fp16."""
        return self.scaler.scale

    cur_scale = loss_scale

    @property
    def global_rank(self) -> int:
        """Rank of this process."""
        return self.comm.rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its host."""
        return self.device.index or 0 if self.device.type != "cpu" else saving.local_rank()

    @property
    def mesh(self) -> DeviceMesh:
        """The grid of ranks with axes pp, dp_replicate, dp_shard, cp and tp; made when first asked for, by all ranks."""
        if self._mesh is None:
            self._mesh = build_mesh(self.device.type, axis_sizes(self.config.mesh, self.comm.world))
        return self._mesh

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor]:
        """Return whole weights and buffers by name, in host memory under ZeRO-3; every rank must call it."""
        return saving.module_state(self, exclude_frozen_parameters)  # type: ignore[arg-type]

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Load whole weights by name at any stage; master weights follow. Every rank must call it with the same weights."""
        return self.module.load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the engine's whole state under save_dir/tag (default global_step<N>); every rank must call it.

        With `checkpoint.async` it returns at once: training goes on while the states are copied and written. `client_state`
        is kept for each rank. It may hold numbers, strings, tensors, numpy arrays, and lists, tuples and dicts of them.

        Raises:
            RankError: not every rank called it.
            CheckpointError: it cannot be written; on every rank. What fails later, beside training, is said at the next step.
        """
        self._check_alive()  # type: ignore[attr-defined]
        if self.comm.is_imagined:
            self.progress.say("a dry run saves nothing")
            return True
        self.refuse_parked()
        record = self.saving.save(
            self,  # type: ignore[arg-type]
            Path(save_dir),
            tag,
            client_state or {},
            save_latest=save_latest,
            trainable_only=exclude_frozen_parameters,
        )
        self.last_checkpoint = Path(save_dir) / record.tag
        return True

    def wait_for_checkpoint(self) -> None:
        """Return when no save is in flight; what became of it is said.

        Weights may be written to at any time through the engine, stateroom.zero and stateroom.utils, which wait for the copy
        that a save takes. A script that writes into whole parameters by itself (`param.data.mul_()`) calls this before.
        """
        self.saving.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
        rename: Callable[[str], str | None] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Restore a checkpoint of Stateroom or DeepSpeed, a universal one, or plain weights, under this engine's layout.

        The number of ranks, the stage and the precision may differ from those of the save. Every rank must call it.

        Args:
            load_dir: the directory with `latest` and the tags, or one checkpoint; also a safetensors folder or a file of
                torch.save with plain weights (then with load_module_only).
            tag: the checkpoint to load; else the one that `latest` names, or the newest that is whole.
            load_module_strict: a parameter or buffer that only one side has is an error; else it is said and left alone.
            load_optimizer_states: states and options of the optimizer, and the loss scale.
            load_module_only: weights and buffers, nothing else.
            custom_load_fn: called as fn(src=whole state dict, dst=module) to bring the weights itself.
            rename: name in the model -> name in the checkpoint, or None to leave that parameter or buffer alone.

        Returns:
            (path, client state of this rank, or of rank 0 where this rank did not exist), or (None, {}) when there is nothing.

        Raises:
            CheckpointError: it is damaged, incomplete, or does not fit; on every rank.
        """
        self._check_alive(loads=True)  # type: ignore[attr-defined]
        if self.comm.is_imagined:
            self.progress.say("a dry run loads nothing: tensors have no values here")
            return None, {}
        self.refuse_parked()
        self._repeating = None  # train_batch() goes on where the loaded state says
        options = LoadOptions(load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, rename, custom_load_fn)
        path, client_state = resuming.load(self, Path(load_dir), tag, options)  # type: ignore[arg-type]
        if path is not None:
            self.last_checkpoint = Path(path)
        return path, client_state

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write whole weights in the compute dtype to one file from rank 0; every rank must call it."""
        self._check_alive()  # type: ignore[attr-defined]
        if self.comm.is_imagined:
            self.progress.say("a dry run saves nothing")
            return True
        return saving.save_weights(self, Path(save_dir), save_filename, exclude_frozen_parameters)  # type: ignore[arg-type]

    save_fp16_model = save_16bit_model

    def stage_traffic(self) -> list[TrafficRow]:
        """Return what the last step sent to other stages of the model: nothing, without stages."""
        return []

    @property
    def part(self) -> Part:
        """Which part of the model this rank has, for checkpoints: the whole."""
        return Part.whole(self.comm)

    def whole_state_on_first_rank(self, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
        """Return whole weights and buffers in host memory of the first rank, an empty dict elsewhere; every rank must call it."""
        return state_on_first_rank(self.module, self.comm, exclude_frozen)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor]:
        """Return whole weights and buffers in host memory of the first rank, an empty dict elsewhere; every rank must call it."""
        self.comm.meet("_zero3_consolidated_16bit_state_dict()")
        return self.whole_state_on_first_rank(exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def collect_python_gc(self) -> int:
        """Run Python's garbage collector once, for runs with disable_python_gc; returns the objects freed."""
        return gc.collect()

    def compile(self, backend: str = "inductor", compile_kwargs: dict[str, Any] | None = None) -> None:  # type: ignore[override]
        """Compile the forward of each unit."""
        self.regions.compile(backend=backend, **(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        """Whether units are compiled."""
        return self.regions.compiled

    def ledger(self, show: bool = True, hardware: str | None = None) -> Ledger:
        """Return the account of this rank: states and traffic, predicted and measured, and what the newest steps cost.

        Args:
            show: the first rank prints its tables too.
            hardware: name (`stateroom ledger hardware`) or file of the device whose peak MFU is counted against; by default
                the accelerator that is here.

        Raises:
            LedgerError: `hardware` is not known.
        """
        ledger = ledger_of(self, hardware)  # type: ignore[arg-type]
        if show and self.comm.rank == 0:
            ledger.print()
        return ledger

    def trace_parameter(self, name: str, show: bool = True) -> ParameterTrace:
        """Return the life of one parameter over the newest step: where its parts lie, when it is gathered, freed, reduced and
        updated, where its fp32 master is, and which checkpoint files hold it. The first rank prints it too, with `show`.

        Each rank may call it by itself; what it says of moments is of this rank.

        Raises:
            EngineError: the module has no parameter of this name.
        """
        self._check_alive()  # type: ignore[attr-defined]
        trace = tracing.trace_parameter(self, name)  # type: ignore[arg-type]
        if show and self.comm.rank == 0:
            print(trace, flush=True)
        return trace

    # ---- DeepSpeed's names

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> EngineLoader:
        """Return a loader of this rank's share of a dataset; shuffled for the route "train"."""
        return EngineLoader(
            dataset,
            batch_size or self.config.train_micro_batch_size_per_gpu,
            self.dp.rank,
            self.dp.world,
            seed=self.config.seed or 0,
            drop_last=self.config.dataloader_drop_last,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type != "cpu",
            sampler=data_sampler,
            shuffle=route == "train",
        )

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce now what backward passes have left on this rank; every rank must call it. Units are the buckets."""
        units = self.sharded.backward.units
        dirty = self.dp.any_flags(bytes(unit.gradients.dirty for unit in units))  # type: ignore[union-attr]
        self.sharded.backward.flush([bool(flag) for flag in dirty])

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Collect the gradients of several backward passes on this rank and reduce them once at the end; any stage."""
        with self.no_sync():  # type: ignore[attr-defined]
            yield
        self.allreduce_gradients()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the accumulation steps so that one optimizer step uses `train_batch_size` samples.

        Raises:
            ConfigError: it is not a multiple of micro batch times ranks.
        """
        micro = self.config.train_micro_batch_size_per_gpu
        per_micro = micro * self.dp.world
        if train_batch_size <= 0 or train_batch_size % per_micro:
            raise ConfigError(
                f"train batch {train_batch_size} is not a multiple of {per_micro} (micro batch {micro} x "
                f"{self.dp.world} ranks); nearest legal: {max(1, train_batch_size // per_micro) * per_micro}"
            )
        update = {"train_batch_size": train_batch_size, "gradient_accumulation_steps": train_batch_size // per_micro}
        self.config = self.config.model_copy(update=update)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of one forward; the accumulation steps stay, the train batch follows."""
        if micro_batch_size <= 0:
            raise ConfigError(f"train_micro_batch_size_per_gpu must be at least 1, got {micro_batch_size}")
        train = micro_batch_size * self.config.gradient_accumulation_steps * self.dp.world
        self.config = self.config.model_copy(update={"train_micro_batch_size_per_gpu": micro_batch_size, "train_batch_size": train})

    def empty_partition_cache(self) -> None:
        """Release every gathered unit; the next use gathers it again."""
        for unit in self.sharded.units:
            unit.release()

    def refuse_parked(self, *kinds: str) -> None:
        """Let nobody use states that offload_states() has moved away: those of `kinds`, or any.

        Raises:
            EngineError: they are away.
        """
        away = self.parking.kinds
        if away and (not kinds or away & set(kinds)):
            self.sharded.units[0].refuse_parked()

    def offload_states(self, include: Any = None, device: str = "cpu", pin_memory: bool = True, non_blocking: bool = False) -> None:
        """Free the accelerator between two phases: move states to host memory until reload_states(), bit for bit.

        What is away cannot be used: with "lp_params" nothing runs, with gradient buffers no backward, with anything no step.

        Args:
            include: members or names of OffloadStateTypeEnum: optim_states, hp_params, lp_params, lp_grads,
                contiguous_grad_buffer; None: all of them. hp_params are separate master weights; in fp32 there are none.
            device: only "cpu".
            pin_memory: page-lock the host memory.
            non_blocking: accepted; the memory is free when this returns.

        Raises:
            EngineError: a name or device is unknown, or a context holds parameters.
        """
        self._check_alive()  # type: ignore[attr-defined]
        if str(getattr(device, "value", device)) != "cpu":
            raise EngineError(f"offload_states(device={device!r}): states go to host memory; leave device out or write 'cpu'")
        if self.sharded.backward.active:
            self.sharded.backward.abandon()
        self.saving.wait()  # a save in flight reads these states
        moved = self.parking.park(include, pin_memory)
        self.progress.say(f"offload_states: {moved:,} bytes moved to host memory: {', '.join(sorted(self.parking.kinds))}")

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what offload_states() moved; without effect when nothing is away."""
        self._check_alive()  # type: ignore[attr-defined]
        self.parking.bring_back()
