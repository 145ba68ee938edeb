"""``al.check``: the report, and the laws that a wrong mechanism breaks."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

import attnlab as al
from attnlab.attention import scores
from attnlab.mechanisms.softmax import softmax

FIRST = "output_is_weights_times_values"


class SeesTheFuture(al.Mechanism):
    """Softmax attention that ignores causality."""

    def reference(self, call: al.AttentionCall) -> torch.Tensor:
        return softmax(scores(replace(call, causal=False, offset=0)))


@dataclass(frozen=True)
class ChunkedWindow(al.Window):
    """A window whose default forward does not know that its reference needs all queries."""

    whole_queries = False
    forward = al.Mechanism.forward


@dataclass(frozen=True)
class WholeWindow(ChunkedWindow):
    """The same, with the declaration."""

    whole_queries = True


class Excused(SeesTheFuture):
    """Exempt from what it breaks, and causal calls are refused."""

    exempt = {"gradients": "its gradient is not asked for in this test", "no_such_law": "too short"}

    def cannot(self) -> dict[str, str]:
        return {"causal": "it does not know what comes later"}


def test_a_mechanism_that_ignores_the_causal_mask_fails() -> None:
    report = al.check(SeesTheFuture())
    assert not report.ok
    assert {"causal_outputs_ignore_the_future", "hidden_keys_get_no_weight"} <= {each.law for each in report.failed}
    assert "output_is_weights_times_values" not in {each.law for each in report.failed}
    with pytest.raises(AssertionError, match="causal_outputs_ignore_the_future: with causal=True, the outputs of the"):
        report.raise_if_failed()
    assert "causal_outputs_ignore_the_future" in repr(report)


@pytest.mark.parametrize(
    ("ignored", "law", "why"),
    [
        ("causal", "hidden_keys_get_no_weight", "query 0 gives weight .* to key 1, .*it comes later, and causal=True"),
        ("key_visible", "hidden_keys_get_no_weight", "key_visible hides that key from all queries"),
        ("mask", "hidden_keys_get_no_weight", "mask hides the pair"),
        (
            "bias",
            "a_bias_moves_the_weights",
            "the same with and without a bias; add call.bias to the scores, or refuse",
        ),
        ("offset", "prefill_then_steps_equals_whole", "tokens 1 to 1 alone, with offset=1, and in the whole sequence"),
    ],
)
def test_the_reason_names_the_part_of_the_call_that_a_mechanism_ignores(ignored: str, law: str, why: str) -> None:
    plain = {"causal": False, "offset": 0} if ignored == "causal" else {ignored: 0 if ignored == "offset" else None}

    class Careless(al.Mechanism):
        def reference(self, call: al.AttentionCall) -> torch.Tensor:
            return softmax(scores(replace(call, **plain)))

    (result,) = al.check(Careless(), laws=[law]).results
    assert result.outcome == "failed"
    assert re.search(why, result.reason), result.reason
    assert "\n" not in result.reason
    assert repr(Careless()) == "Careless()"


def test_queries_in_chunks_must_not_change_the_output() -> None:
    law = "long_sequences_equal_the_reference"
    (broken,) = al.check(ChunkedWindow(r=4)).failed
    assert broken.law == law
    assert al.check(WholeWindow(r=4), laws=[law]).ok


def test_the_report_tells_exempt_and_refused_apart() -> None:
    laws = ["gradients", "causal_outputs_ignore_the_future", FIRST, "exemptions_name_laws_and_give_reasons"]
    report = al.check(Excused(), laws=laws)
    assert [each.outcome for each in report.results] == ["exempt", "refused", "passed", "failed"]
    assert "what comes later" in report.results[1].reason
    assert "'no_such_law', which is no law" in report.results[3].reason
    assert repr(report).count("\n") == 0
    assert all(law in str(report) for law in laws)


def test_an_error_in_a_mechanism_is_a_failure_with_its_message() -> None:
    class Unfinished(al.Mechanism):
        pass

    (result,) = al.check(Unfinished(), laws=[FIRST]).results
    assert result.outcome == "failed"
    assert "NotImplementedError: Unfinished must define reference" in result.reason


def test_a_law_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="no law named 'gravity'; the laws are output_is"):
        al.check("softmax", laws=["gravity"])
    with pytest.raises(ValueError, match="laws is a list of names"):
        al.check("softmax", laws=FIRST)


def test_a_check_leaves_the_mechanism_and_the_generator_alone() -> None:
    mech, state = al.AbcMlp(slots=2), torch.get_rng_state()
    assert al.check(mech, laws=[FIRST]).ok
    assert mech.weight is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_a_check_needs_no_test_tools() -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('pytest', 'hypothesis', 'beartype', 'jaxtyping')))\n"
        "import attnlab as al\n"
        "al.check('window:r=3').raise_if_failed()\n"
    )
    subprocess.run([sys.executable, "-O", "-c", code], check=True, timeout=240)


@pytest.mark.slow
def test_a_wider_search_obeys_the_laws() -> None:
    """The laws run over ``value-aware:r=2``; three keys take the same search several times as long."""
    al.check("value-aware:r=3").raise_if_failed()
