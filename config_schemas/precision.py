"""Numbers: fp16, bf16, autocast, and the dtypes of gradients and buffers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from .fields import HONOURED, Bool, Dtype, Float, Int, NamesOrAuto, Section, Str, as_dtype, key, later


class Fp16(Section):
    """fp16 weights and gradients beside fp32 master weights, with a loss scale."""

    enabled: Bool = key(False, "Train with fp16 weights and gradients and fp32 master weights.")
    loss_scale: Float = key(0.0, "Fixed loss scale; 0 means a dynamic one.", ge=0)
    initial_scale_power: Int = key(16, "A dynamic loss scale starts at 2 to this power.", ge=0)
    loss_scale_window: Int = key(1000, "Steps without overflow before the loss scale doubles.", gt=0)
    hysteresis: Int = key(2, "Overflows tolerated before the loss scale is halved.", ge=1)
    consecutive_hysteresis: Bool = key(False, "Refill the tolerance after every step without overflow.")
    min_loss_scale: Int = key(1, "The loss scale never falls below this; an overflow here ends the run.", ge=0)
    auto_cast: Bool = key(False, "Cast floating-point inputs of the model to fp16.")
    fp16_master_weights_and_grads: Bool = key(False, "Keep no fp32 master: the optimizer works on fp16 weights.")


class Bf16(Section):
    """bf16 weights beside fp32 master weights; bf16 needs no loss scale."""

    enabled: Bool = key(False, "Train with bf16 weights and fp32 master weights.")
    immediate_grad_update: Bool = key(False, "Add each gradient to its accumulator inside backward, as soon as it exists.")
    check_grad_overflow: Bool = key(True, "Skip the step when a gradient is infinite or not a number.")
    bf16_master_weights_and_grads: Bool = key(False, "Keep no fp32 master: the optimizer works on bf16 weights.")
    bf16_optimizer_states: Bool = key(False, "Keep the optimizer states in bf16 too; needs bf16_master_weights_and_grads.")


def _low_precision(value: object) -> str:
    name = as_dtype(value)
    if name == "fp32":
        raise ValueError("expected bf16 or fp16 (or bfloat16, float16, half)")
    return name


class TorchAutocast(Section):
    """The forward pass under torch.autocast; weights and optimizer states stay fp32."""

    enabled: Bool = key(False, "Run forward under torch.autocast.", effect=HONOURED)
    dtype: Annotated[Literal["fp16", "bf16"], BeforeValidator(_low_precision)] | None = key(
        None, "Dtype inside autocast; absent means bf16.", effect=HONOURED
    )
    lower_precision_safe_modules: list[Str] = key(
        ["torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"],
        "Classes whose parameters and gradients may travel in the autocast dtype.",
        effect=later("autocast runs keep parameters and gradients in fp32 on the wire"),
    )


class DataTypes(Section):
    """Dtypes of gradients, parameters and buffers."""

    grad_accum_dtype: Dtype | None = key(
        None, "Dtype of gradient accumulation; absent means fp32, also for 16-bit weights.", effect=HONOURED
    )
    param_dtype: Dtype | None = key(None, "Dtype of the weights; must agree with the fp16 and bf16 blocks.", effect=HONOURED)
    buffer_dtype: Dtype | None = key(
        None,
        "Dtype that buffers are cast to; absent means that each keeps its own.",
        effect=later("buffers keep the dtype they were made with"),
        alters="result",
    )
    keep_in_fp32_modules: NamesOrAuto = key(
        "auto",
        'Name patterns of buffers that stay fp32; "auto" asks the model for its own list.',
        effect=later("buffers keep the dtype they were made with, so fp32 buffers stay fp32"),
    )
