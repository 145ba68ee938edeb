"""What a policy puts in the place of keys, with a bias for each, follows them through everything that a cache does."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import attnlab as al
from attnlab.adapters.prefill import compressed, even_keys, read_prefill
from attnlab.attention import AttentionCall
from attnlab.caches import KeptKeys, KVPolicy, Place
from attnlab.caches.contract import Moment, Refit
from attnlab.caches.layers import LayerPool
from attnlab.caches.registry import key_score
from attnlab.mechanisms.softmax import Softmax
from tests.adapters.both_kinds import tokens_of
from tests.adapters.zoo import build
from tests.caches.policies import EXAMPLES
from tests.caches.test_laws import variants
from tests.caches.test_ragged_models import decoded
from tests.quick_cases import one_quick
from tests.tolerance import assert_close

ROWS, GROUPS, HEADS, WIDTH, VALUE, PROMPT = 3, 2, 6, 7, 5, 23
PLACE = Place(1, 3, torch.randn(7, HEADS * VALUE, generator=torch.Generator().manual_seed(2)).double())


class Key(NamedTuple):
    """A key that a head holds."""

    k: Tensor
    v: Tensor
    bias: float = 0.0


class Heads:
    """What each head of each row should hold, as lists."""

    def __init__(self) -> None:
        self.keys: list[list[list[Key]]] = [[[] for _ in range(GROUPS)] for _ in range(ROWS)]

    def read(self, k: Tensor, v: Tensor, shown: Tensor) -> None:
        """Add the keys of new tokens; padding has none."""
        for r, row in enumerate(self.keys):
            for g, own in enumerate(row):
                own += [Key(k[r, g, i], v[r, g, i]) for i in range(k.shape[2]) if shown[r, i]]

    def refit(self, refit: Refit, moment: Moment, keep: Tensor) -> None:
        """Keep of each head's keys those of ``keep``, as the policy fitted them."""
        for r, row in enumerate(self.keys):
            for g, own in enumerate(row):
                places = moment.held[r, g].nonzero()[:, 0].tolist()
                # Where a prompt was read twice, the second reading adds none.
                assert len(places) == len(own)
                row[g] = [
                    Key(refit.k[r, g, at], refit.v[r, g, at], float(refit.bias[r, g, at]))
                    for at in places
                    if keep[r, g, at]
                ]

    def outputs(self, q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(d) + bias) v of new queries, each over the keys that are left and the new ones so far."""
        out = q.new_zeros(*q.shape[:3], VALUE)
        for r, row in enumerate(self.keys):
            for g, own in enumerate(row):
                for i in shown[r].nonzero()[:, 0].tolist():
                    seen = own + [Key(k[r, g, j], v[r, g, j]) for j in range(i + 1) if shown[r, j]]
                    keys, values = torch.stack([key.k for key in seen]), torch.stack([key.v for key in seen])
                    heads = slice(g * HEADS // GROUPS, (g + 1) * HEADS // GROUPS)
                    scores = q[r, heads, i] @ keys.mT * WIDTH**-0.5 + q.new_tensor([key.bias for key in seen])
                    out[r, heads, i] = scores.softmax(-1) @ values
        return out

    def check(self, kept: KeptKeys) -> None:
        assert kept.store is not None
        assert kept.biased
        keys, values, bias = (kept.store.padded(name, 0) for name in ("keys", "values", "bias"))
        for r, row in enumerate(self.keys):
            for g, own in enumerate(row):
                first = keys.shape[2] - len(own)
                assert not bias[r, g, :first].any()
                assert bias[r, g, first:].tolist() == [key.bias for key in own]
                assert torch.equal(keys[r, g, first:], torch.stack([key.k for key in own]))
                assert torch.equal(values[r, g, first:], torch.stack([key.v for key in own]))
        assert kept.counts().tolist() == [[len(own) for own in row] for row in self.keys]


class Reader:
    """A cache of one layer beside its lists; every call checks outputs and what is held after it."""

    def __init__(self, policy: KVPolicy, monkeypatch: pytest.MonkeyPatch, *, way: str) -> None:
        self.kept, self.heads, self.way = KeptKeys(policy, 1), Heads(), way
        self.draws = torch.Generator().manual_seed(3)
        monkeypatch.setattr(type(policy.score), "refit", self.refit, raising=False)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.double, generator=self.draws)

    def refit(self, moment: Moment, keep: Tensor) -> Refit:
        shape = keep.shape
        made = Refit(self.random(*shape, WIDTH), self.random(*shape, VALUE), self.random(*shape))
        self.heads.refit(made, moment, keep)
        return made

    def read(self, count: int, padding: Tensor | None = None) -> None:
        kept, shown = self.kept, torch.ones(ROWS, count, dtype=torch.bool) if padding is None else ~padding
        q, k, v = (self.random(ROWS, n, count, w) for n, w in ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUE)))
        expected = self.heads.outputs(q, k, v, shown)
        self.heads.read(k, v, shown)
        stepped = self.way != "padded" and kept.steps(k)
        if stepped:
            kept.append(k, v)
        if stepped and self.way == "flat" and padding is None:
            out = kept.attend(q, scale=WIDTH**-0.5)
        else:
            keys, values = kept.as_call() if stepped else kept.extend(k, v)
            mask = kept.mask(AttentionCall(q, k, v, key_visible=shown))
            offset = keys.shape[2] - count
            call = AttentionCall(q, keys, values, causal=True, offset=offset, mask=mask, bias=kept.bias(q))
            out = Softmax()(call)
            kept.cut(call, PLACE)
        assert_close(out * shown[:, None, :, None], expected * shown[:, None, :, None])
        if kept.waits:
            again = self.random(ROWS, GROUPS, count, WIDTH), self.random(ROWS, GROUPS, count, VALUE)
            keys, values = kept.extend(*again)
            reading = AttentionCall(self.random(*q.shape), keys, values, causal=True, offset=count)
            kept.cut_after_rereading(reading, PLACE)
        self.heads.check(kept)

    def select(self, rows: Tensor) -> None:
        self.kept.select(rows)
        self.heads.keys = [[[*own] for own in self.heads.keys[row]] for row in rows.tolist()]
        self.heads.check(self.kept)


POLICIES = [
    policy
    for spec in EXAMPLES
    for policy in variants(spec, budget=9)
    # A policy that refuses biases is not asked a second time.
    if policy.schedule == "prefill" or "bias" not in key_score(spec).cannot()
]
# Keys are padded where the policy is asked after every step.
WAYS = {"prefill": ("flat", "padded", "padded after all"), "step": ("padded",)}
CASES = [
    case for i, policy in enumerate(POLICIES) for case in one_quick([(policy, way) for way in WAYS[policy.schedule]], i)
]


@pytest.mark.parametrize(("policy", "way"), CASES)
@torch.no_grad()
def test_fitted_keys_and_their_biases_follow_everything_that_a_cache_does(
    policy: KVPolicy, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the prompt, steps over flat and over padded keys, copied rows, several tokens at once, and padding."""
    reader = Reader(policy, monkeypatch, way=way)
    padded = "padding" not in policy.score.cannot()
    padding = torch.zeros(ROWS, PROMPT, dtype=torch.bool)
    padding[1, :4] = padded
    reader.read(PROMPT, padding)
    assert any(key.bias for row in reader.heads.keys for own in row for key in own)
    reader.read(1)
    reader.select(torch.tensor([2, 0, 0]))
    reader.read(1)
    later = torch.zeros(ROWS, 3, dtype=torch.bool)
    later[2, :2] = padded or policy.schedule == "prefill"
    reader.read(3, later)
    reader.read(1)
    reader.select(torch.tensor([1, 1, 2]))
    reader.read(1)


COMPACT = (
    "compact:budget=0.3",
    "compact:queries=prompt,budget=12",
    "compact:queries=prompt,budget=12,layers=even",
    "compact:queries=sampled,budget=0.3,heads=shared,layers=even",
)


@pytest.mark.parametrize("policy", COMPACT)
def test_biases_are_added_in_both_ways_of_a_step(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading keys where they lie gives the logits of padded keys, and other ones than without biases."""
    model, ids = build("llama").double(), tokens_of(32)
    direct = decoded(model, ids, policy)
    with monkeypatch.context() as patch:
        patch.setattr(KeptKeys, "steps", lambda *_: False)
        for step, expected in zip(direct, decoded(model, ids, policy), strict=True):
            assert_close(step, expected)
        patch.setattr(KeptKeys, "bias", lambda *_: None)
        assert any(
            (step - without).abs().max() > 1e-6
            for step, without in zip(direct, decoded(model, ids, policy), strict=True)
        )


@torch.no_grad()
def test_fitted_keys_do_not_answer_in_a_plain_cache() -> None:
    """A cache without biases would attend to them in another way."""
    model, ids = build("llama"), tokens_of(20)
    policy = al.cache_policy("compact:queries=prompt,budget=6,layers=even,safeguard=1")
    with compressed(model, policy, read_prefill(model, ids)) as cache:
        assert {int(n) for counts in cache.kept_by_head() for n in counts.flatten()} == {6}
        assert even_keys(cache) is None


def waiting_layers() -> tuple[KeptKeys, KeptKeys]:
    """Two of three layers that share their budget, after a prompt of 11 tokens."""
    policy = KVPolicy(5, by="value-norm", when="prefill", layers="shared")
    pool = LayerPool()
    layers = KeptKeys(policy, 0, pool), KeptKeys(policy, 1, pool)
    k, v = torch.randn(2, GROUPS, 11, WIDTH), torch.randn(2, GROUPS, 11, VALUE)
    for i, kept in enumerate(layers):
        kept.extend(k, v + i)
        kept.cut(AttentionCall(torch.randn(2, HEADS, 11, WIDTH), k, v + i, causal=True), Place(i, 3))
    assert [kept.longest for kept in layers] == [11, 11]
    return layers


@torch.no_grad()
def test_layers_that_wait_are_cut_when_their_keys_are_asked_for() -> None:
    """A model that stops before its last layer leaves the others waiting, which share the budget then."""
    first, second = waiting_layers()
    assert int(second.counts().sum() + first.counts().sum()) == 2 * 2 * GROUPS * 5
    first, second = waiting_layers()
    first.extend(torch.randn(2, GROUPS, 1, WIDTH), torch.randn(2, GROUPS, 1, VALUE))
    assert int(second.counts().sum() + first.counts().sum()) == 2 * 2 * GROUPS * 5 + 2 * GROUPS


@torch.no_grad()
def test_an_emptied_layer_waits_no_more() -> None:
    first, second = waiting_layers()
    first.emptied()
    assert int(second.counts().sum()) == 2 * GROUPS * 5


def test_a_reset_cache_has_no_certificates() -> None:
    model, ids = build("llama"), tokens_of(9)
    with torch.no_grad(), al.evicting(model, "compact:queries=prompt,budget=4") as cache:
        first = model(ids, past_key_values=cache).logits
        after = model(ids[:, :1], past_key_values=cache).logits
        assert all(one is not None for one in cache.certificates())
        cache.reset()
        assert cache.nbytes() == 0
        assert cache.certificates() == [None] * 3
        assert torch.equal(model(ids, past_key_values=cache).logits, first)
        assert_close(model(ids[:, :1], past_key_values=cache).logits, after)
