"""Engine: one training step of an unmodified module, read top-down: forward, backward, step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import EngineError
from ..parallel import Collectives
from ..parallel.collectives import Traffic
from ..zero.backward import in_backward
from ..zero.intact import check_kinds, follow_writes
from ..zero.model import ShardedModel
from ..zero.optimizer import ShardedOptimizer
from ..zero.pick import tensors_in
from ..zero.tiers.parking import Parking
from .batches import cast_floating, to_device
from .costs import Costs
from .data import EngineLoader, RepeatingLoader
from .getters import ConfigGetters
from .loops import WholeBatches
from .loss_scale import LossScale
from .precision import forward_context
from .progress import Progress, Timers
from .ranks import RankGetters
from .recording import count_tokens, keep_ledger, record_step
from .regions import Regions
from .reporting import step_traffic
from .saving import Saving
from .surface import EngineSurface
from .tier_reporting import MoveCounts, moves_now

_PLAIN_FP16 = (
    "loss.backward() under fp16 would leave the loss unscaled and its small gradients lost; "
    "call engine.backward(loss), or engine.scale(loss).backward()"
)


class Engine(WholeBatches, EngineSurface, ConfigGetters, RankGetters, nn.Module):
    """Runs `module` with its states placed as the config says. Built by stateroom.initialize().

    Attributes:
        module: the user's module.
        optimizer: a ShardedOptimizer, or None when there is nothing to train.
        lr_scheduler, training_dataloader: what initialize built or was given, or None.
        global_steps: optimizer steps done, skipped ones included. micro_steps: calls of step().
        global_samples: samples used. skipped_steps: steps skipped over inf or NaN gradients.
    """

    def __init__(
        self,
        model: ShardedModel,
        optimizer: ShardedOptimizer | None,
        lr_scheduler: Any,
        config: Any,
        scale: LossScale,
        regions: Regions,
        progress: Progress,
        loss_fn: Any = None,
        loader: EngineLoader | None = None,
        job: Collectives | None = None,
    ) -> None:
        super().__init__()
        self.module = model.module
        self.config = config
        self.optimizer = optimizer
        if optimizer is not None:
            optimizer.before_update = self._raise_on_nan_loss
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = loader
        self.loss_fn = loss_fn
        self.scaler = scale
        self.dp: Collectives = model.comm  # ranks that hold the same part of the model
        self.comm: Collectives = self.dp if job is None else job  # all ranks
        self.device = model.comm.device
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.losses: torch.Tensor | None = None
        self.sharded = model
        self.parking = Parking(model.units, optimizer)
        self.progress = progress
        self.regions = regions
        self.saving = Saving(self.comm, config, progress)
        self.last_checkpoint: Path | None = None  # saved or loaded
        self.client_state: dict[str, Any] = {}  # what saves that nobody asks for keep of the script's own
        self._repeating: RepeatingLoader | None = None
        self.timers = Timers(config.wall_clock_breakdown, self.device, self.dp.clock)
        self._context = forward_context(config, self.device)
        self._boundary: bool | None = None  # set by hand, else counted
        self._window_micros = 0  # micro-batches since the last update
        self._in_no_sync = False
        self._seen_passes = 0
        self._step_applied = False
        self._skips_in_a_row = 0
        self._bad_loss: torch.Tensor | None = None
        self._window_loss: torch.Tensor | None = None
        self._window_count = self.tokens = 0  # tokens: that this rank has seen in this step
        self.last_input = (0, 0)  # sequences and tokens a sequence of the newest input of token numbers
        self.step_ends: deque[float] = deque([self.timers.now()[0]], maxlen=2)  # moments on the host's clock
        self.costs: Costs | None = None  # of the newest steps, once there was one
        self._destroyed = False
        self._mesh: DeviceMesh | None = None
        self.last_step_traffic: dict[tuple[str, str], Traffic] = {}
        self._traffic_mark: dict[tuple[str, str], Traffic] = {}
        self.last_step_moves: MoveCounts = {}
        self._moves_mark: MoveCounts = moves_now(self)  # what was moved to build the states is no part of a step

    # ---- forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; the arguments are the module's."""
        self._check_alive()
        self.refuse_parked("lp_params")
        began = self.timers.now()
        backward = self.sharded.backward
        if backward.active and not in_backward():
            backward.abandon()  # the last backward raised
        if self.device.type != "cpu":
            args, kwargs = to_device(args, self.device), to_device(kwargs, self.device)
        if self.config.fp16.enabled and self.config.fp16.auto_cast:
            args, kwargs = cast_floating(args, torch.float16), cast_floating(kwargs, torch.float16)
        wants_grad = torch.is_grad_enabled()
        if wants_grad and not in_backward():
            check_kinds(self.sharded.units)
            self._thaw()
            self._prepare_pass(scale_wrt_gas=True)
            for unit in backward.units:
                unit.gradients.hide()  # type: ignore[union-attr]
            if self.training:
                count_tokens(self, args, kwargs)
        with self._context:
            output = self.module(*args, **kwargs)
        if wants_grad:
            for tensor in tensors_in(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(lambda grad: backward.begin())
        self.timers.add("forward", began)
        return output

    def _thaw(self) -> None:
        """Train what was frozen at initialize() and is unfrozen now, where a group of the optimizer holds it."""
        if self.optimizer is not None:
            thawed = self.sharded.growth.thaw_unfrozen()
            if thawed:
                self.optimizer.take_in(thawed)

    def _prepare_pass(self, scale_wrt_gas: bool) -> None:
        """Say what the coming backward does with gradients: the factor, and whether it reduces."""
        backward = self.sharded.backward
        if backward.active:
            return
        ranks = 1 if self.config.gradient_allreduce_op == "sum" else self.dp.world
        micro_batches = self.gradient_accumulation_steps() if scale_wrt_gas and self.config.managed_gradient_accumulation else 1
        backward.factor = 1.0 / (ranks * micro_batches)
        every_pass = self.dp.world > 1 and (self.sharded.placement.reduces_every_pass or self.config.deterministic)
        backward.sync = not self._in_no_sync and (every_pass or self.is_gradient_accumulation_boundary())
        backward.plain_refusal = _PLAIN_FP16 if self.scaler.scale != 1.0 else None

    # ---- backward

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run autograd from a scalar loss; gradients are averaged over ranks and micro-batches.

        Args:
            loss: scalar with a graph, not yet divided by the accumulation steps.
            scale_wrt_gas: False when the caller has divided by the accumulation steps (or weights tokens itself).

        Returns:
            the loss divided by the accumulation steps, detached.

        Raises:
            EngineError: the loss is not a scalar tensor with a graph.
        """
        self._check_alive()
        self.refuse_parked("lp_params", "lp_grads", "contiguous_grad_buffer")
        self._check_loss(loss)
        began = self.timers.now()
        divisor = self.gradient_accumulation_steps() if scale_wrt_gas and self.config.managed_gradient_accumulation else 1
        self._note_loss(loss.detach())
        backward = self.sharded.backward
        if backward.active:
            backward.abandon()
        self._prepare_pass(scale_wrt_gas)
        backward.announced = True
        backward.begin()
        try:
            scaled = loss if self.scaler.scale == 1.0 else loss.float() * self.scaler.scale
            scaled.backward(retain_graph=retain_graph)
        except BaseException:
            backward.abandon()
            raise
        backward.end()
        self.timers.add("backward", began)
        return loss.detach() / divisor

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss as `scale(loss).backward()` needs it: multiplied by the loss scale."""
        self._check_loss(loss)
        self._note_loss(loss.detach())
        self.sharded.backward.plain_refusal = None
        return loss if self.scaler.scale == 1.0 else loss.float() * self.scaler.scale

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, torch.Tensor):
            raise EngineError(f"backward() takes the loss tensor, got {type(loss).__name__}; pass the scalar loss of this forward")
        if loss.numel() != 1:
            raise EngineError(f"backward() takes a scalar loss, got shape {tuple(loss.shape)}; reduce it first, for example loss.mean()")
        if not loss.requires_grad:
            raise EngineError("the loss has no graph (requires_grad is False): run the forward through the engine, outside no_grad")
        if self.optimizer is None:
            raise EngineError("this engine has no optimizer: pass optimizer= to initialize, or an 'optimizer' section in the config")

    def _note_loss(self, loss: torch.Tensor) -> None:
        """Remember the loss and whether it is NaN, without waiting for the device."""
        loss = loss.float().reshape(())
        bad = torch.isnan(loss)
        self._bad_loss = bad if self._bad_loss is None else self._bad_loss | bad
        self._window_loss = loss if self._window_loss is None else self._window_loss + loss
        self._window_count += 1
        self.losses = loss

    # ---- step

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count a micro-batch; on the accumulation boundary update the parameters.

        Args:
            lr_kwargs: passed on to the scheduler's step().

        Raises:
            EngineError: no backward has run since the last step(), the loss was NaN on some rank, or fp16 overflows at
                the smallest loss scale.
        """
        self._check_alive()
        if self.optimizer is None:
            raise EngineError("this engine has no optimizer: pass optimizer= to initialize, or an 'optimizer' section in the config")
        self.refuse_parked()
        backward = self.sharded.backward
        if backward.active:
            backward.abandon()
        if backward.total_passes == self._seen_passes:
            raise EngineError("step() before backward(): call engine.backward(loss) (or loss.backward()) after each forward")
        boundary = self.is_gradient_accumulation_boundary()
        if self._in_no_sync and boundary and self.config.managed_gradient_accumulation and self._boundary is None:
            raise EngineError("step() inside no_sync() on an accumulation boundary: leave the context first")
        self._seen_passes, self._step_applied = backward.total_passes, False
        self.micro_steps += 1
        self._window_micros = 0 if boundary else self._window_micros + 1
        if boundary:
            self._update(lr_kwargs or {})

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        assert self.optimizer is not None
        began = self.timers.now()
        optimizer = self.optimizer
        optimizer.clip = self.gradient_clipping()
        follow_writes(self.sharded.units)
        self.sharded.trained.check()
        count = max(self._window_count, 1)
        nothing = torch.zeros((), device=self.device)
        bad = nothing if self._bad_loss is None else self._bad_loss
        optimizer.report = [bad, nothing if self._window_loss is None else self._window_loss / count, *self.saving.report()]
        had_loss = self._window_loss is not None
        self._bad_loss = self._window_loss = None
        self._window_count = 0
        optimizer.step()
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._after_update(optimizer, lr_kwargs)
        mark, self._traffic_mark = self._traffic_mark, self.dp.snapshot()
        self.last_step_traffic = step_traffic(mark, self._traffic_mark)
        moved, self._moves_mark = self._moves_mark, moves_now(self)
        self.last_step_moves = {key: value - moved.get(key, 0) for key, value in self._moves_mark.items()}
        self.timers.add("step", began)
        loss = sum(report[1] for report in optimizer.reports) / len(optimizer.reports) if had_loss else None
        record_step(self, loss)
        if self.global_steps == 1:
            keep_ledger(self)
        self.saving.after_update(self, [wish for report in optimizer.reports for wish in report[2:]])

    def _after_update(self, optimizer: ShardedOptimizer, lr_kwargs: dict[str, Any]) -> None:
        """Move loss scale and schedule on: the schedule only with real updates."""
        if not optimizer.overflow:
            self.scaler.update(False)
            self._skips_in_a_row = 0
            self._step_applied = True
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
            return
        self.skipped_steps += 1
        self._skips_in_a_row += 1
        if self.scaler.at_minimum:
            changes = ", ".join(f"{scale:g} since update {step}" for step, scale in self.scaler.history[-8:])
            raise EngineError(
                f"fp16: gradients overflow at step {self.global_steps} with the loss scale at its minimum {self.scaler.scale:g}, after "
                f"{self._skips_in_a_row} skipped steps in a row; the first bad gradient is that of {optimizer.bad_parameter!r}; loss "
                f"scale: {changes}. The weights are those of the last good step; try bf16, or look at this parameter's inputs"
            )
        old = self.scaler.scale
        self.scaler.update(True)
        self.progress.warn(
            f"step {self.global_steps} skipped: the gradient of {optimizer.bad_parameter!r} is not finite"
            + (f"; loss scale {old:g} -> {self.scaler.scale:g}" if self.scaler.dynamic else "; weights are unchanged")
        )

    def _raise_on_nan_loss(self, reports: list[list[float]]) -> None:
        ranks = [rank for rank, report in enumerate(reports) if report and report[0]]
        if ranks:
            raise EngineError(
                f"the loss is NaN on rank(s) {ranks} at step {self.global_steps + 1} (micro-batch {self.micro_steps}); "
                "the weights are those of the last good step. Look at that batch and at the learning rate"
            )

    # ---- accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the coming (or current) step() updates the parameters."""
        if self._boundary is not None:
            return self._boundary
        return self._window_micros + 1 >= self.gradient_accumulation_steps()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say by hand whether the next step() updates, instead of counting micro-batches."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Collect gradients on this rank without reducing them; every stage allows it, at the memory of whole gradients."""
        if self._in_no_sync:
            raise EngineError("no_sync() is entered already")
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients collected since the last update."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self._bad_loss = self._window_loss = None
        self._window_count = 0

    def destroy(self) -> None:
        """Take all hooks off and free what the engine holds; no rank waits for another.

        Parameters that every rank holds whole become the module's own again. Sharded ones are gone: take
        module_state_dict() before. A module that lost its parameters cannot be initialised again.
        """
        if self._destroyed:
            return
        self.parking.bring_back()
        self.saving.close()
        keep_ledger(self)
        self.regions.remove()
        self.sharded.remove()
        self.progress.close()
        self.dp.close()
        if self.comm is not self.dp:
            self.comm.close()
        if self.optimizer is not None:
            self.optimizer.before_update = None
        self.optimizer = None
        self._destroyed = True

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Engine:
        """Convert buffers; refuse what would change dtype or device of placed parameters, as half() and cpu() do."""
        for unit in self.sharded.units:
            probe = fn(torch.empty(0, dtype=unit.dtype, device=self.device))
            if probe.dtype != unit.dtype or probe.device != self.device:
                raise EngineError(
                    f"the engine's parameters are {unit.dtype} on {self.device} and stay so; half(), to() and their kind go before "
                    "initialize(), and mixed precision is set by bf16 or fp16 in the config"
                )
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else fn(buffer)
        return self

    def _check_alive(self, *, loads: bool = False) -> None:
        if self._destroyed:
            raise EngineError("this engine was destroyed; call stateroom.initialize again")
        if self.optimizer is not None and not loads:
            self.optimizer.fate.refuse_spoiled()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise
