"""How kernels are launched: plainly, through Triton, or directly, skipping what a first call has worked out.

A plain launch is ``kernel[grid](...)``: from some fifty arguments Triton works out which compiled kernel it needs. A
direct launch remembers that under the sizes, strides and dtypes of the call, and hands addresses to the compiled
kernel. It relies on how Triton's launchers take their arguments, which Triton does not document, and so it is used only
with versions in ``attnlab.kernels.TESTED_TRITON``. Outside of these launches are plain, with one warning. The
environment variable ``ATTNLAB_KERNEL_LAUNCH`` chooses: ``plain`` or ``direct``, whatever the version. Triton's
interpreter and its launch hooks (profilers) always get plain launches.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from attnlab.kernels import LAUNCH_VARIABLE, TESTED_TRITON

__all__ = [
    "Launched",
    "Numbers",
    "Options",
    "Tensors",
    "current_device",
    "current_stream",
    "direct_call",
    "known_launches",
    "launch",
    "launch_mode",
    "launches_plainly",
    "with_strides",
]

# Arguments by the names of the kernel's parameters, in their order: tensors, then numbers.
Tensors = dict[str, Tensor | None]
Numbers = dict[str, Any]
# Constants of a kernel and how it is launched, as pairs, so that they can be part of a key.
Options = tuple[tuple[str, Any], ...]
INTERPRETED = knobs.runtime.interpret
# Launches remembered. Where sizes never repeat, all are forgotten whenever there are so many.
MOST = 8192
_KNOWN: dict[Hashable, Launched] = {}


class Launched(NamedTuple):
    """A launch that can be made directly: the compiled kernel and its arguments after the tensors.

    ``alive`` holds objects whose ids are part of the launch's key, so that no others take these ids.
    """

    compiled: Any
    rest: tuple[Any, ...]
    alive: tuple[Any, ...]


@functools.cache
def launch_mode() -> str:
    """``plain`` or ``direct``: as the environment variable says, else by the version of Triton."""
    chosen = os.environ.get(LAUNCH_VARIABLE, "")
    if chosen:
        if chosen not in ("plain", "direct"):
            raise ValueError(f"{LAUNCH_VARIABLE} must be plain or direct, got {chosen!r}")
        return chosen
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    first, last = TESTED_TRITON
    if first <= version <= last:
        return "direct"
    tested = " to ".join(".".join(map(str, v)) for v in TESTED_TRITON)
    warnings.warn(
        f"kernels are launched through Triton {triton.__version__}, with more work on the host: direct launches were "
        f"tested with Triton {tested}. Set {LAUNCH_VARIABLE}=plain to silence this, or =direct to try them",
        RuntimeWarning,
        stacklevel=2,
    )
    return "plain"


def launches_plainly() -> bool:
    """Whether launches must go through Triton: it interprets kernels, has launch hooks, or the mode says so."""
    hooks = knobs.runtime.launch_enter_hook
    return bool(INTERPRETED or getattr(hooks, "calls", hooks) or launch_mode() == "plain")


def launch(
    kernel: Any, grid: tuple[int, int, int], tensors: Tensors, numbers: Numbers, options: Options
) -> Launched | None:  # fmt: skip
    """``kernel[grid](**tensors, **numbers, **options)``; directly where possible, which it then returns.

    What Triton compiles depends on dtypes, on which pointers are multiples of 16 and on the numbers. The first call is
    plain; others with the same of all these, and the very same ``options``, are direct.
    """
    if launches_plainly():
        _launch_plainly(kernel, grid, tensors, numbers, options)
        return None
    pointers = [0 if t is None else t.data_ptr() for t in tensors.values()]
    every = 0
    for pointer in pointers:
        every |= pointer
    if every % 16:
        _launch_plainly(kernel, grid, tensors, numbers, options)
        return None
    device, values = current_device(), tuple(numbers.values())
    dtypes = tuple([None if t is None else t.dtype for t in tensors.values()])
    key = (id(kernel), id(options), device, values, dtypes)
    known = _KNOWN.get(key)
    if known is None:
        compiled = _launch_plainly(kernel, grid, tensors, numbers, options)
        constants = dict(options)
        # Compiled kernels take the constants, too, and ignore them.
        rest = tuple(constants[name] for name in kernel.arg_names[len(tensors) + len(numbers) :])
        if len(_KNOWN) >= MOST:
            _KNOWN.clear()
        known = _KNOWN[key] = Launched(compiled, (*values, *rest), (kernel, options))
        return known
    compiled, rest, _ = known
    stream = current_stream(device)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *pointers, *rest)
    return known


def with_strides(numbers: dict[str, Any]) -> Numbers:
    """The numbers, with the strides of a tensor of heads in its place: sqb, sqh and sqt of one that is named q."""
    every: Numbers = {}
    for name, value in numbers.items():
        if isinstance(value, Tensor):
            every |= {f"s{name}{axis}": value.stride(i) for i, axis in enumerate("bht")}
        else:
            every[name] = value
    return every


def _launch_plainly(
    kernel: Any, grid: tuple[int, int, int], tensors: Tensors, numbers: Numbers, options: Options
) -> Any:  # fmt: skip
    names = (*tensors, *numbers)
    if names != tuple(kernel.arg_names[: len(names)]):
        # A direct launch would hand them over in this order.
        raise TypeError(f"arguments must be in the order {kernel.arg_names}, got {names}")
    return kernel[grid](**tensors, **numbers, **dict(options))


def direct_call(
    launched: Launched, grid: tuple[int, int, int], stream: Any, addresses: Sequence[Any]
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    """The innermost function of Triton's launcher that launches this, and its arguments.

    A compiled kernel's ``run`` puts some arguments together and calls a compiled ``launch``. That is replaced for one
    call, which shows these arguments. Where they are not the stream and addresses themselves, ``run`` is returned.
    """
    compiled, rest, _ = launched
    run = compiled.run
    args = (*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *addresses, *rest)
    innermost = getattr(run, "launch", None)
    if innermost is None or run.global_scratch_size or run.profile_scratch_size:
        return run, args
    caught: list[tuple[Any, ...]] = []
    run.launch = lambda *received: caught.append(received)
    try:
        run(*args)
    finally:
        run.launch = innermost
    flat = {id(arg) for arg in caught[0]}
    return (innermost, caught[0]) if flat.issuperset(map(id, (stream, *addresses))) else (run, args)


def current_device() -> int:
    """The device that launches go to."""
    device: int = driver.active.get_current_device()
    return device


def current_stream(device: int | None) -> int:
    """The stream that launches on a device go to."""
    stream: int = driver.active.get_current_stream(device)
    return stream


def known_launches() -> dict[tuple[str, bool], dict[str, int]]:
    """What each compiled kernel takes of a multiprocessor, by its name and whether it is the WIDE one."""
    usage = {}
    for compiled, _, (kernel, options) in _KNOWN.values():
        usage[kernel.__name__, bool(dict(options).get("WIDE"))] = {
            "warps": compiled.metadata.num_warps,
            "registers": compiled.n_regs,
            "spilled": compiled.n_spills,
            "shared bytes": compiled.metadata.shared,
        }
    return usage
