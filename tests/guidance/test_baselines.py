"""The bias on logits, the hard-coded Gaussian heads, and the audit, each against values made by hand."""

from __future__ import annotations

import math

import pytest
import torch

import attnlab as al
from attnlab.conformance.calls import self_call
from attnlab.conformance.laws import LAWS
from attnlab.guidance import GaussianHeads, Guidance, LogitBias, pattern_audit, pattern_bias
from attnlab.patterns import SpecialTokens, dense, pattern_names, pattern_targets
from attnlab.trace import LayerTrace
from tests.tolerance import assert_close

IDS = torch.tensor([[4, 5, 4, 7, 9], [6, 6, 0, 9, 8]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 1]])
SEEN = MASK.bool()[:, None, None, :]


def test_a_strong_bias_is_the_pattern() -> None:
    bias = pattern_bias(Guidance(heads={"next": 1, "first": 1}), IDS, n_heads=3, strength=1e4, attention_mask=MASK)
    assert bias[:, 2].abs().max() == 0
    call = al.AttentionCall(*(torch.randn(2, 3, 5, 7) for _ in range(3)), key_visible=MASK.bool())
    guided = LogitBias(bias)
    W = guided.weights(call)
    for head, name in enumerate(("next", "first")):
        t = pattern_targets(name, IDS, attention_mask=MASK)
        rows = (t.rows & ~t.uniform)[:, 0]
        assert_close(W[:, head][rows], dense(t, keys=5)[:, 0][rows])
    assert_close(W[:, 2], al.Softmax().weights(call)[:, 2])
    assert_close(guided(call), W @ call.v)


def test_a_bias_in_a_decoder_keeps_to_the_prefix() -> None:
    bias = pattern_bias(Guidance(heads={"first": 1, "prev": 1}), IDS, n_heads=2, causal=True)
    assert bias.triu(1).abs().max() == 0
    assert bias[0, 1, 0].tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("name", [name for name in pattern_names() if name != "next"])
def test_a_pattern_of_earlier_tokens_is_a_bias_in_a_decoder(name: str) -> None:
    tokens = SpecialTokens(period=(7,), delimiters=(9,))
    bias = pattern_bias(Guidance(heads={name: 1}), IDS, n_heads=1, causal=True, tokens=tokens)
    assert bias.max() > 0


def test_no_key_is_next_in_a_decoder() -> None:
    with pytest.raises(ValueError, match="no head of this model can follow 'next'"):
        pattern_bias(Guidance(heads={"prev": 1, "next": 1}), IDS, n_heads=2, causal=True)


def test_gaussian_heads_by_hand() -> None:
    call = al.AttentionCall(*(torch.randn(2, 6, 5, 7) for _ in range(3)), key_visible=MASK.bool())
    W = GaussianHeads().weights(call)
    # The fourth token of the second text is its third visible one; head 0 looks around the one before it.
    near = torch.tensor([math.exp(-0.5), 1, 0, math.exp(-0.5), math.exp(-2)])
    assert_close(W[1, 0, 3], near / near.sum())
    assert_close(W[:, :3], W[:, 3:])
    assert W[0, :3, 2].argmax(-1).tolist() == [1, 2, 3]
    v = call.v.requires_grad_()
    (slope,) = torch.autograd.grad(GaussianHeads()(call)[:, 4].sum(), v)
    assert_close(slope[:, 4, :, 0], W[:, 4].sum(1))


@pytest.mark.parametrize("law", LAWS)
def test_gaussian_heads_obey_the_laws(law: str) -> None:
    al.check(GaussianHeads(), laws=[law]).raise_if_failed()


def test_gaussian_heads_refuse() -> None:
    with pytest.raises(ValueError, match="std be positive"):
        GaussianHeads(std=0.0)
    with pytest.raises(ValueError, match="another sequence"):
        GaussianHeads()(al.AttentionCall(torch.randn(1, 2, 3, 4), *(torch.randn(1, 2, 5, 4) for _ in range(2))))


class Given(al.Mechanism):
    """A mechanism whose W is what the test says."""

    def __init__(self, W: torch.Tensor) -> None:
        self.W = W

    def reference(self, call: al.AttentionCall) -> torch.Tensor:
        return self.W


def audited(names: list[str], **how: object) -> dict[tuple[int, str], dict[str, object]]:
    """The audit of a layer whose heads are these patterns, and last a uniform head."""
    tokens = SpecialTokens(period=(9,))
    maps = [dense(pattern_targets(n, IDS, attention_mask=MASK, tokens=tokens), keys=5)[:, 0] for n in names]
    even = (SEEN / MASK.sum(-1)[:, None, None, None]).expand(-1, -1, 5, -1)[:, 0]
    W = torch.stack([*maps, even], 1)
    call = al.AttentionCall(*(torch.zeros(2, len(names) + 1, 5, 3) for _ in range(3)), key_visible=MASK.bool())
    layer = LayerTrace(call, Given(W), call.q, None, "encoder", 0, "layer")
    table = pattern_audit([layer], IDS, attention_mask=MASK, tokens=tokens, **how)
    return {(row["head"], row["pattern"]): row for row in table}


def test_the_audit_finds_each_pattern() -> None:
    names = ["next", "prev", "first", "period", "same"]
    table = audited(names, patterns=names)
    for head, name in enumerate(names):
        assert table[head, name]["closeness"] == pytest.approx(1)
        assert table[head, name]["mass"] == pytest.approx(1)
        assert max(names, key=lambda other: table[head, other]["closeness"]) == name
    # Two texts of five and four tokens; the last of each has no next.
    assert table[0, "next"]["rows"] == 7
    # A uniform head: 2 t.w / (w.w + t.t) over first's 5 rows of 1/5 and 4 rows of 1/4, mass the mean of those.
    assert table[5, "first"]["mass"] == pytest.approx((5 / 5 + 4 / 4) / 9)
    assert table[5, "first"]["closeness"] == pytest.approx(2 * (5 / 5 + 4 / 4) / (5 / 5 + 4 / 4 + 9))


def test_the_audit_of_a_pattern_that_is_not_there() -> None:
    q = torch.zeros(1, 1, 3, 2)
    layer = LayerTrace(al.AttentionCall(q, q, q), al.Softmax(), q, None, "encoder", 0, "layer")
    (row,) = pattern_audit([layer], torch.tensor([[4, 5, 6]]), patterns=["period"], tokens=SpecialTokens(period=(9,)))
    assert (row["closeness"], row["mass"], row["rows"]) == (None, None, 0)
    with pytest.raises(ValueError, match="no self-attention over 2 keys was recorded"):
        pattern_audit([layer], torch.tensor([[4, 5]]))


def test_the_audit_reads_the_calls_own_padding() -> None:
    call = self_call()
    layer = LayerTrace(call, al.Softmax(), call.q, None, "encoder", 0, "layer")
    rows = pattern_audit([layer], torch.arange(call.k.shape[2]).expand(2, -1))
    assert {row["pattern"] for row in rows} == {"next", "prev", "first", "same"}
    assert len(rows) == 4 * call.q.shape[1]
    tokens = SpecialTokens(period=(3,))
    more = pattern_audit([layer], torch.arange(call.k.shape[2]).expand(2, -1), tokens=tokens)
    assert {row["pattern"] for row in more} == {"next", "prev", "first", "same", "period"}
