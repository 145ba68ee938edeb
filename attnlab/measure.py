"""Time, memory and size, measured so that they can be compared: interleaved repeats, medians, ratios in one run."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

__all__ = ["captured", "median_seconds", "parameter_count", "peak_bytes"]

T = TypeVar("T")


def median_seconds(
    jobs: Mapping[str, Callable[[], Any]], *, repeats: int = 5, warmup: int = 1, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """The median time of each job; the jobs take turns, so that a busy moment of the machine slows all of them."""
    cuda = torch.device(device).type == "cuda"

    def once(job: Callable[[], Any]) -> float:
        if cuda:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        job()
        if cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for job in jobs.values():
        for _ in range(warmup):
            once(job)
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            times[name].append(once(job))
    return {name: statistics.median(t) for name, t in times.items()}


def parameter_count(model: nn.Module) -> int:
    """How many numbers a model learns; a tensor that two layers share counts once.

    >>> parameter_count(nn.Linear(3, 2))
    8
    """
    return sum(p.numel() for p in model.parameters())


def captured(job: Callable[[], T], *, warmup: int = 3, pool: Any = None, stream: Any = None) -> Callable[[], T]:
    """The kernels that ``job`` launches as a CUDA graph: calling it replays them and returns the result of ``job``.

    Graphs of one ``pool`` share their memory: clone the result of one before another runs. Graphs that share a pool
    while training goes on are captured on the ``stream`` that they run on.
    """
    if warmup:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(warmup):
                job()
        torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as one that prepares batches, may use the device meanwhile.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        out = job()

    def replay() -> T:
        # The graph reads and writes the job's tensors, so the closure keeps the job alive.
        assert job is not None
        graph.replay()
        return out

    return replay


def peak_bytes(job: Callable[[], Any], *, device: torch.device | str = "cpu") -> int:
    """The most memory that torch held at once for ``job``, beyond what it held before.

    >>> peak_bytes(lambda: torch.zeros(1000, dtype=torch.float64).sum()) // 1000
    8
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        job()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    # Any: the events' fields are not in torch's stubs.
    profile: Any = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
    with _silent_stderr():
        profile.start()
    try:
        result = job()
    finally:
        with _silent_stderr():
            profile.stop()
    del result
    recorded = profile.profiler.kineto_results.events()
    # Allocations and frees, in the order they happened.
    changes = sorted((e.start_ns(), e.nbytes()) for e in recorded if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """The profiler's C++ side logs its start and stop to file descriptor 2, whatever Python's logging says."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
