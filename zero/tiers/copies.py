"""Copies between host memory and an accelerator, beside what the training stream computes."""

from __future__ import annotations

import torch

from ...parallel.collectives import DONE, Pending


def copy_ahead(out: torch.Tensor, values: torch.Tensor) -> Pending:
    """Start copying `values` into `out`, which the training stream may use after wait(); both stay as they are until then."""
    with torch.no_grad():
        if out.device == values.device:
            out.copy_(values)
            return DONE
        device = out.device if out.device.type != "cpu" else values.device
        training = torch.accelerator.current_stream(device)
        beside = torch.Stream(device)
        beside.wait_stream(training)  # the memory of `out` may still be in use there
        with beside:
            out.copy_(values, non_blocking=True)
            arrived = beside.record_event()
    return Pending(lambda: torch.accelerator.current_stream(device).wait_event(arrived))


def copy_down(out: torch.Tensor, values: torch.Tensor) -> Pending:
    """Start copying `values` from an accelerator into host memory, which may be read after wait()."""
    with torch.no_grad():
        if out.device == values.device:
            out.copy_(values)
            return DONE
        beside = torch.Stream(values.device)
        beside.wait_stream(torch.accelerator.current_stream(values.device))
        with beside:
            out.copy_(values, non_blocking=True)
            arrived = beside.record_event()
        values.record_stream(beside)  # its memory is not given to others before the copy has ended
    return Pending(arrived.synchronize)
