"""What Triton compiles of a kernel for a Hopper GPU, which needs none, in a process where it does not interpret."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["Compiled", "compiled_for_hopper", "said_without_interpreter"]

TARGET = GPUTarget("cuda", 90, 32)
# What is no constant of a kernel, but of how it is launched.
HOW = ("num_warps", "num_stages", "maxnreg")


class Compiled(NamedTuple):
    """Bytes of shared memory, bytes of registers that go to memory, what ptxas says, and the two texts between."""

    shared: int
    spilled: int
    ptxas: str
    ttgir: str
    ptx: str

    @property
    def lanes(self) -> list[list[list[int]]]:
        """Which lanes hold which numbers, of each layout that is no usual one."""
        return [
            json.loads(one) for one in re.findall(r"^#linear\w* = .*lane = (\[\[.*?\]\])", self.ttgir, re.MULTILINE)
        ]


def compiled_for_hopper(
    kernel: Any, options: Mapping[str, Any], kinds: Mapping[str, str], *, divisible: Iterable[str] = ()
) -> Compiled:
    """Compile a kernel; ``options`` has its constants and how it is launched, ``kinds`` the types of its parameters.

    Parameters without a kind are whole numbers. Pointers are multiples of 16, as are the numbers called ``divisible``.
    """
    names = list(kernel.arg_names)
    how = {name: value for name, value in options.items() if name in HOW}
    constants = {name: value for name, value in options.items() if name not in HOW}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    multiples = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in set(divisible)]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in multiples},
    )
    result = triton.compile(source, target=TARGET, options=how)
    said = _ptxas(result.asm["ptx"])
    spilled = max(int(count) for count in re.findall(r"(\d+) bytes spill stores", said))
    return Compiled(result.metadata.shared, spilled, said, result.asm["ttgir"], result.asm["ptx"])


def said_without_interpreter(module: str, *words: object) -> str:
    """What a module of the tests prints that is run in a process of its own, where kernels are compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{module}", *map(str, words)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    if process.returncode:
        pytest.fail(process.stderr[-2000:])
    return process.stdout


def _ptxas(ptx: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        words = [str(program), "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(words, capture_output=True, text=True, check=True)
    return said.stdout + said.stderr
