"""The engine's answers about its config: DeepSpeed's getter methods, one per key that scripts ask for."""

from __future__ import annotations

from typing import Any

import torch

from .precision import state_dtypes


class ConfigGetters:
    """Mixed into Engine; reads `self.config` (a resolved Config) and nothing else."""

    config: Any

    def train_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one forward on one rank."""
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one optimizer step."""
        return self.config.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train batch, micro batch, accumulation steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def gradient_clipping(self) -> float:
        """Largest global gradient norm; 0 is off."""
        return self.config.gradient_clipping

    def zero_optimization(self) -> bool:
        """Whether any state is sharded by config (stage above 0)."""
        return self.config.zero_optimization.stage > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.config.zero_optimization.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.config.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.config.zero_optimization.stage >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """The config's stage3_gather_16bit_weights_on_model_save."""
        return self.config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def zero_offload_optimizer(self) -> Any:
        """The offload_optimizer section."""
        return self.config.zero_optimization.offload_optimizer

    def zero_offload_param(self) -> Any:
        """The offload_param section."""
        return self.config.zero_optimization.offload_param

    def zero_allow_untested_optimizer(self) -> bool:
        """The config's zero_allow_untested_optimizer."""
        return self.config.zero_allow_untested_optimizer

    def fp16_enabled(self) -> bool:
        """Whether weights are fp16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether weights are bf16."""
        return self.config.bf16.enabled

    def torch_autocast_enabled(self) -> bool:
        """Whether the forward runs under torch.autocast."""
        return self.config.torch_autocast.enabled

    def fp16_auto_cast(self) -> bool:
        """Whether floating inputs are cast to fp16."""
        return self.config.fp16.auto_cast

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.config.fp16.enabled and not self.config.fp16.loss_scale

    def initial_dynamic_scale(self) -> float:
        """The loss scale at the start."""
        return 2.0**self.config.fp16.initial_scale_power

    def steps_per_print(self) -> int | None:
        """Steps between two log lines."""
        return self.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether phases are timed."""
        return self.config.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        """Whether memory is printed."""
        return self.config.memory_breakdown

    def dump_state(self) -> bool:
        """Whether the state is printed at start."""
        return self.config.dump_state

    def optimizer_name(self) -> str | None:
        """The config's optimizer type."""
        return None if self.config.optimizer is None else self.config.optimizer.type

    def optimizer_params(self) -> dict[str, Any] | None:
        """The config's optimizer params."""
        return None if self.config.optimizer is None else self.config.optimizer.params

    def scheduler_name(self) -> str | None:
        """The config's scheduler type."""
        return None if self.config.scheduler is None else self.config.scheduler.type

    def scheduler_params(self) -> dict[str, Any] | None:
        """The config's scheduler params."""
        return None if self.config.scheduler is None else self.config.scheduler.params

    def gradient_predivide_factor(self) -> float:
        """The config's gradient_predivide_factor."""
        return self.config.gradient_predivide_factor

    def prescale_gradients(self) -> bool:
        """The config's prescale_gradients."""
        return self.config.prescale_gradients

    def sparse_gradients_enabled(self) -> bool:
        """Always false: sparse gradients are added into the dense flat buffer."""
        return False

    def dataloader_drop_last(self) -> bool:
        """The config's dataloader_drop_last."""
        return self.config.dataloader_drop_last

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients travel between ranks."""
        return state_dtypes(self.config).wire
