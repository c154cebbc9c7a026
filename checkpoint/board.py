"""Where the ranks of one save leave word for each other without a collective: a background thread may not run one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import torch.distributed as dist

from ..errors import RankError

_POLL_S = 0.005
_SLOWEST_POLL_S = 0.2


class Board:
    """Texts by key in a key-value store, read by asking again and again.

    A blocking wait would hold the store's connection, which the training thread uses too.
    """

    def __init__(self, store: dist.Store, patience_s: float) -> None:
        self._store = store
        self._patience_s = patience_s
        self._mine: list[str] = []

    def put(self, key: str, text: str) -> None:
        """Leave a text."""
        self._store.set(key, text)
        self._mine.append(key)

    def collect(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the texts under all keys, once they are there.

        Raises:
            RankError: some did not come in time; names them.
        """
        missing, found = list(keys), {}
        deadline, pause = time.monotonic() + self._patience_s, _POLL_S
        never = threading.Event()
        while True:
            here = [key for key in missing if self._store.check([key])]
            found.update({key: self._store.get(key).decode() for key in here})
            missing = [key for key in missing if key not in found]
            if not missing:
                return found
            if here:
                deadline, pause = time.monotonic() + self._patience_s, _POLL_S
            if time.monotonic() > deadline:
                raise RankError(f"no word from {', '.join(missing)} in {self._patience_s:.0f} s; look at the errors of these ranks")
            never.wait(pause)
            pause = min(2 * pause, _SLOWEST_POLL_S)

    def clear(self) -> None:
        """Take back what this rank has left."""
        for key in self._mine:
            self._store.delete_key(key)
        self._mine = []
