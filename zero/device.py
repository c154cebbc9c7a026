"""`OnDevice`: build modules on a device, usually meta, with a dtype."""

from __future__ import annotations

from typing import Any

import torch


class OnDevice:
    """A context in which new tensors are made on `device` ("meta" by default) with `dtype` as the floating default.

    Args:
        dtype: default dtype of floating-point parameters; None keeps torch's.
        device: any torch device; "meta" allocates nothing.
        enabled: False makes the context do nothing.
    """

    def __init__(self, dtype: torch.dtype | None = None, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self._dtype = dtype
        self._device = torch.device(device)
        self._enabled = enabled
        self._old_dtype: torch.dtype | None = None

    def __enter__(self) -> OnDevice:
        if self._enabled:
            self._device.__enter__()
            if self._dtype is not None:
                self._old_dtype = torch.get_default_dtype()
                torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._enabled:
            if self._old_dtype is not None:
                torch.set_default_dtype(self._old_dtype)
            self._device.__exit__(*exc)
