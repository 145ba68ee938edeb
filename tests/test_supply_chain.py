"""Lock files with hashes, and a licence for everything that is shipped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.lock import blocks, package

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
ROOT = Path(__file__).resolve().parent.parent
LOCKS = sorted(ROOT.glob("requirements*.lock"))
# A licence by its name.
LICENCE = re.compile(r"Apache License 2\.0|CC BY-SA 4\.0|CC0 1\.0")


def names(*files: str) -> set[str]:
    return {package(line) for file in files for line in blocks((ROOT / file).read_text())}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_locked_package_has_one_version_and_hashes(lock: Path) -> None:
    locked = blocks(lock.read_text())
    assert locked
    for line, block in locked.items():
        assert re.match(r"[a-z0-9.-]+==\S+( ; .+)?$", line), line
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), line
    assert "://" not in lock.read_text()


def test_torch_is_locked_in_every_build_at_one_version() -> None:
    [core] = [line for line in blocks((ROOT / "requirements.lock").read_text()) if package(line) == "torch"]
    [cpu] = blocks((ROOT / "requirements-cpu.lock").read_text()).items()
    assert cpu[0] == f"{core}+cpu"
    registry = blocks((ROOT / "requirements.lock").read_text())[core]
    assert all(digest in registry for digest in re.findall(r"sha256:\w{64}", cpu[1]))


def test_what_pyproject_names_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    wanted += [one for extra in ("train", "ray", "gguf", "eval") for one in project["optional-dependencies"][extra]]
    bare = {re.match(r"[\w-]+", one).group().lower() for one in wanted} - {"attnlab"}
    assert bare <= names("requirements.lock", "requirements-dev.lock")


def test_everything_shipped_states_its_licence() -> None:
    folders = [path for path in (ROOT / "attnlab" / "shipped").iterdir() if path.is_dir()]
    for folder in [*folders, ROOT / "papers" / "effective" / "maps_data"]:
        assert LICENCE.search((folder / "README.md").read_text()), folder
        assert folder.name in (ROOT / "NOTICE").read_text()
    assert LICENCE.search((ROOT / "docs" / "model-card.md").read_text())
    assert "NOTICE" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
