"""Messages between neighbours in a chain of ranks: sent without waiting, received in the order in which they were sent."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import RankError
from .collectives import DONE, Pending, Traffic
from .imagined import imagined_world
from .ring import Ring

_TAGS = 1 << 30


class CutError(RankError):
    """A message cannot travel because its other end is gone or was closed; why is known elsewhere."""


class Links:
    """Point-to-point messages among the ranks of one chain, over process groups that serve nothing else.

    Closing the groups makes every peer that waits here raise at once (seen on gloo, torch 2.13), so that one rank's error
    ends all of them without a timeout. On gloo one group carries everything, and a tag numbers the messages from one rank
    to another. Backends with streams take their messages in order per pair, and could wait for each other in a circle if
    two directions shared a pair; there each direction has a group of its own.

    In an imagined world messages reach nobody; bytes that are told are kept there for the rank that is run as their receiver.

    Args:
        chains: the ranks of every chain of the job, in order; every rank of the job must pass the same.
        ring: where messages are written down, for a look at what a rank did last.

    Attributes:
        traffic: what was sent and received, by (kind, state). wait_s: seconds spent waiting for messages.
    """

    def __init__(self, chains: Sequence[Sequence[int]], device: torch.device, ring: Ring) -> None:
        self.device = device
        self.traffic: dict[tuple[str, str], Traffic] = {}
        self.wait_s = 0.0
        self._ring = ring
        self._rank = dist.get_rank()
        self._chains = [list(chain) for chain in chains]
        self._world = imagined_world()
        self._told: dict[tuple[int, int], int] = {}
        self._tagged = "gloo" in dist.get_backend() and "nccl" not in dist.get_backend()
        self.open()

    def open(self) -> None:
        """Connect the chains, for the first time or after `close`; every rank of the job must call it."""
        self._groups: dict[tuple[int, int], Any] = {}  # (source, destination) -> group
        for chain in self._chains if self._world is None else ():
            self._connect(chain)
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        # Connections close when nothing refers to them any more, and what is under way does: so only this object holds it.
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()
        self._awaited: dict[tuple[int, int], Any] = {}  # (source, number) -> work
        self.closed = False

    def _connect(self, chain: list[int]) -> None:
        pairs = [(a, b) for a in chain for b in chain if a != b]
        if self._tagged:
            group = dist.new_group(chain) if len(chain) > 1 else None
            self._groups.update(dict.fromkeys(pairs, group) if self._rank in chain else {})
            return
        for a, b in pairs:
            group = dist.new_group([a, b])
            if self._rank in (a, b):
                self._groups[a, b] = group

    # ---- messages

    def send(self, tensor: torch.Tensor, to: int, state: str) -> None:
        """Start sending a contiguous tensor to a rank of the chain; it must not be changed before `flush`."""
        self._clear_sent()
        self.traffic.setdefault(("send", state), Traffic()).add(tensor.nbytes, tensor.nbytes)
        if self._world is not None:
            return
        number = self._sent[to] = self._sent.get(to, 0) + 1
        sequence = self._ring.start("send", state, f"to {to}", tensor.nbytes)
        tag = number % _TAGS if self._tagged else 0

        def start() -> None:
            self._under_way.append((dist.isend(tensor, dst=to, group=self._groups[self._rank, to], tag=tag), tensor))

        self._tried(start, f"send to rank {to}")
        self._ring.end(sequence)

    def receive(self, tensor: torch.Tensor, source: int, state: str) -> Pending:
        """Start receiving the next message of a rank into `tensor`; wait() of the result returns when it is there.

        Raises:
            CutError: on wait(), when the other end is gone.
        """
        self.traffic.setdefault(("receive", state), Traffic()).add(tensor.nbytes, 0)
        if self._world is not None:
            return DONE
        number = self._received[source] = self._received.get(source, 0) + 1
        sequence = self._ring.start("receive", state, f"from {source}", tensor.nbytes)
        tag = number % _TAGS if self._tagged else 0

        def start() -> None:
            self._awaited[source, number] = dist.irecv(tensor, src=source, group=self._groups[source, self._rank], tag=tag)

        self._tried(start, f"receive from rank {source}")

        def finish() -> None:
            began = time.perf_counter()
            self._tried(lambda: self._awaited.pop((source, number)).wait(), f"receive from rank {source}")
            self.wait_s += time.perf_counter() - began
            self._ring.end(sequence)

        return Pending(finish)

    def tell(self, content: bytes, to: int, state: str) -> None:
        """Send bytes of any length to a rank of the chain."""
        if self._world is not None:
            self._world.said[self._telling(self._rank, to)] = content
        sent = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device)
        self.send(torch.tensor([sent.numel()], dtype=torch.int64, device=self.device), to, state)
        self.send(sent, to, state)

    def told(self, source: int, state: str) -> bytes:
        """Return the next bytes that a rank of the chain tells this one.

        Raises:
            CutError: the other end is gone.
        """
        if self._world is not None:
            return self._world.hear(self._telling(source, self._rank))
        size = torch.empty(1, dtype=torch.int64, device=self.device)
        self.receive(size, source, state).wait()
        content = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        self.receive(content, source, state).wait()
        return content.cpu().numpy().tobytes()

    def _telling(self, source: int, to: int) -> tuple[str, int, int, int]:
        number = self._told[source, to] = self._told.get((source, to), 0) + 1
        return "told", source, to, number

    def flush(self) -> None:
        """Return when everything sent is on its way and its memory may be used again."""
        while self._under_way:
            self._tried(lambda: self._under_way[0][0].wait(), "finish what it sends")
            self._under_way.popleft()

    def _clear_sent(self) -> None:
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()

    def _tried(self, call: Callable[[], Any], what: str) -> None:
        """Make a call of torch.distributed; its error is told and not kept, since its traceback holds the group."""
        if self.closed:
            raise CutError(f"rank {self._rank} could not {what}: its connections are closed")
        problem = ""
        try:
            call()
        except (RuntimeError, ValueError) as error:
            problem = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if problem:
            raise CutError(f"rank {self._rank} could not {what}: {problem}")

    def close(self) -> None:
        """Close the groups: peers that wait for a message here raise. No rank waits for another."""
        if self.closed:
            return
        self.closed = True
        groups = {id(group): group for group in self._groups.values() if group is not None}
        self._groups = {}
        self._under_way.clear()
        self._awaited.clear()
        for group in groups.values():
            if dist.is_initialized():
                dist.destroy_process_group(group)
