"""Many runs: one function over many configs, by joblib's processes on one machine or Ray's on many."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from attnlab.training.runs import read_result, say

__all__ = ["RunReport", "map_runs"]

C = TypeVar("C")


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

    A run whose folder has a result.json is not run again; a failed one is reported and the others finish. ``backend``
    is joblib's: ``loky`` (processes of this machine), ``sequential``, or ``ray`` for a cluster (extra ``ray``).
    """
    _check_names(configs)
    try:
        import joblib
    except ImportError as error:
        raise ImportError("many runs need joblib: pip install joblib") from error
    if backend == "ray":
        _register_ray()
    folder = Path(root).resolve()
    reports = {name: report for name in configs if (report := _already(name, folder / name)) is not None}
    todo = [name for name in configs if name not in reports]
    with joblib.parallel_config(backend=backend, n_jobs=jobs):
        parallel = joblib.Parallel(return_as="list" if backend == "ray" else "generator_unordered")
        for report in parallel(joblib.delayed(_run)(function, configs[name], name, folder / name) for name in todo):
            reports[report.name] = report
            _say_end(report, len(reports), len(configs))
    return {name: reports[name] for name in configs}


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


def _register_ray() -> None:
    try:
        from ray.util.joblib import register_ray
    except ImportError as error:
        raise ImportError('backend="ray" needs Ray and joblib: pip install ray joblib') from error
    register_ray()
