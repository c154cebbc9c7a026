"""What scripts ask a pipelined engine for besides its step: whole weights, where a rank stands, loaders; and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.modules.module import _IncompatibleKeys

from ..errors import EngineError
from ..pipe.handover import gathered
from ..pipe.topology import PipelineParallelGrid
from ..zero.access import state_on_first_rank
from .data import RepeatingLoader
from .engine import Engine

if TYPE_CHECKING:
    from ..ledger.trace import ParameterTrace
    from .pipeline_setup import Cut

_NO_SINGLE = (
    "a pipelined model has no {} of its own: its stages work on several micro-batches at once. Call engine.train_batch(data_iter), "
    "which runs a whole optimizer step, or engine.eval_batch(data_iter)"
)
_NO_PART = (
    "{} has no meaning for a pipelined model: engine.train_batch(data_iter) runs all micro-batches of a step, reduces their gradients "
    "and updates, and leaves none behind"
)


class PipelineSurface(Engine):
    """Reads the parts that PipelineEngine owns."""

    cut: Cut

    # ---- whole weights

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor]:
        """Return the weights and buffers of all stages by the whole model's names, in host memory of every rank.

        Every rank must call it. `engine.module.state_dict()` gives this stage's part alone, and
        `engine.whole_state_on_first_rank()` fills the first rank's memory only.
        """
        self._check_alive()
        self.comm.meet("module_state_dict()")
        return self._whole_state(exclude_frozen_parameters, everywhere=True)

    def whole_state_on_first_rank(self, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
        """Return the weights and buffers of all stages in host memory of the first rank, an empty dict elsewhere."""
        return self._whole_state(exclude_frozen, everywhere=False)

    def _whole_state(self, exclude_frozen: bool, *, everywhere: bool) -> dict[str, torch.Tensor]:
        mine = state_on_first_rank(self.module, self.dp, exclude_frozen)
        return gathered(self.comm, [row[0] for row in self.cut.grid.ranks], mine, everywhere=everywhere)

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load this stage's part of the whole model's weights by name; every rank must call it with the same weights.

        Returns:
            names that are missing, and names that no stage knows, of the whole model.

        Raises:
            EngineError: with `strict`, there are such names; on every rank, before anything is loaded.
        """
        self._check_alive()
        self.comm.meet("load_module_state_dict()")
        own = set(self.module.state_dict(keep_vars=True))
        known = {name for names in self.comm.gather_objects(sorted(own)) for name in names}
        missing, unexpected = sorted(known - set(state_dict)), sorted(set(state_dict) - known)
        if strict and (missing or unexpected):
            raise EngineError(
                f"load_module_state_dict: these are not the weights of the whole model: {len(missing)} missing ({_few(missing)}), "
                f"{len(unexpected)} unknown to all stages ({_few(unexpected)}); pass strict=False to load what fits, or this stage's part "
                "to engine.module.load_state_dict()"
            )
        self.module.load_state_dict({name: state_dict[name] for name in state_dict if name in own}, strict=False)
        return _IncompatibleKeys(missing, unexpected)

    def trace_parameter(self, name: str, show: bool = True) -> ParameterTrace:
        """Return the life of a parameter of this stage; see Engine.trace_parameter."""
        try:
            return super().trace_parameter(name, show)
        except EngineError as error:
            stage, stages = self.cut.stage, self.cut.stages
            raise EngineError(f"{error}. This rank holds stage {stage} of {stages}: ask a rank that holds the parameter's layer") from None

    # ---- refused

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: see train_batch."""
        raise EngineError(_NO_SINGLE.format("forward()"))

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        """Refused: see train_batch."""
        raise EngineError(_NO_SINGLE.format("backward()"))

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        """Refused: see train_batch."""
        raise EngineError(_NO_SINGLE.format("step()"))

    def scale(self, loss: torch.Tensor) -> NoReturn:
        """Refused: see train_batch."""
        raise EngineError(_NO_SINGLE.format("scale()"))

    def no_sync(self) -> NoReturn:  # type: ignore[override]
        """Refused: gradients of a step are reduced once anyway."""
        raise EngineError(_NO_PART.format("no_sync()"))

    def coalesce_grad_reduction(self) -> NoReturn:  # type: ignore[override]
        """Refused: gradients of a step are reduced once anyway."""
        raise EngineError(_NO_PART.format("coalesce_grad_reduction()"))

    def allreduce_gradients(self, bucket_size: int | None = None) -> NoReturn:
        """Refused: see train_batch."""
        raise EngineError(_NO_PART.format("allreduce_gradients()"))

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> NoReturn:
        """Refused: see train_batch."""
        raise EngineError(_NO_PART.format("set_gradient_accumulation_boundary()"))

    def is_gradient_accumulation_boundary(self) -> bool:
        """True: what runs is always a whole step."""
        return True

    # ---- where this rank stands

    @property
    def grid(self) -> PipelineParallelGrid:
        """Where this rank stands, under DeepSpeed's names."""
        return self.cut.seen()

    mpu = grid

    def get_model_parallel_rank(self) -> int:
        """Rank of this process among those that hold one copy of the model: its stage."""
        return self.cut.stage

    def is_first_stage(self) -> bool:
        """Whether this rank holds the first part of the model."""
        return self.cut.stage == 0

    def is_last_stage(self) -> bool:
        """Whether this rank holds the last part of the model; under a vee of chunks that is the first stage too."""
        return self.cut.holds_last

    def is_pipe_parallel(self) -> bool:
        """Whether there is more than one stage."""
        return self.cut.stages > 1

    # ---- where batches come from

    def _source(self, data_iter: Any) -> Any:
        if data_iter is not None:
            return data_iter
        if self._iterator is None and self.training_dataloader is not None:
            self._repeating = self._repeating or RepeatingLoader(self.training_dataloader)
            return self._repeating
        return self._iterator

    def set_dataloader(self, loader: Any) -> None:
        """Take batches from a loader, again and again, where train_batch() is given none."""
        self._iterator = RepeatingLoader(loader)

    def set_dataiterator(self, iterator: Any) -> None:
        """Take batches from an iterator where train_batch() is given none."""
        self._iterator = iterator

    def set_batch_fn(self, fn: Any) -> None:
        """Turn what iterators give into (inputs, labels) with a function."""
        self._batch_fn = fn

    def set_has_attention_mask(self, value: bool) -> None:
        """Nothing is to be set: a tuple or dict travels between layers with whatever it holds."""


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "") if names else "none"
