"""Start a plan's commands, listen to them, and do what the course of the job demands."""

from __future__ import annotations

import io
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from .channel import decode
from .connections import Connection
from .control import BEAT_S
from .course import Action, Course, Drop, HostState, Say, Send, Stage
from .failures import Failure
from .output import Screen
from .plan import Plan
from .runners import Command

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1,)
LOOP_S = 0.2
CLOSE_S = 5.0


def drive(plan: Plan, commands: Sequence[Command], env: Mapping[str, str], save_pid: bool = False) -> int:
    """Run a job to its end and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what ranks print need not fit this terminal
    driver = Driver(plan, Screen(sys.stdout, sys.stderr), env, save_pid)
    try:
        return driver.run(commands)
    finally:
        driver.close()


class Driver:
    """The launcher at work: one loop over everything that can happen."""

    def __init__(self, plan: Plan, screen: Screen, env: Mapping[str, str], save_pid: bool) -> None:
        self._plan, self._screen, self._env = plan, screen, env
        self._course = Course(plan)
        self._selector = selectors.DefaultSelector()
        self._connections: list[Connection] = []
        self._by_place: dict[int, Connection] = {}
        self._heard: dict[int, float] = {}
        self._warned: set[int] = set()
        self._over = threading.Event()
        self._pid_file = Path(tempfile.gettempdir(), f"{os.getpid()}.stateroom") if save_pid else None
        self._pids: dict[str, Any] = {"launcher": os.getpid(), "ranks": {}}
        self._wake_out, self._wake_in = os.pipe()

    def run(self, commands: Sequence[Command]) -> int:
        """Start everything and loop until the job is over."""
        self._take_signals()
        for note in self._plan.notes:
            self._screen.say(note)
        for command in commands:
            self._start(command)
        self._write_pids()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        before = time.monotonic()
        while self._course.stage is not Stage.OVER:
            try:
                for key, _ in self._selector.select(LOOP_S):
                    self._ready(key.fd, key.data)
            except BrokenPipeError:
                self._screen.mute()  # whoever read this has closed it, as `head` does
                self._act(self._course.user_signal(int(signal.SIGPIPE), "SIGPIPE", time.monotonic()))
            for connection in self._connections:
                connection.flush()
            now = time.monotonic()
            # While we could not listen (a paused terminal), silence says nothing about the hosts.
            self._check_silence(now, stalled=now - before > 5 * LOOP_S)
            self._act(self._course.tick(now))
            before = now
        return self._course.status

    def _start(self, command: Command) -> None:
        try:
            connection = Connection(command, self._env)
        except OSError as error:
            for place in command.places:
                self._act(self._course.gone(place, f"cannot start {command.argv[0]}: {error.strerror}", time.monotonic()))
            return
        connection.start_writing()
        self._connections.append(connection)
        for place in command.places:
            self._by_place[place] = connection
            self._heard[place] = time.monotonic()
        for fd in connection.keeps_open:
            self._selector.register(fd, selectors.EVENT_READ, connection)

    def _take_signals(self) -> None:
        os.set_blocking(self._wake_in, False)
        signal.set_wakeup_fd(self._wake_in)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        for number in (*ENDING, *PASSED_ON):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup, or in the background of a script
                signal.signal(number, _wake)

    def _ready(self, fd: int, connection: Connection | None) -> None:
        if connection is None:
            for number in os.read(self._wake_out, 64):
                self._on_signal(signal.Signals(number))
            return
        if fd not in connection.keeps_open:
            return  # closed while this round's list was worked through
        lines = connection.read(fd)
        for line in lines if lines is not None else self._close_reader(fd, connection):
            self._line(line, connection, is_err=connection.readers[fd])
        if lines is None and not connection.keeps_open:
            self._ended(connection)

    def _close_reader(self, fd: int, connection: Connection) -> list[bytes]:
        self._selector.unregister(fd)
        return connection.close_reader(fd)

    def _line(self, line: bytes, connection: Connection, is_err: bool) -> None:
        message = decode(line)
        if message is not None and message["h"] in connection.command.places:
            self._heard[message["h"]] = time.monotonic()
            self._warned.discard(message["h"])
            self._message(message)
            return
        text = line.decode("utf-8", "replace").rstrip("\r")
        connection.last_words.append(text)
        # What ssh or a login shell says before a host answers is of interest only if it does not.
        if text.strip() and self._course.hosts[connection.place].state is not HostState.CALLED:
            names = {self._course.hosts[place].name for place in connection.command.places}
            self._screen.line(names.pop() if len(names) == 1 else connection.command.argv[0], text, is_err)

    def _message(self, message: dict[str, Any]) -> None:
        place, kind, now = message["h"], message["k"], time.monotonic()
        name = self._course.hosts[place].name
        if kind == "lines":
            for text in message["lines"]:
                self._screen.line(f"{name}:{message['rank']}", text, message["err"], message["rank"])
        elif kind == "bar":
            self._screen.bar(f"{name}:{message['rank']}", message["rank"], message["text"])
        elif kind == "say":
            self._screen.say(message["text"])
        elif kind == "hello":
            offset_s = (message["facts"]["time_ns"] - time.time_ns()) / 1e9
            self._act(self._course.hello(place, message["facts"], offset_s, now))
        elif kind == "started":
            self._pids["ranks"] |= {rank: [name, pid] for rank, pid in message["ranks"].items()}
            self._write_pids()
            self._act(self._course.started(message["world"], message["attempt"]))
        elif kind == "again":
            found = [Failure.from_json(values) for values in message["failures"]]
            self._act(self._course.again(place, found))
        elif kind == "ended":
            found = [Failure.from_json(values) for values in message["failures"]]
            self._act(self._course.ended(place, message["how"], found, message["text"], message["port"], now))

    def _ended(self, connection: Connection) -> None:
        """Everything that a command had to say was read."""
        try:
            code = connection.process.wait(2)
        except subprocess.TimeoutExpired:
            connection.end(signal.SIGKILL)
            code = connection.process.wait()
        program = Path(connection.command.argv[0]).name
        said = next((text for text in reversed(connection.last_words) if text.strip()), "")
        how = f"signal {-code}" if code < 0 else f"status {code}"
        why = f"{program} ended with {how}" + (f": {said.strip()}" if said else "")
        for place in connection.command.places:
            self._act(self._course.gone(place, why, time.monotonic()))

    def _check_silence(self, now: float, stalled: bool) -> None:
        limit_s = self._plan.orders[0].job.silence_s
        for place in self._course.running:
            connection = self._by_place.get(place)
            if connection is None or connection.command.way != "stdio":
                continue
            if stalled:
                self._heard[place] = now
            silent_s = now - self._heard[place]
            if silent_s > limit_s:
                self._act(self._course.gone(place, f"nothing heard of it for {silent_s:.0f} s", now))
            elif silent_s > max(limit_s / 2, 2 * BEAT_S) and place not in self._warned:
                self._warned.add(place)
                self._screen.say(
                    f"{self._course.hosts[place].name} has been silent for {silent_s:.0f} s, and is lost after {limit_s:.0f} s"
                )

    def _on_signal(self, number: signal.Signals) -> None:
        silent = [connection for connection in self._connections if not connection.talks]
        if number in PASSED_ON:
            self._act(self._course.pass_signal(int(number)))
        elif number in ENDING:
            name = "Ctrl-C" if number == signal.SIGINT else number.name
            self._act(self._course.user_signal(int(number), name, time.monotonic()))
            number = signal.SIGTERM
        else:
            return
        for connection in silent:
            connection.signal(number)

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Say):
                self._screen.say(action.text)
            elif isinstance(action, Send):
                if action.place in self._by_place:
                    self._by_place[action.place].send(action.kind, action.place, **action.fields)
            elif isinstance(action, Drop) and action.place in self._by_place:
                self._drop(action.place)

    def _drop(self, place: int) -> None:
        """Give up on a host; a command that serves others as well goes on for them."""
        connection = self._by_place.pop(place)
        connection.dropped.add(place)
        if len(connection.dropped) == len(connection.command.places):
            connection.end(signal.SIGKILL if connection.talks else signal.SIGTERM)

    def _beat(self) -> None:
        """Send signs of life, apart from the loop: a paused terminal must not look like a dead launcher."""
        limit_s = self._plan.orders[0].job.silence_s
        while not self._over.wait(min(BEAT_S, limit_s / 4)):
            for connection in list(self._connections):
                connection.beat()

    def _write_pids(self) -> None:
        if self._pid_file:
            self._pid_file.write_text(json.dumps({**self._pids, "commands": [c.process.pid for c in self._connections]}) + "\n")

    def close(self) -> None:
        """Let the commands end, or end them, and leave nothing open."""
        self._over.set()
        signal.set_wakeup_fd(-1)
        deadline = time.monotonic() + CLOSE_S
        for connection in self._connections:
            for fd in connection.keeps_open:
                self._selector.unregister(fd)
            connection.close()
        for connection in self._connections:
            try:
                connection.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                connection.end(signal.SIGKILL)
                connection.process.wait()
        self._screen.close()
        self._selector.close()
        os.close(self._wake_out)
        os.close(self._wake_in)
        if self._pid_file:
            self._pid_file.unlink(missing_ok=True)


def _wake(number: int, frame: FrameType | None) -> None:
    """Do nothing: that the signal came is read from the wake-up descriptor."""
