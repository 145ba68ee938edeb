"""The wheel: small enough, complete, and it passes the smoke test with no repository at hand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import attnlab

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 25_000_000
PARTS = ("attnlab", "pyproject.toml", "README.md", "LICENSE", "NOTICE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources, since a build leaves files among them."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, source / part)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*pip, str(built), str(source)], check=True, timeout=240)
    [path] = built.glob("*.whl")
    return path


def test_the_wheel_is_small_and_complete(wheel: Path) -> None:
    assert wheel.name == f"attnlab-{attnlab.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size <= MOST_BYTES
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "attnlab").rglob("*") if path.is_file()}
    assert {name for name in sources if "__pycache__" not in name} <= names
    licences = {f"attnlab-{attnlab.__version__}.dist-info/licenses/{name}" for name in ("LICENSE", "NOTICE")}
    assert licences <= names
    assert {name.partition("/")[0] for name in names} == {"attnlab", f"attnlab-{attnlab.__version__}.dist-info"}


def test_the_wheel_names_its_extras_and_pythons(wheel: Path) -> None:
    metadata = zipfile.ZipFile(wheel).read(f"attnlab-{attnlab.__version__}.dist-info/METADATA").decode()
    extras = set(re.findall(r"^Provides-Extra: (\w+)$", metadata, flags=re.MULTILINE))
    assert {"kernels", "train", "eval", "notebook", "ray", "gguf"} <= extras
    versions = re.findall(r"^Classifier: Programming Language :: Python :: (3\.\d+)$", metadata, flags=re.MULTILINE)
    assert versions == ["3.10", "3.11", "3.12", "3.13"]
    assert re.search(rf"^Requires-Python: >={re.escape(versions[0])}$", metadata, flags=re.MULTILINE)


@pytest.mark.slow
def test_the_wheel_passes_the_smoke_test_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(installed)
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "smoke.py")],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1].startswith(f"attnlab {attnlab.__version__} on Python ")
    assert list(empty.iterdir()) == []
