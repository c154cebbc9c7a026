"""The offload sections of a config as tiers: checked against the host before anything is built, each choice that differs said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch import nn

from ..config_schemas import Config
from ..environment import read_launch
from ..errors import ConfigError
from ..ledger import OptimizerRecord
from ..ledger.memory.drive import drive_options
from ..ledger.states import optimizer_states
from ..parallel.collectives import Collectives
from ..zero.tiers.disk import round_up
from ..zero.tiers.options import DEVICE, NVME, TierOptions
from ..zero.tiers.tiers import Tiers
from .groups import Prepared
from .optimizers import Lamb, Muon, is_elementwise
from .precision import state_dtypes

_ZERO = "zero_optimization"
_HALF = (torch.float16, torch.bfloat16)


def tiers_of(
    cfg: Config, model: nn.Module, prepared: Prepared | None, comm: Collectives, job: Collectives, say: Callable[[str], None]
) -> Tiers | None:
    """Return the tiers that the config asks for, or None where everything stays on the device; every rank must call it.

    Args:
        comm: the ranks that share the model's states.
        job: all ranks; each has files of its own.

    Raises:
        ConfigError: the optimizer cannot be updated in pieces.
        EngineError: a drive is missing, read-only or too small, on any rank.
    """
    options = _options(cfg, prepared)
    if options.moves_nothing:
        return None
    if options.optimizer == NVME and prepared is not None and not is_separable(prepared.inner) and not cfg.zero_allow_untested_optimizer:
        raise ConfigError(
            f"{_ZERO}.offload_optimizer.device is nvme, and {type(prepared.inner).__name__} is not known to treat each tensor on its own: "
            "its states cannot be brought to memory piece by piece. Use cpu, or an optimizer of torch, or, if you know that it does, set "
            "zero_allow_untested_optimizer to true"
        )
    if options.pinned and comm.device.type == "cpu" and _given(cfg, "pin_memory"):
        say("config: pin_memory: no effect here: without an accelerator no memory is page-locked")

    def tell(message: str) -> None:
        for ranks in {id(each): each for each in (comm, job)}.values():
            ranks.tell(message)

    tiers = Tiers(options, job.rank, comm.device, say, tell)
    trouble = ""
    try:
        needs = _needs(cfg, model, prepared, options, comm.world)
        launch = read_launch()
        ranks = 1 if launch is None else launch.local_world_size
        if not job.is_imagined:
            _check_host(needs["host"], ranks)
        tiers.check(needs, ranks)
    except Exception as error:  # told to all ranks: one that is left alone would wait for the others
        trouble = f"rank {job.rank}: {error}"
    troubles = [text for text in job.gather_objects(trouble) if text]
    if troubles:
        raise ConfigError("; ".join(troubles))
    return tiers


def _check_host(num_bytes: int, ranks: int) -> None:
    """Refuse what host memory cannot hold: the system would end the process later without a word.

    Raises:
        ConfigError: the ranks of this host need more than is available.
    """
    available = psutil.virtual_memory().available
    if num_bytes * ranks > available:
        raise ConfigError(
            f"offload to cpu: the states of {ranks} rank(s) on this host take {num_bytes * ranks:,} bytes of host memory and {available:,} "
            "are available; use nvme, a ratio below 1, or more hosts"
        )


def is_separable(inner: torch.optim.Optimizer) -> bool:
    """Whether an optimizer may be stepped with some of its tensors at a time: what it does to one depends on no other."""
    return is_elementwise(inner) or isinstance(inner, (Lamb, Muon))


def _given(cfg: Config, name: str) -> bool:
    return any(
        cfg.origin.get(f"{_ZERO}.{section}.{name}", "default") != "default"
        and getattr(getattr(cfg.zero_optimization, section), "device") != "none"  # noqa: B009
        for section in ("offload_optimizer", "offload_param")
    )


def _options(cfg: Config, prepared: Prepared | None) -> TierOptions:
    zero = cfg.zero_optimization
    optimizer, params = zero.offload_optimizer, zero.offload_param
    to_optimizer = optimizer.device if zero.stage >= 1 and prepared is not None else "none"
    to_params = params.device if zero.stage >= 3 else "none"
    drive = drive_options(cfg)
    return TierOptions(
        optimizer=DEVICE if to_optimizer == "none" else to_optimizer,
        params=DEVICE if to_params == "none" else to_params,
        optimizer_path=Path(optimizer.nvme_path or "") if to_optimizer == NVME else None,
        params_path=Path(params.nvme_path or "") if to_params == NVME else None,
        ratio=optimizer.ratio,
        sub_group_numel=drive.sub_group,
        sub_groups=drive.rooms,
        param_buffers=params.buffer_count,
        param_buffer_numel=params.buffer_size,
        max_params_in_host=params.max_in_cpu,
        pinned=optimizer.pin_memory if to_optimizer != "none" else params.pin_memory,
        request_bytes=round_up(cfg.aio.block_size),
        requests=cfg.aio.queue_depth,
        states=_known_states(prepared),
    )


def _known_states(prepared: Prepared | None) -> tuple[str, ...]:
    """Return the names of optimizer states as large as the parameter that every group has."""
    if prepared is None:
        return ()
    found: list[set[str]] = []
    for group in prepared.inner.param_groups:
        options = tuple((name, group.get(name)) for name in ("amsgrad", "momentum", "centered", "use_muon"))
        known = optimizer_states(OptimizerRecord(type(prepared.inner).__name__, options, (), 4))
        found.append(set() if known is None else set(known[0]))
    return tuple(sorted(set.intersection(*found))) if found else ()


def _needs(cfg: Config, model: nn.Module, prepared: Prepared | None, options: TierOptions, world: int) -> dict[str, int]:
    """Return the bytes of this rank's states on the drives and in host memory, as far as they are known before anything is built."""
    precision = state_dtypes(cfg)
    trained = {} if prepared is None else prepared.group_of
    needs = {"optimizer": 0, "params": 0, "host": 0}
    in_host = 0
    for param in model.parameters():
        share = -(-param.numel() // world)
        dtype = precision.compute or param.dtype
        if options.params != DEVICE:
            in_host += share
            on_drive = options.params == NVME and in_host > options.max_params_in_host
            needs["params" if on_drive else "host"] += share * dtype.itemsize
        if options.optimizer != DEVICE and id(param) in trained:
            separate = dtype in _HALF and precision.master is not None
            master = precision.master if separate and precision.master is not None else dtype
            count = len(options.states) + (cfg.zero_optimization.stage >= 2) + separate
            size = round(share * master.itemsize * count * options.ratio)
            needs["optimizer" if options.optimizer == NVME else "host"] += size
    return needs
