"""A Triton kernel called again with the same sizes skips what its first call has worked out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import driver

__all__ = [
    "Launched",
    "Options",
    "arguments",
    "current_device",
    "current_stream",
    "known_launches",
    "launch",
    "watched",
]

# Constants of a kernel and how it is launched, as pairs, so that they can be part of a key.
Options = tuple[tuple[str, Any], ...]
# The compiled kernel, its arguments after the tensors, and what its key must not outlive.
Launched = tuple[Any, tuple[Any, ...], Any]
INTERPRETED = knobs.runtime.interpret
# Sizes remembered; where they never repeat, all are forgotten from time to time.
MOST = 8192
_KNOWN: dict[Hashable, Launched] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[Any, ...],
    options: Options,
) -> Launched | None:
    """``kernel[grid](*tensors, *numbers, **options)``, with less to do on the host from the second call on.

    What Triton compiles depends on dtypes, on which pointers are multiples of 16 and on the numbers. The first call
    takes its usual way; others with the same of all these, and the very same ``options``, give the compiled kernel
    plain addresses. Returns what is known of the launch afterwards.
    """
    if watched():
        kernel[grid](*tensors, *numbers, **dict(options))
        return None
    pointers = [0 if t is None else t.data_ptr() for t in tensors]
    every = 0
    for pointer in pointers:
        every |= pointer
    device = current_device()
    key = (id(kernel), id(options), device, numbers, tuple([None if t is None else t.dtype for t in tensors]))
    known = _KNOWN.get(key) if every % 16 == 0 else None
    if known is None:
        compiled = kernel[grid](*tensors, *numbers, **dict(options))
        if every % 16:
            return None
        given = dict(options)
        # Launchers take the constants, too, and leave them aside.
        rest = tuple(given[name] for name in kernel.arg_names[len(tensors) + len(numbers) :])
        if len(_KNOWN) >= MOST:
            _KNOWN.clear()
        # Kept here, so that no others can take their ids.
        known = _KNOWN[key] = compiled, (*numbers, *rest), (kernel, options)
        return known
    compiled, rest, _ = known
    stream = current_stream(device)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *pointers, *rest)
    return known


def arguments(
    launched: Launched, grid: tuple[int, int, int], stream: Any, addresses: Sequence[Any]
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    """What to call, and with what, to launch it there: what Triton's launcher calls in the end."""
    compiled, rest, _ = launched
    run = compiled.run
    args = (*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *addresses, *rest)
    last = getattr(run, "launch", None)
    if last is None or run.global_scratch_size or run.profile_scratch_size:
        return run, args
    caught: list[tuple[Any, ...]] = []
    run.launch = lambda *given: caught.append(given)
    try:
        run(*args)
    finally:
        run.launch = last
    flat = {id(arg) for arg in caught[0]}
    # Versions differ in what that takes.
    return (last, caught[0]) if flat.issuperset(map(id, (stream, *addresses))) else (run, args)


def watched() -> bool:
    """Whether launches must take Triton's own way, since it interprets them or somebody listens."""
    hooks = knobs.runtime.launch_enter_hook
    return bool(INTERPRETED or getattr(hooks, "calls", hooks))


def current_device() -> int:
    """The device that launches go to."""
    device: int = driver.active.get_current_device()
    return device


def current_stream(device: int | None) -> int:
    """Where launches on a device go."""
    stream: int = driver.active.get_current_stream(device)
    return stream


def known_launches() -> dict[tuple[str, bool], dict[str, int]]:
    """What each compiled kernel takes of a multiprocessor, by its name and whether it is the WIDE one."""
    found = {}
    for compiled, _, (kernel, options) in _KNOWN.values():
        found[kernel.__name__, bool(dict(options).get("WIDE"))] = {
            "warps": compiled.metadata.num_warps,
            "registers": compiled.n_regs,
            "spilled": compiled.n_spills,
            "shared bytes": compiled.metadata.shared,
        }
    return found
