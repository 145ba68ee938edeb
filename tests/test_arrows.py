"""The direction of the imports, as design.md draws them: a room may import only what lies below it."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import attnlab

PACKAGE = Path(attnlab.__file__).parent

# Everybody may import the leaves; they import only each other.
LEAVES = {
    "shapes", "summaries", "provenance", "measure", "loss", "devices", "discovery", "errors", "fields", "hooks", "progress",
    "sizes", "chunks",
}  # fmt: skip
# A room below needs no model of a particular kind; the core is the one idea and what is made from it.
CORE = {"attention", "registry", "mechanisms", "linalg", "trace", "patterns"}
BELOW: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES},
    # What it adds to other packages is imported when they ask for it.
    "hooks": {"adapters"},
    # What a notebook shows is markup, imported when a notebook asks for it.
    "summaries": {"pages"},
    "attention": {"call_checks"},
    # It reads the fields of a call, whose type it names.
    "call_checks": {"attention"},
    "linalg": {"attention"},
    "registry": {"attention", "mechanisms"},
    "kernels": {"attention"},
    "mechanisms": {"attention", "registry", "linalg"},
    "patterns": {"attention"},
    "trace": {"attention", "registry", "mechanisms"},
    "conformance": {"attention", "registry", "mechanisms"},
    "caches": {"attention", "registry", "mechanisms", "linalg"},
    "data": set(),
    "models": CORE,
    "adapters": CORE | {"caches", "data", "models", "training"},
    "reading": CORE | {"adapters"},
    "guidance": CORE | {"adapters"},
    "dynamics": CORE | {"adapters", "training"},
    "training": set(),
    "pages": set(),
}
BELOW["pretraining"] = {"adapters", "data", "guidance", "models", "patterns", "reading", "training"}
BELOW["evaluation"] = set(BELOW)
BELOW["commands"] = set(BELOW)
BELOW["cli"] = set(BELOW)
BELOW["__main__"] = set(BELOW)
# The package's own __init__ offers the public names of these; it is nobody's dependency.
BELOW["__init__"] = set(BELOW)

TORCH_FREE = ("pages",)


def rooms_imported(source: str, package: str) -> set[tuple[str, bool]]:
    """(room, at module level) for every import of attnlab in a module of ``package`` (dotted)."""
    tree = ast.parse(source)
    top = set(map(id, tree.body))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "attnlab" else [module]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "attnlab" and len(parts) > 1:
                found.add((parts[1], id(node) in top))
    return found


def room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    assert room in BELOW, f"{room} is a new room: give it its place in tests/test_arrows.py"
    package = ".".join(["attnlab", *path.relative_to(PACKAGE).parts[:-1]])
    for target, at_top in rooms_imported(path.read_text(), package):
        if target in LEAVES or target == room or target == "__version__":
            continue
        if target == "kernels" and room in ("mechanisms", "linalg", "guidance", "loss", "caches"):
            assert not at_top, f"{path.name}: kernels are imported inside the function that needs them"
            continue
        assert target in BELOW[room], f"{path.name}: {room} may not import {target}"


def test_the_checker_sees_each_form_of_import() -> None:
    source = "from attnlab.adapters import swap\nimport attnlab.trace\ndef f():\n    from attnlab import pages\nfrom ..data import x\n"
    assert rooms_imported(source, "attnlab.models") == {
        ("adapters", True),
        ("trace", True),
        ("pages", False),
        ("data", True),
    }


@pytest.mark.parametrize("room", [room for room in TORCH_FREE if (PACKAGE / room).exists()])
def test_pages_are_made_without_torch(room: str) -> None:
    """No module of these rooms imports torch, not even through another."""
    for path in (PACKAGE / room).rglob("*.py"):
        names = {
            alias.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import) for alias in n.names
        }
        froms = {n.module or "" for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)}
        assert not {n for n in names | froms if n.split(".")[0] in ("torch", "transformers")}, path


def test_importing_is_cheap_and_quiet() -> None:
    """Importing attnlab imports no transformers and changes no global state of torch."""
    code = (
        "import torch, sys\n"
        "before = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed())\n"
        "import attnlab\n"
        "after = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed())\n"
        "assert before == after\n"
        "heavy = {'transformers', 'accelerate', 'pandas', 'scipy', 'sklearn', 'triton.runtime'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_the_core_needs_four_packages(tmp_path: Path) -> None:
    """With torch, transformers, safetensors, numpy and what they need, attnlab imports and does its work."""
    for name in required("torch", "transformers", "safetensors", "numpy"):
        for file in importlib.metadata.distribution(name).files or ():
            top = file.parts[0]
            link = tmp_path / top
            if top not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(file.locate().parents[len(file.parts) - 2] if len(file.parts) > 1 else file.locate())
    code = (
        "import torch, attnlab as al, attnlab.cli\n"
        "q = torch.randn(1, 6, 9, 4)\n"
        "for spec in al.all_mechanisms():\n"
        "    al.mechanism(spec)(al.AttentionCall(q, q, q, x=torch.randn(1, 9, 5)))\n"
        "model, tokenizer, task = al.shipped_model()\n"
        "with al.swap(model, 'top-r:r=2'), al.record(model) as trace:\n"
        "    model(**tokenizer('long live the king', return_tensors='pt'))\n"
        "assert al.effective_attention(trace[0]).weights.shape[1] == 8\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('accelerate') is importlib.util.find_spec('jaxtyping') is None\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])
    # -S leaves out site-packages, so that only what is linked above can be imported.
    subprocess.run([sys.executable, "-S", "-c", code], check=True, timeout=240, env=os.environ | {"PYTHONPATH": paths})


def required(*names: str) -> set[str]:
    """The installed distributions that these need, themselves included; extras are not needed."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            todo += [re.split(r"[^\w.-]", need)[0] for need in needs if "extra ==" not in need]
    return found
