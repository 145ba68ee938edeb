"""Patterns against A.2 written out by hand, over padded batches, causal and cross."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attnlab import patterns
from attnlab.patterns import SpecialTokens, dense, overlap, pattern_names, pattern_targets, register_pattern
from tests.tolerance import assert_close

STOP, BEGIN, END, PAD = 9, 1, 2, 0
TOKENS = SpecialTokens(period=(STOP,), delimiters=(BEGIN, END))
# "<s> Welcome to EMNLP . </s>", Figure 4.
FIGURE_4 = torch.tensor([[BEGIN, 4, 5, 6, STOP, END]])
BUILT_IN = ["next", "prev", "first", "period", "delim", "same"]


def by_definition(name: str, ids: list[int]) -> Tensor:
    """P[name] of A.2, cell by cell, for one text without padding."""
    n = len(ids)
    P = torch.zeros(n, n)
    for p in range(n):
        for q in range(n):
            if name == "next":
                P[p, q] = 1 / n if p == n - 1 else float(q == p + 1)
            elif name == "prev":
                P[p, q] = 1 / n if p == 0 else float(q == p - 1)
            elif name == "first":
                P[p, q] = float(q == 0)
            elif name == "period":
                P[p, q] = (ids[q] == STOP) / max(1, ids.count(STOP))
            elif name == "delim":
                P[p, q] = (ids[q] in (BEGIN, END)) / max(1, ids.count(BEGIN) + ids.count(END))
            elif name == "same":
                P[p, q] = (ids[q] == ids[p]) / ids.count(ids[p])
    return P


def padded(ids: list[int], keep: list[int]) -> tuple[Tensor, Tensor]:
    """(ids with padding where ``keep`` is 0, the mask)."""
    text = iter(ids)
    return torch.tensor([[next(text) if k else PAD for k in keep]]), torch.tensor([keep])


def prefix(n: int) -> Tensor:
    return torch.ones(1, 1, n, n, dtype=torch.bool).tril()


@pytest.fixture
def _own_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_patterns", dict(patterns._patterns))


@pytest.mark.parametrize("name", BUILT_IN)
def test_figure_4(name: str) -> None:
    t = pattern_targets(name, FIGURE_4, tokens=TOKENS)
    assert_close(dense(t, keys=6)[0, 0], by_definition(name, FIGURE_4[0].tolist()))
    assert t.rows.all()
    assert t.positions.shape[-1] <= 1


def test_boundary_rows_are_uniform() -> None:
    t = pattern_targets("next", FIGURE_4)
    assert t.uniform[0, 0].tolist() == [False] * 5 + [True]
    assert t.share[0, 0, 5].item() == pytest.approx(1 / 6)
    assert pattern_targets("prev", FIGURE_4).uniform[0, 0].tolist() == [True] + [False] * 5


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(
    "keep",
    [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 1, 1, 1]],
    ids=["left", "right", "middle", "both"],
)
def test_padding_is_as_if_it_were_not_there(name: str, keep: list[int]) -> None:
    text = [BEGIN, 5, STOP, 5, END]
    ids, mask = padded(text, keep)
    targets = dense(pattern_targets(name, ids, attention_mask=mask, tokens=TOKENS), keys=7)[0, 0]
    seen = mask[0].bool()
    assert_close(targets[seen][:, seen], by_definition(name, text))
    assert targets[~seen].abs().sum() == 0
    assert targets[:, ~seen].abs().sum() == 0


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_batch_is_its_texts(name: str) -> None:
    ids = torch.tensor([[PAD, PAD, BEGIN, 5, STOP], [BEGIN, 7, 7, 7, END], [4, STOP, PAD, PAD, PAD]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    whole = dense(pattern_targets(name, ids, attention_mask=mask, tokens=TOKENS), keys=5)
    for i in range(3):
        one = pattern_targets(name, ids[i : i + 1], attention_mask=mask[i : i + 1], tokens=TOKENS)
        assert_close(whole[i : i + 1], dense(one, keys=5))


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("by_mask", [False, True])
def test_a_decoder_sees_the_prefix_renormalised(name: str, by_mask: bool) -> None:
    text = [4, STOP, 4, 4, STOP, END, 5]
    expected = by_definition(name, text).tril()
    total = expected.sum(-1, keepdim=True)
    expected = expected / total.masked_fill(total == 0, 1)
    n = len(text)
    how = {"mask": prefix(n)} if by_mask else {"causal": True}
    targets = pattern_targets(name, torch.tensor([text]), tokens=TOKENS, **how)
    assert_close(dense(targets, keys=n, visible=prefix(n))[0, 0], expected)
    assert targets.rows[0, 0].tolist() == (total[:, 0] > 0).tolist()


def test_next_in_a_decoder_has_a_target_in_the_last_row_only() -> None:
    assert pattern_targets("next", FIGURE_4, causal=True).rows[0, 0].tolist() == [False] * 5 + [True]


def test_cached_decoding_is_the_last_rows() -> None:
    whole = pattern_targets("same", torch.tensor([[4, 7, 4, 7, 7]]), causal=True)
    last = pattern_targets("same", torch.tensor([[4, 7, 4, 7, 7]]), causal=True, offset=3)
    assert_close(dense(last, keys=5), dense(whole, keys=5)[:, :, 3:])


def test_cross_attention_pairs_places() -> None:
    keys, mask = torch.tensor([[PAD, 5, 6, 7]]), torch.tensor([[0, 1, 1, 1]])
    t = pattern_targets("next", keys, attention_mask=mask, queries=torch.tensor([[3, 3, 3, 3, 0]]),
                        query_mask=torch.tensor([[1, 1, 1, 1, 0]]))  # fmt: skip
    third = 1 / 3
    rows = [[0, 0, 1, 0], [0, 0, 0, 1], [0, third, third, third], [0, third, third, third], [0, 0, 0, 0]]
    assert_close(dense(t, keys=4)[0, 0], torch.tensor(rows))


def test_masks_that_differ_between_heads() -> None:
    mask = torch.ones(1, 2, 6, 6, dtype=torch.bool)
    mask[0, 1, :, 0] = False
    t = pattern_targets("delim", FIGURE_4, mask=mask, tokens=TOKENS)
    assert dense(t, keys=6, visible=mask)[0, :, 3].tolist() == [[0.5, 0, 0, 0, 0, 0.5], [0, 0, 0, 0, 0, 1]]
    assert pattern_targets("first", FIGURE_4, mask=mask).rows.all(-1).tolist() == [[True, False]]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("causal", [False, True])
def test_overlap_is_the_dense_product(name: str, causal: bool) -> None:
    ids, mask = padded([BEGIN, 5, STOP, 5, END], [1, 0, 1, 1, 0, 1, 1])
    seen = mask.bool()[:, None, None, :] & (prefix(7) if causal else torch.tensor(True))
    W = torch.rand(1, 3, 7, 7, dtype=torch.float64) * seen
    t = pattern_targets(name, ids, attention_mask=mask, causal=causal, tokens=TOKENS)
    assert_close(overlap(W, t), (W * dense(t, keys=7, visible=seen.expand(1, 1, 7, 7))).sum(-1), dtype=torch.float32)


@pytest.mark.usefixtures("_own_patterns")
def test_patterns_of_your_own() -> None:
    ids = torch.tensor([[4, 5, 6, PAD]])
    mask = torch.tensor([[1, 1, 1, 0]])
    register_pattern("matrix", torch.tensor([[3.0, 1, 0, 4], [0, 0, 0, 4], [0, 0, 0, 0], [1, 1, 1, 1]]))
    register_pattern("even", lambda ids: ids % 2 == 0)
    register_pattern("second", lambda ids: torch.tensor([[1, -1, 1, 1]]))
    register_pattern("drawn", lambda ids: torch.eye(ids.shape[1]).expand(len(ids), -1, -1))

    def targets(name: str) -> list[list[float]]:
        return dense(pattern_targets(name, ids, attention_mask=mask), keys=4)[0, 0].tolist()

    nothing = [0.0] * 4
    assert targets("matrix") == [[0.75, 0.25, 0, 0], nothing, nothing, nothing]
    assert targets("even") == [[0.5, 0, 0.5, 0]] * 3 + [nothing]
    assert targets("second") == [[0, 1, 0, 0], nothing, [0, 1, 0, 0], nothing]
    assert targets("drawn") == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], nothing]
    assert pattern_names()[-4:] == ["matrix", "even", "second", "drawn"]


@pytest.mark.usefixtures("_own_patterns")
def test_bad_patterns_of_your_own() -> None:
    with pytest.raises(ValueError, match="'next' is taken"):
        register_pattern("next", torch.eye(3))
    register_pattern("wide", torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"\(q, k\) = \(6, 6\).*got torch.float32 of shape \(2, 3\)"):
        pattern_targets("wide", FIGURE_4)
    register_pattern("negative", -torch.eye(6))
    with pytest.raises(ValueError, match="not negative"):
        pattern_targets("negative", FIGURE_4)
    register_pattern("beyond", lambda ids: torch.full_like(ids, 6))
    with pytest.raises(ValueError, match="points at key 6, and there are 6 keys"):
        pattern_targets("beyond", FIGURE_4)


def test_a_misspelt_name_is_told_the_names() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'prev'.*next, prev, first, period, delim, same"):
        pattern_targets("perv", FIGURE_4)


@pytest.mark.parametrize("name", ["period", "delim"])
def test_a_tokenizer_without_the_token(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' needs to know .* this tokenizer .* pass tokens="):
        pattern_targets(name, FIGURE_4, tokens=SpecialTokens())


def test_a_text_without_the_token_has_no_targets() -> None:
    t = pattern_targets("period", torch.tensor([[4, 5], [4, STOP]]), tokens=TOKENS)
    assert t.rows[:, 0].tolist() == [[False, False], [True, True]]


@pytest.mark.parametrize("name", ["next", "prev", "first", "same"])
def test_length_one_attends_to_itself(name: str) -> None:
    assert dense(pattern_targets(name, torch.tensor([[4]])), keys=1).tolist() == [[[[1.0]]]]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_only_has_no_target(name: str, causal: bool) -> None:
    ids = torch.full((2, 5), PAD)
    t = pattern_targets(name, ids, attention_mask=torch.zeros(2, 5), causal=causal, tokens=TOKENS)
    assert not t.rows.any()
    assert dense(t, keys=5).abs().sum() == 0


def test_special_tokens_of_a_tokenizer() -> None:
    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, ".": 4, "Ġ.": 5, "a": 6}
    tokenizer = SimpleNamespace(
        get_vocab=lambda: vocabulary, cls_token_id=1, sep_token_id=2, bos_token_id=None, pad_token_id=0, mask_token_id=3
    )
    assert patterns.special_tokens(tokenizer) == SpecialTokens(period=(4, 5), delimiters=(1, 2))
