"""Every public name with wrong arguments: a TypeError or a ValueError that says what was expected, nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import attnlab as al
from tests.opened_pages import ROOT
from tests.unchecked import unchecked
from tests.wrong_arguments import RECORDS, WITHOUT_ARGUMENTS, right_arguments, small_model


def test_wrong_arguments_are_refused_with_a_message() -> None:
    command = [sys.executable, "-m", "tests.wrong_arguments"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_every_public_function_has_right_arguments_to_start_from() -> None:
    functions = {name for name in al.__all__ if not isinstance(getattr(al, name), type)}
    assert functions <= right_arguments().keys() | RECORDS | WITHOUT_ARGUMENTS


@pytest.mark.parametrize("offset", [1e30, 10**30, float("nan"), None, "1"])
def test_an_offset_is_a_number_of_tokens(offset: Any) -> None:
    q, k, v = torch.randn(3, 1, 2, 3, 4)
    with pytest.raises(ValueError, match="offset must be"):
        unchecked(al.AttentionCall, q=q, k=k, v=v, causal=True, offset=offset)


def test_negative_layers_count_from_the_end() -> None:
    model = small_model()
    with al.record(model) as trace, al.swap(model, "uniform", layers=[-1]), torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    assert [type(layer.mechanism).__name__ for layer in trace] == ["Softmax", "Uniform"]
    for layers in (5, [-3], [2], [True], [1.0], "nowhere"):
        with pytest.raises(ValueError, match="layer"), al.swap(model, "uniform", layers=layers):
            pass
