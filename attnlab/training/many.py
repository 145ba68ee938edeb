"""Many runs: one function over many configs, by joblib's processes on one machine or Ray's on many."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from attnlab.training.runs import read_result, say

__all__ = ["RunReport", "map_runs"]

C = TypeVar("C")

# How often a run whose process died is tried again.
RETRIES = 1


@dataclass(frozen=True)
class RunReport:
    """How one of many runs ended: ``done`` now, ``already`` finished before, or ``failed`` with ``error``."""

    name: str
    status: str
    run_dir: Path
    seconds: float
    # The run's result.json; None where it failed or wrote none.
    result: dict[str, Any] | None
    error: str | None = None


def map_runs(
    function: Callable[[C, Path], Any],
    configs: Mapping[str, C],
    *,
    root: Path | str,
    jobs: int = 1,
    backend: str = "loky",
) -> dict[str, RunReport]:
    """Call ``function(config, root / name)`` for each named config, ``jobs`` at a time, and report on each.

    A run whose folder has a result.json is not run again; a failed one is reported and the others finish. A run whose
    process dies is tried once more. ``backend`` is joblib's: ``loky`` (processes of this machine), ``sequential``, or
    ``ray`` for a cluster (extra ``ray``).
    """
    _check_names(configs)
    try:
        import joblib
    except ImportError as error:
        raise ImportError("many runs need joblib: pip install joblib") from error
    folder = Path(root).resolve()
    reports = {name: report for name in configs if (report := _already(name, folder / name)) is not None}
    calls = [(function, configs[name], name, folder / name) for name in configs if name not in reports]
    if backend == "ray":
        ended = _by_ray(calls, jobs)
    elif backend == "loky" and jobs != 1:
        ended = _by_processes(calls, joblib.effective_n_jobs(jobs))
    else:
        parallel = joblib.Parallel(n_jobs=jobs, backend=backend, return_as="generator_unordered")
        ended = parallel(joblib.delayed(_run)(*call) for call in calls)
    for report in ended:
        reports[report.name] = report
        _say_end(report, len(reports), len(configs))
    return {name: reports[name] for name in configs}


Call = tuple[Callable[[Any, Path], Any], Any, str, Path]


def _by_processes(calls: Sequence[Call], jobs: int) -> Iterator[RunReport]:
    """Each of ``jobs`` threads waits for a process of its own, so that one that dies takes no other run with it."""
    processes = [_Process(jobs) for _ in range(min(jobs, len(calls)))]
    idle: SimpleQueue[_Process] = SimpleQueue()
    for process in processes:
        idle.put(process)

    def run(call: Call) -> RunReport:
        process = idle.get()
        try:
            return process.run(call)
        finally:
            idle.put(process)

    try:
        yield from _in_threads(run, calls, len(processes))
    finally:
        for process in processes:
            process.close()


def _in_threads(run: Callable[[Call], RunReport], calls: Sequence[Call], threads: int) -> Iterator[RunReport]:
    """The reports in the order in which the runs end; an interruption does not wait for those that have not begun."""
    with ThreadPoolExecutor(max(1, threads)) as pool:
        try:
            for future in as_completed([pool.submit(run, call) for call in calls]):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Process:
    """A worker process, started anew when it has died."""

    def __init__(self, jobs: int) -> None:
        # As joblib does: the workers share the cores, unless the user has said how many threads each has.
        threads = str(max(1, (os.cpu_count() or 1) // jobs))
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        self.environment = {name: os.environ.get(name, threads) for name in names}
        self.executor: Any = None

    def run(self, call: Call) -> RunReport:
        """The report on a run; if the process dies every time, the run has failed."""
        from joblib.externals.loky.process_executor import BrokenProcessPool, ProcessPoolExecutor

        start = time.perf_counter()
        for left in reversed(range(1 + RETRIES)):
            if self.executor is None:
                self.executor = ProcessPoolExecutor(max_workers=1, env=self.environment)
            try:
                return self.executor.submit(_run, *call).result()
            except BrokenProcessPool as error:
                self.close()
                if left:
                    say(f"the process of run {call[2]} died; the run is tried again")
                    continue
                return _dead(call, time.perf_counter() - start, error)
        raise AssertionError("a run is tried at least once")

    def close(self) -> None:
        """End the process, if there is one."""
        if self.executor is not None:
            self.executor.shutdown(wait=True, kill_workers=True)
            self.executor = None


def _check_names(names: Iterable[str]) -> None:
    bad = [name for name in names if not name or Path(name).name != name or name.startswith(".")]
    if bad:
        raise ValueError(f"run names become folders, so they must be plain file names, got {bad}")


def _say_end(report: RunReport, ended: int, runs: int) -> None:
    cause = f": {report.error.strip().splitlines()[-1]}" if report.error else ""
    say(f"run {report.name} {report.status} ({ended} of {runs}, {report.seconds:.0f} s){cause}")


def _run(function: Callable[[Any, Path], Any], config: Any, name: str, run_dir: Path) -> RunReport:
    start = time.perf_counter()
    error = None
    try:
        function(config, run_dir)
    except Exception:
        error = traceback.format_exc()
    seconds = time.perf_counter() - start
    return RunReport(name, "failed" if error else "done", run_dir, seconds, read_result(run_dir), error)


def _already(name: str, run_dir: Path) -> RunReport | None:
    result = read_result(run_dir)
    return None if result is None else RunReport(name, "already", run_dir, 0.0, result)


def _dead(call: Call, seconds: float, error: BaseException) -> RunReport:
    *_, name, run_dir = call
    # A kill for want of memory is the usual cause, and leaves no other trace.
    message = f"its process died {1 + RETRIES} times: {' '.join(str(error).split())}"
    return RunReport(name, "failed", run_dir, seconds, read_result(run_dir), message)


def _by_ray(calls: Sequence[Call], jobs: int) -> Iterator[RunReport]:
    """Each run is a task of its own; Ray starts one whose worker dies once more."""
    try:
        import ray
    except ImportError as error:
        raise ImportError('backend="ray" needs Ray: pip install ray') from error
    if not ray.is_initialized():
        ray.init()
    task = ray.remote(max_retries=RETRIES)(_run)

    def run(call: Call) -> RunReport:
        start = time.perf_counter()
        try:
            return ray.get(task.remote(*call))
        except ray.exceptions.RayError as error:
            return _dead(call, time.perf_counter() - start, error)

    threads = jobs if jobs > 0 else int(ray.cluster_resources().get("CPU", 1))
    return _in_threads(run, calls, threads)
