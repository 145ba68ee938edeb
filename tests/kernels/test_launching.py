"""Launches that skip Triton's own dispatch: when they may, and what the compiled kernel is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attnlab.kernels.abc import launcher as _launcher


class Kernel:
    """A kernel (a, b, n, SIZE) that keeps how it was called; ``run`` is the compiled one's."""

    arg_names = ("a", "b", "n", "SIZE")

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append(("whole", (*grid, *args, *options.items())))
            return SimpleNamespace(run=self.run, function="f", packed_metadata="m")

        return call

    def run(self, *args: Any) -> None:
        self.calls.append(("known", args))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(_launcher, "INTERPRETED", False)
    monkeypatch.setattr(_launcher, "_KNOWN", {})
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _device: 99)
    monkeypatch.setattr(_launcher, "driver", SimpleNamespace(active=active))
    return Kernel()


def ways(kernel: Kernel) -> list[str]:
    return [way for way, _ in kernel.calls]


def test_the_second_call_gives_the_compiled_kernel_addresses(kernel: Kernel) -> None:
    a, options = torch.zeros(64), (("SIZE", 16), ("num_warps", 4))
    for grid in ((2, 1, 1), (3, 1, 1)):
        _launcher.launch(kernel, grid, (a, None), (5,), options)
    assert ways(kernel) == ["whole", "known"]
    # grid, stream, function, metadata, no hooks, pointers, numbers, constants
    assert kernel.calls[1][1] == (3, 1, 1, 99, "f", "m", None, None, None, a.data_ptr(), 0, 5, 16)


@pytest.mark.parametrize("change", ["number", "dtype", "none", "options"])
def test_what_triton_compiles_for_is_asked_of_triton(kernel: Kernel, change: str) -> None:
    a, options = torch.zeros(64), (("SIZE", 16),)
    _launcher.launch(kernel, (1, 1, 1), (a, None), (5,), options)
    _launcher.launch(
        kernel,
        (1, 1, 1),
        (a.long() if change == "dtype" else a, a if change == "none" else None),
        (6 if change == "number" else 5,),
        (("SIZE", 32),) if change == "options" else options,
    )
    assert ways(kernel) == ["whole", "whole"]


def test_pointers_that_are_no_multiples_of_16_always_take_the_whole_way(kernel: Kernel) -> None:
    options = (("SIZE", 16),)
    for _ in range(2):
        _launcher.launch(kernel, (1, 1, 1), (torch.zeros(64)[1:], None), (5,), options)
    assert ways(kernel) == ["whole", "whole"]


def test_only_so_many_sizes_are_remembered(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launcher, "MOST", 3)
    a, options = torch.zeros(64), (("SIZE", 16),)
    for n in (1, 2, 3, 4, 4, 1):
        _launcher.launch(kernel, (1, 1, 1), (a, None), (n,), options)
    # 4 made room by forgetting the others.
    assert ways(kernel) == ["whole", "whole", "whole", "whole", "known", "whole"]
