"""What a diagnosis says of a corpus: too little text is not hopeless."""

from __future__ import annotations

import pytest

from attnlab.dynamics import Learnable, bitext
from attnlab.evaluation.diagnose import ENOUGH, _verdict, diagnose, diagnosis_lines
from tests.dynamics.test_learnable import generated


@pytest.mark.parametrize(
    ("bits", "chance", "pairs", "verdict"),
    [
        (0.1, 0.1, ENOUGH - 1, "too little"),
        (0.1, 0.1, ENOUGH, "hopeless"),
        (0.0, 0.0, 5, "hopeless"),
        (0.5, 0.1, 5, "fine"),
    ],
)
def test_a_few_pairs_are_too_little_to_tell(bits: float, chance: float, pairs: int, verdict: str) -> None:
    assert _verdict(Learnable(bits, chance, 0.01), pairs) == verdict


def test_flat_counts_are_hopeless_however_few() -> None:
    same = [[0, 1, 2]] * 7
    assert diagnose(bitext(same, same), name="")["verdict"] == "hopeless"


def test_the_verdict_in_words() -> None:
    sources, targets = generated(5)
    diagnosis = diagnose(bitext(sources, targets), name="") | {"left_out": 0}
    assert diagnosis_lines(diagnosis)[0].startswith("too little text to tell: ")
