"""Sizes that this machine cannot hold, and work that it cannot finish, are refused before anything is allocated."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["byte_text", "check_bytes", "check_operations", "check_seconds", "memory_bytes"]

# Below this nothing is refused, so that a call of ordinary size costs one comparison.
ALWAYS_ALLOWED = 1 << 30
# The longest work that is begun, in seconds, by an estimate that is lower than the true time.
MOST_SECONDS = 3600
# Multiplications and additions a second that no core and no GPU of today exceeds by much, in float32.
PER_CORE, PER_GPU = 1e11, 2e14


def check_bytes(what: object, size: int | float, *, instead: str, device: object = "cpu") -> None:
    """Raise a ValueError if ``what`` needs more memory than the device has at all.

    >>> check_bytes("a table of 10 rows", 40, instead="make it smaller")
    """
    if size <= ALWAYS_ALLOWED:
        return
    most = memory_bytes(str(device))
    if size > most:
        raise ValueError(f"{what} would take {byte_text(size)}, and {device} has {byte_text(most)}; {instead}")


def check_operations(what: str, operations: int | float, *, instead: str, device: str = "cpu") -> None:
    """``check_seconds`` of so many multiplications and additions at the device's best.

    >>> check_operations("one product", 1e6, instead="make it smaller")
    """
    rate = PER_CORE * (os.cpu_count() or 1) if device == "cpu" else PER_GPU
    # An int of hundreds of digits is no float.
    check_seconds(f"{what} on {device}", min(operations, 10**300) / rate, instead=instead)


def check_seconds(what: str, seconds: int | float, *, instead: str) -> None:
    """Raise a ValueError if ``what`` takes over an hour by this estimate, which is lower than the true time.

    >>> check_seconds("a year", 3.2e7, instead="wait less")
    Traceback (most recent call last):
    ...
    ValueError: a year would take 8.89e+03 hours or more, and nothing of over 1 hour is begun; wait less
    """
    if seconds > MOST_SECONDS:
        hours = min(seconds, 10**300) / 3600
        raise ValueError(
            f"{what} would take {hours:,.3g} hours or more, and nothing of over {MOST_SECONDS // 3600} hour is begun; "
            f"{instead}"
        )


def memory_bytes(device: str = "cpu") -> int:
    """The memory of a device; of the CPU also no more than the process may use."""
    if device != "cpu":
        import torch

        if torch.device(device).type == "cuda" and torch.cuda.is_available():
            return torch.cuda.get_device_properties(torch.device(device)).total_memory
    return min(size for size in (_physical(), _of_container(), _of_process()) if size is not None)


def byte_text(size: int | float) -> str:
    """A number of bytes in words.

    >>> byte_text(512e9), byte_text(40), byte_text(10**40)
    ('512 GB', '40 bytes', '1e+40 bytes')
    """
    for power, unit in ((1e18, "EB"), (1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= 1e21:
            return f"{size:.3g} bytes" if size < 1e300 else "over 1e300 bytes"
        if size >= power:
            return f"{size / power:,.3g} {unit}"
    return f"{size:.0f} bytes"


def _physical() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        # A system that does not tell: what a 64-bit process can address.
        return 1 << 47


def _of_container() -> int | None:
    """The limit of the control group that the process is in, where there is one."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(file).read_text())
        except (OSError, ValueError):
            continue
    return None


def _of_process() -> int | None:
    """The limit that ``ulimit -v`` sets."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft
