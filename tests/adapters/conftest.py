"""What the tests of both kinds of model share."""

from __future__ import annotations

import pytest
from torch import nn

from tests.adapters.both_kinds import DECODERS, FAMILIES, Family


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> nn.Module:
    return FAMILIES[request.param].make()
