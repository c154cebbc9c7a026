"""Optimizers where DeepSpeed scripts import them from."""

from __future__ import annotations

from . import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]
