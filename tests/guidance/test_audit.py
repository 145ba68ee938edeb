"""The law of pattern scores: whatever hides keys, only rows that see a key of the pattern count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attnlab as al
from attnlab.attention import visible
from attnlab.evaluation.explore import Subject
from attnlab.guidance import pattern_audit
from attnlab.patterns import SpecialTokens
from attnlab.trace import LayerTrace
from tests.adapters import zoo as hf_zoo

B, H, N, D, STOP, END = 2, 3, 13, 5, 9, 2
TOKENS = SpecialTokens(period=(STOP,), delimiters=(END,))
PATTERNS = ["next", "prev", "first", "same", "period", "delim"]
IDS = torch.tensor([[4, 5, STOP, 4, 6, 7, 5, STOP, 8, 4, 4, 6, END], [3, 4, 3, STOP, 3, 6, END, 7, 7, 8, 3, 4, 5]])


def window(reach: int) -> Tensor:
    i = torch.arange(N)
    return (i[:, None] - i).abs().lt(reach)[None, None]


def left_padded() -> Tensor:
    flags = torch.ones(B, N, dtype=torch.bool)
    flags[1, :4] = False
    return flags


def right_padded() -> Tensor:
    return left_padded().flip(-1)


def hidden_by_a_bias(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)


MASKS = {
    "bidirectional": {},
    "causal": {"causal": True},
    "window": {"mask": window(3)},
    "causal window": {"causal": True, "mask": window(3)},
    "causal window in a bias": {"causal": True, "bias": hidden_by_a_bias(window(3))},
    "padded left": {"key_visible": left_padded()},
    "causal, padded left": {"key_visible": left_padded(), "causal": True},
    "causal, padded right": {"key_visible": right_padded(), "causal": True},
    "causal window, padded right": {"key_visible": right_padded(), "causal": True, "mask": window(2)},
}


def keys_of(pattern: str, ids: list[int], place: int) -> set[int]:
    """The places of the keys that a pattern names for the token at ``place`` of a text without padding."""
    match pattern:
        case "next" | "prev":
            wanted = {place + (1 if pattern == "next" else -1)}
        case "first":
            wanted = {0}
        case "same":
            wanted = {j for j, token in enumerate(ids) if token == ids[place]}
        case _:
            wanted = {j for j, token in enumerate(ids) if token == (STOP if pattern == "period" else END)}
    return wanted & set(range(len(ids)))


def by_hand(pattern: str, W: Tensor, seen: Tensor, flags: Tensor, head: int) -> tuple[float | None, float | None, int]:
    """(closeness, mass, rows), row by row."""
    above = below = on_pattern = 0.0
    rows = 0
    for b in range(B):
        real = flags[b].nonzero().flatten().tolist()
        ids = IDS[b, real].tolist()
        for place, i in enumerate(real):
            keys = [real[j] for j in keys_of(pattern, ids, place) if seen[b, head, i, real[j]]]
            if not keys:
                continue
            w = W[b, head, i]
            t = torch.zeros(N).index_fill(0, torch.tensor(keys), 1 / len(keys))
            above += 2 * float(w @ t)
            below += float(w @ w + t @ t)
            on_pattern += float(w[keys].sum())
            rows += 1
    return (above / below, on_pattern / rows, rows) if rows else (None, None, 0)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", MASKS)
def test_only_rows_that_see_a_key_of_the_pattern_count(name: str, pattern: str) -> None:
    torch.manual_seed(7)
    call = al.AttentionCall(*(2 * torch.randn(B, H, N, D) for _ in range(3)), **MASKS[name])
    layer = LayerTrace(call, al.Softmax(), call.q, None, "decoder", 0, "layer")
    W, seen = layer.weights(), visible(call)
    seen = torch.ones(B, H, N, N, dtype=torch.bool) if seen is None else seen.expand(B, H, N, N)
    flags = torch.ones(B, N, dtype=torch.bool) if call.key_visible is None else call.key_visible
    for row in pattern_audit([layer], IDS, patterns=[pattern], tokens=TOKENS):
        closeness, mass, rows = by_hand(pattern, W, seen, flags, row["head"])
        assert row["rows"] == rows
        assert row["of"] == int(flags.sum())
        assert row["few"] == (rows < 0.1 * row["of"])
        assert row["closeness"] == (None if closeness is None else pytest.approx(closeness, rel=1e-5))
        assert row["mass"] == (None if mass is None else pytest.approx(mass, rel=1e-5))
    if pattern == "next" and call.causal:
        assert rows == 0


def test_no_head_of_a_causal_model_follows_next() -> None:
    model = hf_zoo.build("llama")
    ids = torch.randint(3, hf_zoo.VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), al.record(model) as trace:
        model(ids)
    table = pattern_audit(trace, ids)
    assert {row["closeness"] for row in table if row["pattern"] == "next"} == {None}
    assert all(row["closeness"] is not None for row in table if row["pattern"] in ("prev", "first", "same"))
    one = Subject(trace, [str(i) for i in ids[0].tolist()], input_ids={"target": ids})
    statistics = al.explore(one, readings=("standard",)).packed.meta["items"][0]["stacks"][0]["statistics"]
    assert {name for of_layer in statistics["follows"] for name in of_layer} <= {"prev", "first", "same"}
