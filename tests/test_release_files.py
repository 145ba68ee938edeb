"""What a release needs agrees with the code: the citation, the changelog's form, the workflow of GitHub Actions."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

import attnlab

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == attnlab.__version__
    assert citation["license"] == "Apache-2.0"
    # What the format requires beside the version of itself.
    assert all(citation[name] for name in ("message", "title", "authors"))


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *versions = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert first == "[Unreleased]"
    for version in versions:
        number, day = re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", version).groups()
        assert date.fromisoformat(day), number
    for kind in re.findall(r"^### (.*)$", text, flags=re.MULTILINE):
        assert kind in KINDS
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.*)$", section, flags=re.MULTILINE)
        assert len(kinds) == len(set(kinds)), "one section a kind of change"


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_may_only_read(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for line in re.findall(r"uses:.*", text):
        assert re.fullmatch(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())


def test_the_workflow_runs_what_ci_runs_and_the_smoke_test_on_every_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    assert "bash .ci/run" in commands
    assert "make site" in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert "python tools/smoke.py" in commands
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    assert workflow["jobs"]["smoke"]["strategy"]["matrix"]["python"] == versions
    # No checkout there: the wheel must need nothing of the repository.
    assert not [step for step in workflow["jobs"]["smoke"]["steps"] if "checkout" in step.get("uses", "")]
