import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the docs are not installed")
def test_the_page_on_training_runs_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    space = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        exec(block, space)
    assert space["outcome"].step == 100
    assert {r.status for r in space["reports"].values()} == {"done"}
    assert (tmp_path / "runs" / "seeds" / "seed-2" / "result.json").exists()
