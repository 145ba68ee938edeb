"""The keys and outputs of every policy against its equation in plain loops, after the prompt and after every step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnlab.attention import AttentionCall
from attnlab.caches import KeptKeys, KVPolicy, Place
from attnlab.caches.registry import key_score
from attnlab.mechanisms.softmax import Softmax
from tests.caches.plain import PLAIN, PlainCache
from tests.caches.policies import EXAMPLES
from tests.tolerance import assert_close

PROMPT, STEPS = 9, 5
HEADS, GROUPS, WIDTH, VALUE = 4, 2, 5, 3


@pytest.fixture(scope="module")
def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(4)
    shapes = (HEADS, PROMPT + STEPS, WIDTH), (GROUPS, PROMPT + STEPS, WIDTH), (GROUPS, PROMPT + STEPS, VALUE)
    q, k, v = (torch.randn(shape, dtype=torch.double, generator=draws) for shape in shapes)
    return q, k, v, torch.randn(7, HEADS * VALUE, dtype=torch.double, generator=draws)


def outputs(policy: KVPolicy, q: Tensor, k: Tensor, v: Tensor, projection: Tensor) -> tuple[list[list], Tensor]:
    """The columns kept by each head after every call, and all outputs (heads, tokens, width)."""
    keys = KeptKeys(policy, 1)
    columns, made = [], []
    for new in torch.arange(PROMPT + STEPS).split([PROMPT, *[1] * STEPS]):
        held_k, held_v = keys.extend(k[None, :, new], v[None, :, new])
        call = AttentionCall(q[None, :, new], held_k, held_v, causal=True, offset=held_k.shape[2] - len(new))
        if (mask := keys.mask(AttentionCall(call.q, held_k, held_v))) is not None:
            call = AttentionCall(call.q, held_k, held_v, causal=True, offset=call.offset, mask=mask)
        made.append(Softmax()(call))
        keys.cut(call, Place(1, 3, projection))
        assert keys.columns is not None
        columns.append([[c for c in head if c >= 0] for head in keys.columns[0].tolist()])
    return columns, torch.cat(made, 2)[0]


def test_every_policy_has_a_plain_twin() -> None:
    assert {*EXAMPLES} - {*PLAIN} == {
        spec for spec in EXAMPLES if key_score(spec).reads_twice or spec.startswith("compact")
    }


@pytest.mark.parametrize("when", ["step", "prefill"])
@pytest.mark.parametrize(
    ("spec", "heads"),
    [(spec, heads) for spec in PLAIN for heads in ("each", "shared") if heads not in key_score(spec).cannot()],
)
def test_the_kept_keys_are_those_of_plain_loops(
    spec: str, when: str, heads: str, tensors: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    policy = KVPolicy(6, by=spec, when=when, heads=heads)
    columns, made = outputs(policy, *tensors)
    plain = PlainCache(policy, *tensors)
    for kept, count in zip(columns, [PROMPT, *[1] * STEPS], strict=True):
        plain.read(count)
        assert kept == plain.kept
    rows = torch.stack([row.output for row in plain.rows]).view(PROMPT + STEPS, HEADS, VALUE)
    assert_close(made, rows.transpose(0, 1))


def test_kvzip_keeps_what_the_second_reading_looks_at() -> None:
    """Queries of the second reading attend to keys 1 and 4 of six, once each."""
    k = torch.eye(6).repeat(2, 1)[None, None] * 30
    q = torch.zeros(1, 1, 6, 6)
    q[..., 0, 1] = q[..., 3, 4] = 30
    keys = KeptKeys(KVPolicy(2, by="kvzip", sinks=0), 0)
    keys.extend(k[:, :, :6], k[:, :, :6])
    keys.cut(AttentionCall(q, k[:, :, :6], k[:, :, :6], causal=True))
    assert keys.counts().tolist() == [[6]]
    with pytest.raises(ValueError, match="must read the prompt twice"):
        keys.refuse_waiting()
    # The second reading sees no copy of these two keys.
    again = k.clone()
    again[:, :, [7, 10]] = 0
    keys.extend(again[:, :, 6:], again[:, :, 6:])
    keys.cut_after_rereading(AttentionCall(q, again, again, causal=True, offset=6), Place())
    assert keys.columns.tolist() == [[[1, 4]]]
    assert torch.equal(keys.store.padded("keys"), k[:, :, [1, 4]])
    assert keys.length == 6
