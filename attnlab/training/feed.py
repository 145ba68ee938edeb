"""Sources of batches, each rank's share of a batch, and a thread that prepares batches ahead."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["Prefetcher", "Source", "parts_of", "to_device"]


@runtime_checkable
class Source(Protocol):
    """``batch(step)`` is the global batch of that step, a pure function of the source's seed and the step."""

    def batch(self, step: int) -> dict[str, Tensor]:
        """The global batch of this step."""


def parts_of(batch: dict[str, Any], *, rank: int, world: int, accumulate: int = 1) -> list[dict[str, Any]]:
    """This rank's rows of the global batch, in ``accumulate`` parts; scalars are in every part.

    >>> [p["x"].tolist() for p in parts_of({"x": torch.arange(8)}, rank=1, world=2, accumulate=2)]
    [[4, 5], [6, 7]]
    """
    if world * accumulate == 1:
        return [batch]
    rowed = {name: t for name, t in batch.items() if isinstance(t, Tensor) and t.dim() > 0}
    sizes = {name: t.shape[0] for name, t in rowed.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"every tensor of a batch must have the batch as its first axis, got {sizes} rows")
    rows = next(iter(sizes.values()))
    if rows < world * accumulate:
        raise ValueError(
            f"a batch of {rows} rows cannot be split over {world} processes x {accumulate} accumulated parts; "
            "use larger batches or less accumulation"
        )
    split = {name: t.tensor_split(world * accumulate) for name, t in rowed.items()}
    mine = range(rank * accumulate, (rank + 1) * accumulate)
    return [{name: split[name][i] if name in split else value for name, value in batch.items()} for i in mine]


def to_device(part: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The part with its tensors on ``device``; pinned ones are copied while the device computes."""
    return {name: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for name, v in part.items()}


class Prefetcher:
    """Iterates over (parts of) the batches of ``steps``, prepared by a background thread up to ``ahead`` in advance.

    The thread fills the buffer and then sleeps until it is half empty. Waking it for every batch would cost the loop a
    change of threads each step, which slows a small model down.
    """

    def __init__(
        self,
        source: Source,
        steps: range,
        *,
        device: torch.device,
        rank: int = 0,
        world: int = 1,
        accumulate: int = 1,
        ahead: int = 8,
    ) -> None:
        self.source, self.steps, self.device = source, steps, device
        self.rank, self.world, self.accumulate = rank, world, accumulate
        # Seconds the loop has spent waiting for a batch, without the first, which cannot be prepared ahead.
        self.waited = 0.0
        self.ahead = ahead
        self._buffer: deque[Any] = deque()
        self._filled, self._room, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._prepare, name="attnlab-feed", daemon=True)

    def __enter__(self) -> Prefetcher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._room.set()
        # After a timeout the thread, a daemon, is left alone, so that an interrupted run ends even if its source hangs.
        self._thread.join(timeout=5)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for position in range(len(self.steps)):
            if not self._buffer:
                start = time.perf_counter()
                self._await_batch()
                if position > 0:
                    self.waited += time.perf_counter() - start
            item = self._buffer.popleft()
            if len(self._buffer) <= self.ahead // 2:
                self._room.set()
            if isinstance(item, BaseException):
                raise item
            yield [to_device(part, self.device) for part in item]

    def _await_batch(self) -> None:
        while not self._buffer:
            self._filled.clear()
            if not self._buffer:
                self._filled.wait()

    def _await_room(self) -> None:
        self._room.clear()
        if len(self._buffer) > self.ahead // 2 and not self._closed.is_set():
            self._room.wait()

    def _prepare(self) -> None:
        for step in self.steps:
            try:
                batch = self.source.batch(step)
                item: Any = parts_of(batch, rank=self.rank, world=self.world, accumulate=self.accumulate)
                if self.device.type == "cuda":
                    item = [{n: v.pin_memory() if isinstance(v, Tensor) else v for n, v in p.items()} for p in item]
            except BaseException as error:
                # Raised again where the loop asks for this batch.
                item = error
            self._buffer.append(item)
            self._filled.set()
            if len(self._buffer) >= self.ahead:
                self._await_room()
            if self._closed.is_set() or isinstance(item, BaseException):
                return
