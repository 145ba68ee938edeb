"""Patterns a head may follow: Next, Prev, First, Period, Delim (AG, A.2), Same, and your own; never on padding.

A pattern's rows are kept sparse: a few positions with values, or a share of a set of columns that rows have in common.
Positions count visible tokens, so padding on the left, on the right or in between changes nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlab.errors import PythonRemedyError
from attnlab.shapes import Bool, Float, Int, Shaped
from attnlab.summaries import short_repr

__all__ = [
    "Labels",
    "SpecialTokens",
    "Targets",
    "dense",
    "overlap",
    "pattern_names",
    "pattern_targets",
    "register_pattern",
    "special_tokens",
]


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that Period and Delim look for: tokens that are a full stop, and delimiters the tokenizer adds."""

    period: tuple[int, ...] = ()
    delimiters: tuple[int, ...] = ()


class Labels(NamedTuple):
    """A pattern as labels: row i attends to the keys that have its label."""

    rows: Int[Tensor, "b q"]
    keys: Int[Tensor, "b k"]

    def __repr__(self) -> str:
        return short_repr(self)


@dataclass(frozen=True, eq=False)
class Targets:
    """Row i's target: t_ij = sum_r values_ir [positions_ir = j] + share_i [j in columns and i sees j]; rows sum to 1.

    ``share`` is above zero in uniform rows only. The axis s is 1, or the heads where a mask differs between them.
    """

    positions: Int[Tensor, "b q r"]
    values: Float[Tensor, "b s q r"]
    columns: Bool[Tensor, "b k"] | None
    share: Float[Tensor, "b s q"]
    # The same as labels of rows and keys: t_ij is above zero where they agree and i sees j, and equal at all such j.
    # Rows that spread over all they see have a label that no key has. None where labels cannot express the pattern.
    labels: Labels | None = None

    __repr__ = short_repr

    @property
    def uniform(self) -> Bool[Tensor, "b s q"]:
        """The rows that spread over ``columns``."""
        return self.share > 0

    @property
    def rows(self) -> Bool[Tensor, "b s q"]:
        """The rows that have a target; the others are left out of every loss and share."""
        return self.uniform | (self.values > 0).any(-1)

    @property
    def followed(self) -> Bool[Tensor, "b s q"]:
        """The rows in which a head can follow the pattern: a key that the pattern names is visible.

        The last row of Next and the first of Prev have no such key. Their target is uniform, which says nothing of the
        pattern; in a causal call the last row would be all that Next has.
        """
        points = (self.values > 0).any(-1)
        return points if self.positions.shape[-1] else self.uniform

    @property
    def squares(self) -> Float[Tensor, "b s q"]:
        """sum_j t_ij^2; in a uniform row of c columns that is c / c^2, its share."""
        return self.values.square().sum(-1) + self.share


def overlap(W: Float[Tensor, "b h q k"], targets: Targets) -> Float[Tensor, "b h q"]:
    """sum_j t_ij w_ij, from the weights at the pattern's positions alone."""
    at = W.gather(3, targets.positions[:, None].expand(-1, W.shape[1], -1, -1))
    at_positions = (targets.values.to(W) * at).sum(-1)
    if targets.columns is None:
        return at_positions
    # W is zero where a query sees nothing, so the columns need not be cut row by row.
    return at_positions + targets.share.to(W) * (W @ targets.columns[:, None, :, None].to(W)).squeeze(-1)


def dense(
    targets: Targets, *, keys: int, visible: Bool[Tensor, "#b #h #q k"] | None = None
) -> Float[Tensor, "b s q k"]:
    """The targets as a matrix, for pictures and tests; ``visible`` cuts uniform rows (``attention.visible(call)``).

    >>> dense(pattern_targets("next", torch.tensor([[7, 8, 9]])), keys=3)[0, 0, 1].tolist()
    [0.0, 0.0, 1.0]
    """
    values = targets.values
    t = values.new_zeros(*values.shape[:3], keys)
    t = t.scatter_add(3, targets.positions[:, None].expand_as(values), values)
    if targets.columns is not None:
        spread = targets.share.unsqueeze(-1) * targets.columns[:, None, None, :]
        t = t + (spread if visible is None else spread * visible)
    return t


@dataclass(frozen=True, eq=False)
class _Text:
    """What a pattern is drawn from: the keys' ids, the queries' ids and places among their own visible tokens."""

    ids: Int[Tensor, "b k"]
    visible: Bool[Tensor, "b k"]
    query_ids: Int[Tensor, "b q"] | None
    places: Int[Tensor, "b q"]
    tokens: SpecialTokens

    @property
    def length(self) -> Int[Tensor, "b 1"]:
        return self.visible.sum(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class _Drawn:
    """A pattern before it is cut to what each row sees and normalised."""

    positions: Int[Tensor, "b q r"] | None = None
    values: Float[Tensor, "b q r"] | None = None
    columns: Bool[Tensor, "b k"] | None = None
    uniform: Bool[Tensor, "b q"] | None = None
    labels: Labels | None = None


_Draw = Callable[[_Text], _Drawn]


def _shifted(shift: int) -> _Draw:
    def draw(text: _Text) -> _Drawn:
        place = text.places + shift
        inside = (place >= 0) & (place < text.length)
        # The visible keys first and in order: the place-th of them.
        order = (~text.visible).to(torch.int8).argsort(dim=-1, stable=True)
        at = order.gather(1, place.clamp(0, max(order.shape[1] - 1, 0)))
        return _pointing(at, inside, columns=text.visible, uniform=~inside, keys=text.ids)

    return draw


def _first(text: _Text) -> _Drawn:
    at = text.visible.to(torch.int8).argmax(-1, keepdim=True).expand_as(text.places)
    return _pointing(at, torch.ones_like(at, dtype=torch.bool), keys=text.ids)


def _pointing(
    at: Int[Tensor, "b q"],
    there: Bool[Tensor, "b q"],
    *,
    keys: Int[Tensor, "b k"],
    columns: Bool[Tensor, "b k"] | None = None,
    uniform: Bool[Tensor, "b q"] | None = None,
) -> _Drawn:
    """Each row attends to one key, where it is ``there``."""
    places = torch.arange(keys.shape[1], device=keys.device).expand_as(keys)
    labels = Labels(at.masked_fill(~there, -1), places)
    return _Drawn(at.unsqueeze(-1), there.unsqueeze(-1).float(), columns, uniform, labels)


def _spreading(columns: Bool[Tensor, "b k"], text: _Text) -> _Drawn:
    """Every row attends to the same keys, evenly."""
    return _Drawn(columns=columns, labels=Labels(torch.ones_like(text.places), columns.long()))


def _period(text: _Text) -> _Drawn:
    if not text.tokens.period:
        raise PythonRemedyError(
            "the pattern 'period' needs to know the full stop, and this tokenizer has no such token: leave it out",
            remedy="or pass tokens=SpecialTokens(period=(id,))",
        )
    return _spreading(_among(text.ids, text.tokens.period), text)


def _delim(text: _Text) -> _Drawn:
    if not text.tokens.delimiters:
        raise PythonRemedyError(
            "the pattern 'delim' needs to know the delimiters, and this tokenizer adds none: leave it out",
            remedy="or pass tokens=SpecialTokens(delimiters=(id, ...))",
        )
    return _spreading(_among(text.ids, text.tokens.delimiters), text)


def _same(text: _Text) -> _Drawn:
    """Uniform over the visible tokens with the row's own id, itself included; sorted, so no n x n matrix is made."""
    if text.query_ids is None:
        raise ValueError("the pattern 'same' compares a query's token with the keys'; in cross-attention pass queries=")
    ids = text.ids.masked_fill(~text.visible, -1)
    in_order, order = ids.sort(dim=-1, stable=True)
    wanted = text.query_ids.contiguous()
    start = torch.searchsorted(in_order, wanted)
    count = torch.searchsorted(in_order, wanted, right=True) - start
    # Rows of padding have no target, however often their id occurs.
    most = int(count.max()) if count.numel() else 0
    nth = torch.arange(most, device=ids.device)
    at = (start.unsqueeze(-1) + nth).clamp(max=max(ids.shape[1] - 1, 0))
    positions = order.gather(1, at.flatten(1)).view_as(at)
    # Hidden keys have the label -1, which is no id.
    return _Drawn(positions, (nth < count.unsqueeze(-1)).float(), labels=Labels(wanted, ids))


_patterns: dict[str, _Draw] = {
    "next": _shifted(1),
    "prev": _shifted(-1),
    "first": _first,
    "period": _period,
    "delim": _delim,
    "same": _same,
}


def pattern_names() -> list[str]:
    """Every pattern's name, the paper's first."""
    return list(_patterns)


def register_pattern(name: str, pattern: Callable[[Tensor], Tensor] | Tensor) -> None:
    """Make your own pattern known by name: a matrix, or a function of the keys' token ids (b, k).

    A matrix is (q, k) or (b, q, k) and not negative; its rows are made to sum to 1, and a row of zeros has no target.
    A function may return such a matrix, a bool (b, k) (every row spreads over these keys), or an int (b, q) (the one
    key of each row, -1 for none); the last two stay sparse.
    """
    if name in _patterns:
        raise ValueError(f"the pattern name {name!r} is taken; choose another than {', '.join(_patterns)}")
    if not (isinstance(pattern, Tensor) or callable(pattern)):
        raise ValueError(f"a pattern is a matrix or a function of token ids, got {type(pattern).__name__}")

    def draw(text: _Text) -> _Drawn:
        drawn = pattern if isinstance(pattern, Tensor) else pattern(text.ids)
        return _from_user(name, drawn.to(text.ids.device), text)

    _patterns[name] = draw


def special_tokens(tokenizer: Any) -> SpecialTokens:
    """The full stops and delimiters of a Hugging Face tokenizer; padding, mask and unknown are no delimiters."""
    vocabulary = tokenizer.get_vocab()
    stops = (vocabulary[text] for text in (".", "Ġ.", "▁.", "##.") if text in vocabulary)
    names = ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id")
    ends = {getattr(tokenizer, name, None) for name in names}
    others = {getattr(tokenizer, name, None) for name in ("pad_token_id", "mask_token_id", "unk_token_id")}
    return SpecialTokens(tuple(stops), tuple(sorted(i for i in ends - others if i is not None)))


def pattern_targets(
    name: str,
    input_ids: Int[Tensor, "b k"],
    *,
    attention_mask: Shaped[Tensor, "b k"] | None = None,
    causal: bool = False,
    offset: int = 0,
    mask: Bool[Tensor, "#b #h q k"] | None = None,
    queries: Int[Tensor, "b q"] | None = None,
    query_mask: Shaped[Tensor, "b q"] | None = None,
    tokens: SpecialTokens | None = None,
) -> Targets:
    """The pattern ``name`` over a padded batch, cut to what each row sees and renormalised (AG, A.2).

    The last row of Next and the first of Prev are 1/n over the n visible tokens. A row of padding has no target, nor
    has one that sees nothing of its pattern: no full stop in the text, or Next in a decoder. In cross-attention
    ``queries`` are the decoder's ids, and the p-th query's Next is the p+1-th key, uniform where there is none.
    """
    if name not in _patterns:
        close = difflib.get_close_matches(name, _patterns, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"no pattern named {name!r}; {hint}the patterns are {', '.join(_patterns)}")
    visible = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if queries is None:
        query_ids, rows = input_ids[:, offset:], visible[:, offset:]
        places = (visible.cumsum(-1) - 1)[:, offset:]
    else:
        query_ids, rows = queries, torch.ones_like(queries, dtype=torch.bool)
        rows = rows if query_mask is None else query_mask.bool()
        places = rows.cumsum(-1) - 1
    drawn = _patterns[name](_Text(input_ids, visible, query_ids, places, tokens or SpecialTokens()))
    return _cut(drawn, visible, rows, offset if causal else None, mask)


def _cut(drawn: _Drawn, visible: Tensor, rows: Tensor, offset: int | None, mask: Tensor | None) -> Targets:
    """Nothing on padding, after the row's own place (``offset`` is not None: causal), or outside ``mask``."""
    b, n_q = rows.shape
    last = None if offset is None else torch.arange(n_q, device=rows.device) + offset
    positions, values = drawn.positions, drawn.values
    if positions is None or values is None:
        positions = torch.zeros(b, n_q, 0, dtype=torch.long, device=rows.device)
        values = positions.float()
    keep = visible.gather(1, positions.flatten(1)).view_as(positions) & rows.unsqueeze(-1)
    if last is not None:
        keep = keep & (positions <= last[:, None])
    values = (values * keep).unsqueeze(1)
    if mask is not None:
        mask = mask.expand(b, -1, -1, -1)
        values = values * mask.gather(3, positions[:, None].expand(-1, mask.shape[1], -1, -1))
    total = values.sum(-1, keepdim=True)
    values = values / total.masked_fill(total == 0, 1)
    if drawn.columns is None:
        return Targets(positions, values, None, values.new_zeros(values.shape[:3]), drawn.labels)
    columns = drawn.columns & visible
    if mask is not None:
        seen = mask & columns[:, None, None, :]
        if last is not None:
            seen = seen & (torch.arange(visible.shape[1], device=rows.device) <= last[:, None])
        count = seen.sum(-1)
    elif last is not None:
        count = columns.cumsum(-1)[:, last.clamp(max=max(visible.shape[1] - 1, 0))].unsqueeze(1)
    else:
        count = columns.sum(-1)[:, None, None].expand(b, 1, n_q)
    spread = (rows if drawn.uniform is None else rows & drawn.uniform).unsqueeze(1) & (count > 0)
    return Targets(positions, values, columns, spread.float() / count.clamp(min=1), drawn.labels)


def _from_user(name: str, pattern: Tensor, text: _Text) -> _Drawn:
    b, n_k = text.ids.shape
    n_q = text.places.shape[1]
    if pattern.dtype == torch.bool and pattern.shape == (b, n_k):
        return _spreading(pattern, text)
    if pattern.shape == (b, n_q) and not pattern.dtype.is_floating_point and pattern.dtype != torch.bool:
        if pattern.numel() and int(pattern.max()) >= n_k:
            raise ValueError(f"pattern {name!r} points at key {int(pattern.max())}, and there are {n_k} keys")
        return _pointing(pattern.long().clamp(min=0), pattern >= 0, keys=text.ids)
    if pattern.shape not in ((n_q, n_k), (b, n_q, n_k)):
        raise ValueError(
            f"pattern {name!r} must be a matrix (q, k) = ({n_q}, {n_k}) or (b, q, k) = ({b}, {n_q}, {n_k}), a bool "
            f"(b, k) or an int (b, q), got {pattern.dtype} of shape {tuple(pattern.shape)}"
        )
    matrix = pattern.float().expand(b, n_q, n_k)
    if not bool(((matrix >= 0) & matrix.isfinite()).all()):
        raise ValueError(f"pattern {name!r} must be finite and not negative")
    return _Drawn(torch.arange(n_k, device=pattern.device).expand(b, n_q, n_k), matrix)


def _among(ids: Int[Tensor, "b k"], wanted: tuple[int, ...]) -> Bool[Tensor, "b k"]:
    # No tensor of the wanted ids: copying it to a GPU would block the host.
    among = torch.zeros_like(ids, dtype=torch.bool)
    for one in wanted:
        among = among | (ids == one)
    return among
