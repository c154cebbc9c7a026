"""A few processes that work off a list, this one among them; each holds one task at a time, which bounds the memory."""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from ..environment import inherited
from ..errors import CheckpointError


def run(
    work: Callable[[Any], Any], tasks: Sequence[Any], num_workers: int, done: Callable[[Any], None], inherit: Sequence[int] = ()
) -> None:
    """Call `work` on every task and `done` on every result, in any order.

    Args:
        work: a function of a module; it and its arguments are sent to the other processes.
        num_workers: processes, this one included.
        done: called from any thread.
        inherit: file descriptors that the other processes keep open.

    Raises:
        CheckpointError: what a task raised, or a process that ended by itself.
    """
    waiting = deque(tasks)
    failed: list[BaseException] = []
    helpers = [_Helper(inherit) for _ in range(min(num_workers, len(tasks)) - 1)]
    threads = [threading.Thread(target=_lead, args=(helper.call, work, waiting, done, failed), daemon=True) for helper in helpers]
    for thread in threads:
        thread.start()
    _lead(lambda function, task: function(task), work, waiting, done, failed)
    for thread in threads:
        thread.join()
    for helper in helpers:
        helper.end()
    if failed:
        raise failed[0]


def _lead(call: Callable[..., Any], work: Callable[[Any], Any], waiting: deque[Any], done: Callable[[Any], None], failed: list) -> None:
    while not failed:
        try:
            task = waiting.popleft()
        except IndexError:
            return
        try:
            done(call(work, task))
        except BaseException as error:
            failed.append(error)


class _Helper:
    """Another interpreter with a socket to this one; when this process ends, however it ends, so does the other."""

    def __init__(self, inherit: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        environment = {**inherited(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()}, {os.getpid()})"]
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno(), *inherit], stdin=subprocess.DEVNULL)
        theirs.close()
        self._connection = Connection(ours.detach())

    def call(self, work: Callable[[Any], Any], task: Any) -> Any:
        """Return what the function returns over there."""
        try:
            self._connection.send_bytes(pickle.dumps((work.__module__, work.__qualname__, task)))
            good, result = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise CheckpointError(
                f"a worker process ended with status {self._process.wait()} (killed for memory, perhaps); run the command "
                "again, it goes on where it stopped, with fewer workers if memory was short"
            ) from error
        if not good:
            raise CheckpointError(result)
        return result

    def end(self) -> None:
        """Let the process end."""
        self._connection.close()
        self._process.wait()


def serve(descriptor: int, parent: int) -> None:
    """Work for a parent until its end of the socket closes."""
    connection = Connection(descriptor)
    while os.getppid() == parent:
        try:
            module, name, task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = (True, getattr(importlib.import_module(module), name)(task))
        except CheckpointError as error:
            answer = (False, str(error))
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {error}")
        connection.send_bytes(pickle.dumps(answer))
