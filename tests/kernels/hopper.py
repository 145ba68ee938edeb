"""What Triton compiles of a kernel for a Hopper GPU, which needs none; to be run where Triton does not interpret."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["Compiled", "compiled_for_hopper"]

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


def _ptxas(ptx: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        words = [str(program), "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(words, capture_output=True, text=True, check=True)
    return said.stdout + said.stderr
