"""Launches: which way they take, what a compiled kernel is given directly, and the switch between the two ways."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attnlab.kernels import LAUNCH_VARIABLE, TESTED_TRITON, launching


class Kernel:
    """A kernel (a, b, n, SIZE) that notes how it was called; ``run`` is the compiled one's."""

    arg_names = ("a", "b", "n", "SIZE")

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(**arguments: Any) -> Any:
            self.calls.append(("plain", (*grid, *arguments.items())))
            return SimpleNamespace(run=self.run, function="f", packed_metadata="m")

        return call

    def run(self, *args: Any) -> None:
        self.calls.append(("direct", args))

    @property
    def ways(self) -> list[str]:
        """How each call was launched."""
        return [way for way, _ in self.calls]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel in a world of compiled kernels, in direct mode."""
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "launch_mode", lambda: "direct")
    monkeypatch.setattr(launching, "_KNOWN", {})
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _device: 99)
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=active))
    return Kernel()


OPTIONS = (("SIZE", 16), ("num_warps", 4))


def test_the_second_call_gives_the_compiled_kernel_addresses(kernel: Kernel) -> None:
    a = torch.zeros(64)
    for grid in ((2, 1, 1), (3, 1, 1)):
        launching.launch(kernel, grid, {"a": a, "b": None}, {"n": 5}, OPTIONS)
    assert kernel.ways == ["plain", "direct"]
    # grid, stream, function, metadata, no hooks, pointers, numbers, constants
    assert kernel.calls[1][1] == (3, 1, 1, 99, "f", "m", None, None, None, a.data_ptr(), 0, 5, 16)


@pytest.mark.parametrize("change", ["number", "dtype", "none", "options"])
def test_a_launch_for_which_triton_may_compile_again_is_plain(kernel: Kernel, change: str) -> None:
    a = torch.zeros(64)
    launching.launch(kernel, (1, 1, 1), {"a": a, "b": None}, {"n": 5}, OPTIONS)
    launching.launch(
        kernel,
        (1, 1, 1),
        {"a": a.long() if change == "dtype" else a, "b": a if change == "none" else None},
        {"n": 6 if change == "number" else 5},
        (("SIZE", 32),) if change == "options" else OPTIONS,
    )
    assert kernel.ways == ["plain", "plain"]


def test_pointers_that_are_no_multiples_of_16_are_launched_plainly(kernel: Kernel) -> None:
    for _ in range(2):
        launching.launch(kernel, (1, 1, 1), {"a": torch.zeros(64)[1:], "b": None}, {"n": 5}, OPTIONS)
    assert kernel.ways == ["plain", "plain"]


def test_the_number_of_remembered_launches_is_bounded(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MOST", 3)
    a = torch.zeros(64)
    for n in (1, 2, 3, 4, 4, 1):
        launching.launch(kernel, (1, 1, 1), {"a": a, "b": None}, {"n": n}, OPTIONS)
    # At 4 the others were forgotten.
    assert kernel.ways == ["plain", "plain", "plain", "plain", "direct", "plain"]


@pytest.mark.parametrize("tensors", [{"b": None, "a": None}, {"a": None}])
def test_arguments_out_of_the_kernels_order_are_refused(kernel: Kernel, tensors: dict[str, None]) -> None:
    with pytest.raises(TypeError, match="must be in the order"):
        launching.launch(kernel, (1, 1, 1), tensors, {"n": 5}, OPTIONS)


@pytest.mark.parametrize("reason", ["mode", "interpreter", "hook"])
def test_every_launch_is_plain_if_the_mode_the_interpreter_or_a_hook_asks_for_it(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "mode":
        monkeypatch.setattr(launching, "launch_mode", lambda: "plain")
    elif reason == "interpreter":
        monkeypatch.setattr(launching, "INTERPRETED", True)
    else:
        hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[print]))
        monkeypatch.setattr(launching, "knobs", SimpleNamespace(runtime=hooks))
    for _ in range(2):
        assert launching.launch(kernel, (1, 1, 1), {"a": torch.zeros(64), "b": None}, {"n": 5}, OPTIONS) is None
    assert kernel.ways == ["plain", "plain"]


def mode(monkeypatch: pytest.MonkeyPatch, version: str, chosen: str | None) -> str:
    """``launch_mode`` as it is the first time with this version of Triton and this setting."""
    monkeypatch.setattr(launching.triton, "__version__", version)
    if chosen is None:
        monkeypatch.delenv(LAUNCH_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(LAUNCH_VARIABLE, chosen)
    return launching.launch_mode.__wrapped__()


def test_tested_versions_are_launched_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    for major, minor in TESTED_TRITON:
        assert mode(monkeypatch, f"{major}.{minor}.1+git1", None) == "direct"


def test_other_versions_are_launched_plainly_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    (major, first), (_, last) = TESTED_TRITON
    for version in (f"{major}.{first - 1}.9", f"{major}.{last + 1}.0"):
        with pytest.warns(RuntimeWarning, match=f"through Triton {version}.*{LAUNCH_VARIABLE}=plain"):
            assert mode(monkeypatch, version, None) == "plain"


@pytest.mark.parametrize("chosen", ["plain", "direct"])
@pytest.mark.parametrize("version", ["3.3.0", "3.5.0", "4.0.0"])
def test_the_environment_variable_decides_for_every_version(
    monkeypatch: pytest.MonkeyPatch, version: str, chosen: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mode(monkeypatch, version, chosen) == chosen


def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"{LAUNCH_VARIABLE} must be plain or direct, got 'fast'"):
        mode(monkeypatch, "3.5.0", "fast")


def test_the_mode_is_found_out_once_so_that_there_is_at_most_one_warning() -> None:
    code = (
        "import triton; triton.__version__ = '4.0.0'; from attnlab.kernels import launching;"
        "print([launching.launch_mode() for _ in range(3)])"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "always"}
    environment.pop(LAUNCH_VARIABLE, None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "['plain', 'plain', 'plain']"
    assert done.stderr.count("direct launches were tested") == 1
