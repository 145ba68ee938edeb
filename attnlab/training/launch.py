"""Accelerate's set-up for a run, and the handling of Ctrl-C."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from attnlab.training.runs import RunError, say
from attnlab.training.settings import Settings

__all__ = [
    "check_tracker",
    "flat_settings",
    "gather_objects",
    "interrupts",
    "join_processes",
    "make_accelerator",
    "watch_others",
]

# What backends say when another process does not answer.
SILENCE = re.compile(r"timed? ?out|connection (closed|reset|refused)|closed by peer|broken pipe", re.IGNORECASE)


def join_processes(settings: Settings) -> Any:
    """Accelerate's state of this process, joined with those that the launcher started: its rank, and how to wait."""
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise ImportError("training needs accelerate: pip install accelerate") from error
    # With cpu=True Accelerate also joins the processes of a machine without any accelerator (gloo).
    cpu = settings.device == "cpu" or not torch.accelerator.is_available()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return PartialState(cpu=cpu, **({"timeout": timedelta(seconds=settings.timeout)} if several else {}))


def check_tracker(track: str | None) -> None:
    """Raise if Accelerate does not know the tracker, or its package is missing: Accelerate would leave it out."""
    if track is None:
        return
    try:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, LoggerType, get_available_trackers
    except ImportError as error:
        raise ImportError("training needs accelerate: pip install accelerate") from error
    known = [name for name in LoggerType.list() if name != "all"]
    if track not in (*known, *LOGGER_TYPE_TO_CLASS):
        raise ValueError(f"no tracker is named {track!r}; Accelerate knows {', '.join(known)}")
    if track in known and track not in [str(kind) for kind in get_available_trackers()]:
        raise ImportError(f"the tracker {track} needs a package of that name, which is not installed")


def make_accelerator(settings: Settings, *, run_dir: Path, track: str | None) -> Any:
    """The Accelerator of these settings; the number and kind of processes come from the launcher."""
    join_processes(settings)
    check_tracker(track)
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    precision = settings.precision
    if precision == "auto":
        gpu = settings.device != "cpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "bf16" if gpu else "no")
    if precision not in ("bf16", "no"):
        raise ValueError(f"precision must be bf16 or no, got {precision} (from accelerate's configuration)")
    # Accelerate keeps one precision per process and refuses a second run with another.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision=precision,
        cpu=settings.device == "cpu" or not torch.accelerator.is_available(),
        log_with=track,
        project_dir=str(run_dir) if track else None,
    )
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy: Any = getattr(plugin, "mixed_precision_policy", None)
    if hasattr(policy, "output_dtype"):
        # The model returns sums and counts over a batch, which bf16 would round to three digits.
        plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=torch.float32)
    return accelerator


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C (or SIGTERM) into an event; another one, seconds later, interrupts at once."""
    event = threading.Event()
    seen = 0.0
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: Any) -> None:
        nonlocal seen
        # The terminal sends Ctrl-C to all processes and a launcher passes it on again, so two at once count as one.
        if event.is_set() and time.monotonic() - seen > 2:
            signal.signal(number, before[number])
            signal.raise_signal(number)
        seen = seen or time.monotonic()
        event.set()

    for number in before:
        signal.signal(number, note)
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def watch_others(accelerator: Any, timeout: float, step: Callable[[], int]) -> Iterator[None]:
    """With several processes: say when no ``step`` has ended for a while, and what it means if the wait is given up."""
    if accelerator.num_processes == 1:
        yield
        return
    ended = threading.Event()
    pause = min(60.0, timeout / 2)

    def watch() -> None:
        last = -1
        while not ended.wait(pause):
            if (now := step()) == last:
                say(
                    f"process {accelerator.process_index}: no step has ended for {pause:.0f} s (step {now}); unless it "
                    f"is compiling, evaluating or saving, another has stopped, and the run ends after {timeout:.0f} s"
                )
            last = now

    thread = threading.Thread(target=watch, name="attnlab-watch", daemon=True)
    thread.start()
    try:
        yield
    except RunError:
        raise
    except RuntimeError as error:
        # The backends of torch.distributed raise plain RuntimeErrors, each with words of its own.
        if not SILENCE.search(str(error)):
            raise
        raise RunError(
            f"another process of this run has ended, or has not answered for {timeout:.0f} s; what was saved is kept: "
            f"resume the run ({str(error).splitlines()[0]})"
        ) from error
    finally:
        ended.set()
        thread.join(1)


def gather_objects(items: list[Any], accelerator: Any) -> list[Any]:
    """The items of all ranks, in their order."""
    if accelerator.num_processes == 1:
        return items
    from accelerate.utils import gather_object

    return gather_object(items)


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted names and plain values, as trackers take them."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, int | float | str) else str(value)
    return flat
