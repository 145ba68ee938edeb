"""What the tests of training share."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from attnlab.training import read_metrics
from tests.training.jobs import PowerCut, job, without_seconds


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, list[dict[str, Any]]]:
    """The model and the metrics of a run that nothing has stopped."""
    run = tmp_path_factory.mktemp("whole") / "run"
    model, _ = job(run, callbacks=[PowerCut(at=None)])
    return model, without_seconds(read_metrics(run))
