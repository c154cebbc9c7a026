"""A step in which one rank's drive fails ends on every rank with the same words, before any rank goes on with what is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...errors import EngineError, StateroomError
from ...parallel.collectives import Collectives
from .drive import wait_for_all
from .tiers import Tiers

if TYPE_CHECKING:
    from ..unit import Unit

_MIXED = "The update took place in part: load_checkpoint() is all that this engine can do now"
_UNCHANGED = "No weight and no optimizer state was changed by this step"


class SharedFate:
    """What ranks agree on around an update, where states rest on drives; one small message more for each of the two.

    Attributes:
        spoiled: why this engine's states belong to no step; "" while they do.
    """

    def __init__(self, tiers: Tiers | None, job: Collectives) -> None:
        self._tiers, self._job = tiers, job
        self.spoiled = ""

    def refuse_spoiled(self) -> None:
        """Let nobody use or save states of which some took a step that others did not.

        Raises:
            EngineError: they did.
        """
        if self.spoiled:
            raise EngineError(self.spoiled)

    def settle(self, units: Sequence[Unit]) -> None:
        """Return when all that was stored on the way to this update is on the drives of all ranks.

        Raises:
            EngineError: on some rank it is not; on every rank, and nothing was changed.
        """
        homes = [unit.residence for unit in units if unit.residence is not None]
        trouble, cause = self._attempt(lambda: wait_for_all(transfer for home in homes for transfer in home.take_writing()))
        if trouble:
            raise EngineError(f"{trouble}. {_UNCHANGED}") from cause

    def update(self, work: Callable[[], None]) -> None:
        """Run this rank's part of the update.

        Raises:
            EngineError: it failed on some rank; on every rank, and their states belong to no step any more.
        """
        trouble, cause = self._attempt(work)
        if trouble:
            self.spoiled = f"{trouble}. {_MIXED}"
            raise EngineError(self.spoiled) from cause

    def _attempt(self, work: Callable[[], None]) -> tuple[str, Exception | None]:
        """Do something that may fail on some ranks; return what is wrong on any, and the error of this one."""
        if self._tiers is None or not self._tiers.drives:
            work()
            return "", None
        trouble, cause = "", None
        with self._tiers.agreed_on():
            try:
                work()
            except Exception as error:
                named = isinstance(error, StateroomError)
                trouble = str(error) if named else f"rank {self._job.rank}: the update failed: {type(error).__name__}: {error}"
                cause = error
        if self._job.any_flags(bytes([bool(trouble)]))[0] == 0:
            return "", None
        return "; ".join(dict.fromkeys(text for text in self._job.gather_objects(trouble) if text)), cause
