"""What an engine saves beside its tensors, and when it saves by itself: the engine's side of the checkpoint package."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..checkpoint.interval import Every, Schedule
from ..checkpoint.job import SaveRecord
from ..checkpoint.names import plain
from ..checkpoint.retention import prune
from ..checkpoint.saver import Contents, Saver
from ..checkpoint.values import to_json
from ..environment import read_launch
from ..errors import EngineError
from ..parallel import Collectives

if TYPE_CHECKING:
    from .engine import Engine
    from .progress import Progress

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
SIGTERM_STATUS = 143  # 128 + 15, as shells report a process that SIGTERM ended
_DUE, _ASKED_TO_END = 1, 2  # what ranks tell each other with every update


def local_rank() -> int:
    """Return this process's number on its host."""
    launch = read_launch()
    return 0 if launch is None else launch.local_rank


def module_state(engine: Engine, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
    """Return whole weights and buffers by name; every rank must call it."""
    state = engine.module.state_dict()
    if exclude_frozen:
        frozen = {name for name, param in engine.module.named_parameters(remove_duplicate=False) if not param.requires_grad}
        state = {name: value for name, value in state.items() if name not in frozen}
    return state


def save_weights(engine: Engine, folder: Path, filename: str, exclude_frozen: bool) -> bool:
    """Write whole weights in the compute dtype from rank 0; every rank must call it.

    Raises:
        EngineError: the file cannot be written; on every rank.
    """
    engine.comm.meet("save_16bit_model()")
    state = engine.whole_state_on_first_rank(exclude_frozen)
    trouble = ""
    if engine.comm.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write_weights(state, folder / filename)
        except (OSError, RuntimeError, ValueError) as error:
            trouble = f"save_16bit_model: {folder / filename} cannot be written: {error}"
    trouble = engine.comm.gather_objects(trouble)[0]
    if trouble:
        raise EngineError(trouble)
    return True


def _write_weights(state: dict[str, torch.Tensor], path: Path) -> None:
    """Write under another name, then rename: a crash leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        first: dict[int, str] = {}
        for name, value in state.items():
            first.setdefault(id(value), name)  # of names that share a tensor the format takes one
        save_file({name: state[name].contiguous() for name in first.values()}, partial, metadata={"format": "pt"})
    else:
        torch.save(state, partial)
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    partial.replace(path)


class Saving:
    """An engine's checkpoints: what writes them, when it saves by itself, and what a request to end does.

    Holds nothing of the engine, so that an engine that is dropped is free.
    """

    def __init__(self, comm: Collectives, config: Any, progress: Progress) -> None:
        section = config.checkpoint
        self._comm, self._progress, self._section = comm, progress, section
        self._saver: Saver | None = None
        self.folder = Path(section.dir) if section.dir else Path(config.run_dir) / "checkpoints" if config.run_dir else None
        mtbf_hours = section.mtbf_hours if section.auto_interval else None
        self._schedule = Schedule(Every(section.save_every_steps, section.save_every_minutes, mtbf_hours))
        self._end = EndRequest(progress) if section.save_on_sigterm else None

    @property
    def last(self) -> SaveRecord | None:
        """What the last save cost, once it has ended."""
        return None if self._saver is None else self._saver.last

    @property
    def saves_now(self) -> bool:
        """Whether a save is in flight."""
        return self._saver is not None and self._saver.busy

    # ---- saving

    def save(
        self,
        engine: Engine,
        folder: Path,
        tag: str | None,
        client_state: dict[str, Any],
        *,
        save_latest: bool = True,
        trainable_only: bool = False,
    ) -> SaveRecord:
        """Write the engine's whole state; every rank must call it.

        Raises:
            RankError: not every rank called it.
            CheckpointError: it cannot be written, or client_state would not load again; on every rank.
        """
        if self._saver is None:
            say, warn = self._progress.say, self._progress.warn
            self._saver = Saver(self._comm, say, warn, self._prune, in_background=self._section.async_)
        if engine._window_micros:
            self._progress.warn("save_checkpoint between micro-batches: the gradients collected so far are not part of the checkpoint")
        contents = Contents(
            engine.module,
            engine.sharded.units,
            engine.optimizer,
            lambda: training_state(engine),
            {"rng": rng_state(), "client_state": client_state},
            engine.part,
            trainable_only,
        )
        self._guard(engine)
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        record = self._saver.save(folder, tag, contents, save_latest=save_latest, on_other_tags=self._section.tag_validation)
        self._schedule.saved(record.stall_s)
        return record

    def _guard(self, engine: Engine) -> None:
        """Let whatever changes weights or states wait until a save in flight has copied them."""
        assert self._saver is not None
        for unit in engine.sharded.units:
            unit.before_write = self._saver.wait_staged
        if engine.optimizer is not None:
            engine.optimizer.before_write = self._saver.wait_staged

    def _prune(self, folder: Path) -> None:
        if self._section.keep_last is not None:
            for tag in prune(folder, self._section.keep_last, self._section.keep_every):
                self._progress.say(f"removed {tag.path} (checkpoint.keep_last is {self._section.keep_last})")

    # ---- saving without being asked

    def report(self) -> list[float]:
        """Return what this rank adds to the agreement of the coming update; nothing where no rank could ask for a save."""
        if not self._schedule.active and self._end is None:
            return []
        due = self._comm.rank == 0 and self._schedule.due_by_time()
        return [_DUE * due + _ASKED_TO_END * (self._end is not None and self._end.seen)]

    def after_update(self, engine: Engine, said: list[float]) -> None:
        """Save where it is due, and end the process where that was asked for.

        Args:
            said: what each rank had to report for this update.

        Raises:
            SystemExit: with status 143, after SIGTERM and a save.
        """
        if self._saver is not None:
            self._saver.poll()
        wishes = [int(value) for value in said]
        ends = any(wish & _ASKED_TO_END for wish in wishes)
        due = self._schedule.due_by_steps(engine.global_steps) or bool(wishes and wishes[0] & _DUE)
        if (due or ends) and self.folder is not None:
            self.save(engine, self.folder, None, dict(engine.client_state))
        if ends:
            self.wait()
            self._progress.say(f"SIGTERM: saved at step {engine.global_steps}; this process ends with status {SIGTERM_STATUS}")
            raise SystemExit(SIGTERM_STATUS)

    def wait(self) -> None:
        """Return when no save is in flight any more; what became of it is said."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """End the last save and give the signal back."""
        if self._saver is not None:
            self._saver.close()
        if self._end is not None:
            self._end.give_back()


class EndRequest:
    """Notes SIGTERM, which schedulers of clusters send some time before they kill."""

    def __init__(self, progress: Progress) -> None:
        self.seen = False
        self._before: Any = None
        self._taken = threading.current_thread() is threading.main_thread()
        if self._taken:
            self._before = signal.signal(signal.SIGTERM, self._note)
        else:
            progress.warn("checkpoint.save_on_sigterm has no effect: initialize() was not called in the main thread")

    def _note(self, number: int, frame: Any) -> None:
        self.seen = True

    def give_back(self) -> None:
        """Let SIGTERM do what it did before."""
        if self._taken and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before)
        self._taken = False


# ---- what is saved beside tensors


def training_state(engine: Engine) -> dict[str, Any]:
    """Return what is the same on every rank, in JSON form.

    Raises:
        CheckpointError: schedule or group options hold something that cannot be stored; names it.
    """
    optimizer, scheduler, loader = engine.optimizer, engine.lr_scheduler, engine.training_dataloader
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        for group, names in zip(optimizer.param_groups, optimizer.names_in_groups(), strict=True):
            groups.append({**group, "params": [plain(name) for name in names]})
    return {
        "stage": engine.zero_optimization_stage(),
        "optimizer": None if optimizer is None else type(optimizer.inner).__name__,
        "groups": [to_json(group, f"parameter group {index}") for index, group in enumerate(groups)],
        "scheduler": None if scheduler is None else to_json(scheduler.state_dict(), "the scheduler's state"),
        "loss_scaler": to_json(engine.scaler.state_dict(), "the loss scaler's state"),
        "counters": {name: getattr(engine, name) for name in COUNTERS},
        "data": None if loader is None else loader.position(),
        "config": to_json(engine.config.to_dict(), "the config"),
    }


def rng_state() -> dict[str, Any]:
    """Return this rank's random number generators, as values that load without running code."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "torch": torch.get_rng_state(),
        "device": torch.get_device_module(device).get_rng_state() if device is not None else None,
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
        "python": random.getstate(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Set this rank's random number generators to what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(state["device"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
