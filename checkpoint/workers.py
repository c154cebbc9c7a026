"""A few threads that work off a list: plain ones, because executors refuse work once the interpreter has begun to end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import TypeVar

Task = Callable[[], None]
T = TypeVar("T")


class Workers:
    """Threads that run tasks in the order in which they were given; the first error is raised at the end.

    Later tasks still run, and look at `failed` where they may leave their work undone.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._work, name=f"stateroom-{name}-{i}", daemon=True) for i in range(threads)]

    def __enter__(self) -> Workers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._error = self._error or error
        for _ in self._threads:
            self._tasks.put(None)
        try:
            self._join()
        except BaseException as interrupt:
            self._error = self._error or interrupt  # what is waiting is left undone, what runs is waited for
            self._join()
            raise
        if error is None and self._error is not None:
            raise self._error

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    @property
    def failed(self) -> bool:
        """Whether a task has raised."""
        return self._error is not None

    def submit(self, task: Task) -> None:
        """Add a task."""
        self._tasks.put(task)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:
                self._error = self._error or error


def each(items: Iterable[T], work: Callable[[T], None], threads: int, name: str) -> None:
    """Run `work` on every item in some threads, until one raises; raise its error."""
    with Workers(threads, name) as workers:

        def run(item: T) -> None:
            if not workers.failed:
                work(item)

        for item in items:
            workers.submit(partial(run, item))
