"""Writes the lock files anew: every package of the environment, one version, the sha256 of every file of that version.

Run it by `make lock`, which brings uv, the resolver. Versions that still fit pyproject.toml are kept; `--upgrade` takes
the newest.

- requirements.lock: what attnlab needs.
- requirements-cuda.lock: the libraries that the registry's torch for Linux needs on top.
- requirements-cpu.lock: the CPU builds of that torch. They are not in the registry, so their hashes come from wheels at
  hand (`--wheel FILE`); those known before are kept. pip takes the registry's build wherever it can see both, so this
  file is installed first.
- requirements-dev.lock: what tests, checks, training and benchmarks need on top.
- requirements-site.lock: what the site and its notebooks need on top of that.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE, CUDA, CPU, DEV, SITE = (ROOT / f"requirements{kind}.lock" for kind in ("", "-cuda", "-cpu", "-dev", "-site"))
# Resolved once for every system and for every Python from the oldest that attnlab runs on.
RESOLVE = ["pip", "compile", "pyproject.toml", "--no-config", "--quiet", "--universal", "--fork-strategy=fewest"]
RESOLVE += ["--python-version=3.10", "--no-annotate", "--no-header", "--generate-hashes"]
HEADERS = {
    CORE: "What attnlab needs: one version a package, with the hashes of all its files.",
    CUDA: "On top of requirements.lock where torch is the registry's build for Linux: its CUDA libraries.",
    CPU: "Before requirements.lock, where a CPU build of torch is to be taken.",
    DEV: "On top of requirements.lock: what tests, checks, training and benchmarks need.",
    SITE: "On top of requirements-dev.lock: what the site and its notebooks need.",
}

Blocks = dict[str, str]


def blocks(text: str) -> Blocks:
    """Per requirement line (`name==version ; marker`), the line and the hashes below it.

    >>> blocks("a==1 \\\\\\n    --hash=sha256:00\\nb==2\\n").keys()
    dict_keys(['a==1', 'b==2'])
    """
    starts = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    return {
        block.splitlines()[0].rstrip(" \\"): block.rstrip() for block in starts if block.strip() and block[0] != "#"
    }


def package(requirement: str) -> str:
    """The name in `name==version ; marker`."""
    return requirement.split("==")[0]


def only_for_cuda(requirement: str) -> bool:
    """Whether only torch's build for CUDA needs this package."""
    return package(requirement).startswith(("cuda-", "nvidia-")) or package(requirement) == "triton"


def resolve(uv: str, extra: list[str], kept: list[Path], upgrade: bool) -> Blocks:
    """What uv picks for pyproject.toml with these options; the versions of `kept` are preferred."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "lock.txt")
        out.write_text("\n".join(path.read_text() for path in kept if path.exists()))
        options = [*extra, *(["--upgrade"] if upgrade else [])]
        subprocess.run([uv, *RESOLVE, *options, "-o", str(out)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return blocks(out.read_text())


def cpu_builds(core: Blocks, wheels: list[Path]) -> Blocks:
    """The CPU builds of the torch in `core`: those that the lock file knows, and these wheels."""
    (torch,) = [requirement for requirement in core if package(requirement) == "torch"]
    known = blocks(CPU.read_text()) if CPU.exists() else {}
    hashes = re.findall(r"sha256:\w{64}", known.get(f"{torch}+cpu", ""))
    hashes += ["sha256:" + hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels]
    lines = [f"{torch}+cpu", *(f"--hash={digest}" for digest in dict.fromkeys(hashes))]
    return {f"{torch}+cpu": " \\\n    ".join(lines)} if hashes else {}


def with_hashes_of(cpu: Blocks, core: Blocks) -> Blocks:
    """torch's block in `core` with the hashes of its CPU builds, so that it accepts every build of the version."""
    accepted = {}
    for name, block in cpu.items():
        torch = name.removesuffix("+cpu")
        fresh = [line.strip(" \\") for line in block.splitlines()[1:] if line.strip(" \\") not in core[torch]]
        accepted[torch] = " \\\n    ".join([core[torch], *fresh])
    return accepted


def write(path: Path, lock: Blocks) -> None:
    """One lock file: a line on what it is for, then the packages."""
    path.write_text("\n".join([f"# {HEADERS[path]} Written by `make lock`.", *lock.values()]) + "\n")


def main(arguments: list[str]) -> None:
    """Resolves the environments and writes the five files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--uv", default="uv", help="the resolver's program")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that pyproject.toml allows")
    parser.add_argument(
        "--wheel", type=Path, action="append", default=[], help="a wheel of torch whose hash is to be added"
    )
    options = parser.parse_args(arguments)
    core = resolve(options.uv, [], [CORE, CUDA], options.upgrade)
    cuda = {name: block for name, block in core.items() if only_for_cuda(name)}
    core = {name: block for name, block in core.items() if name not in cuda}
    cpu = cpu_builds(core, options.wheel)
    write(CORE, core | with_hashes_of(cpu, core))
    write(CUDA, cuda)
    write(CPU, cpu)
    together = ["--extra", "dev", "-c", str(CORE), "-c", str(CUDA)]
    dev = resolve(options.uv, together, [CORE, CUDA, DEV], options.upgrade)
    # Tests run the kernels in triton's interpreter, with any build of torch, so triton is in this file too.
    there = {package(name) for name in [*core, *cuda]} - {"triton", "colorama"}
    dev = {name: block for name, block in dev.items() if package(name) not in there}
    write(DEV, dev)
    together += ["--extra", "site", "-c", str(DEV)]
    site = resolve(options.uv, together, [CORE, CUDA, DEV, SITE], options.upgrade)
    there |= {package(name) for name in dev} | {"triton"}
    write(SITE, {name: block for name, block in site.items() if package(name) not in there})


if __name__ == "__main__":
    main(sys.argv[1:])
