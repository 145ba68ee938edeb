"""What every reading is given: a recorded layer, or weights and values with the masks of an attention call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnlab.shapes import Bool, Float
from attnlab.trace import LayerTrace

__all__ = ["Given", "given"]


@dataclass(frozen=True, eq=False)
class Given:
    """One attention: a row per query (its weights, or its output), values, and which keys each query sees."""

    # (b, h, q, k) or (b, h, q, e); (b, g, k, e); (b, k); (b or 1, h or 1, q, k). Plain types, so that a user's mistake
    # reaches the checks below, which say what was wrong.
    rows: Tensor
    values: Tensor
    key_visible: Tensor | None
    causal: bool
    offset: int
    mask: Tensor | None
    recorded: bool = False

    def seen(self, lo: int = 0, hi: int | None = None) -> Bool[Tensor, "#b #h #q k"] | None:
        """Which keys queries lo to hi see, broadcastable; None when every query sees every key."""
        seen = None if self.mask is None else self.mask[:, :, lo:hi]
        if self.key_visible is not None:
            here = self.key_visible[:, None, None]
            seen = here if seen is None else seen & here
        if self.causal:
            queries = torch.arange(self.rows.shape[2], device=self.rows.device)[lo:hi, None]
            past = torch.arange(self.values.shape[2], device=self.rows.device) <= queries + self.offset
            seen = past[None, None] if seen is None else seen & past
        return seen

    def items(self, lo: int, hi: int) -> Given:
        """Batch items lo to hi."""

        def part(t: Tensor | None) -> Tensor | None:
            return t if t is None or t.shape[0] == 1 else t[lo:hi]

        if lo <= 0 and hi >= self.rows.shape[0]:
            return self
        return replace(
            self,
            rows=self.rows[lo:hi],
            values=self.values[lo:hi],
            key_visible=part(self.key_visible),
            mask=part(self.mask),
        )

    def clean_values(self) -> Float[Tensor, "b g k e"]:
        """Values with zero at keys that no query sees, whatever stood there."""
        v = self.values
        if self.key_visible is not None:
            v = v.masked_fill(~self.key_visible[:, None, :, None], 0)
        end = self.rows.shape[2] + self.offset
        if self.causal and end < v.shape[2]:
            v = v.masked_fill((torch.arange(v.shape[2], device=v.device) >= end)[:, None], 0)
        if self.mask is not None:
            seen = self.mask.any(2)
            per_group = seen.shape[1] > 1
            seen = seen.unflatten(1, (v.shape[1], -1)).any(2) if per_group else seen
            v = v.masked_fill(~seen[..., None], 0)
        return v

    def clean_weights(self) -> Float[Tensor, "b h q k"]:
        """W with zero where nothing may be seen, whatever stood there."""
        if self.recorded:
            # Its mechanism has made these zeros itself.
            return self.rows
        if self.causal and self.mask is None and self.key_visible is None:
            return self.rows.tril(self.offset)
        seen = self.seen()
        return self.rows if seen is None else self.rows.masked_fill(~seen, 0)


def given(
    source: LayerTrace | Tensor,
    values: Tensor | None,
    *,
    key_visible: Tensor | None = None,
    causal: bool = False,
    offset: int = 0,
    mask: Tensor | None = None,
    rows: str = "weights",
) -> Given:
    """The checked input of a reading; ``rows`` names what ``source`` is when it is a tensor."""
    if isinstance(source, LayerTrace):
        if values is not None or key_visible is not None or causal or offset or mask is not None:
            raise ValueError("a recorded layer brings its own values and masks; pass it alone")
        call = source.call
        tensor = source.output if rows == "output" else source.weights()
        return _checked(Given(tensor, call.v, call.key_visible, call.causal, call.offset, call.mask, True), rows)
    if values is None:
        raise ValueError(f"pass a recorded layer (trace[3]), or {rows} and values; got {rows} without values")
    return _checked(Given(source, values, key_visible, causal, offset, mask), rows)


def _checked(g: Given, rows: str) -> Given:
    w, v = g.rows, g.values
    for name, t in ((rows, w), ("values", v)):
        if not isinstance(t, Tensor) or t.dim() != 4 or not t.is_floating_point():
            came = f"{tuple(t.shape)} {t.dtype}" if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(f"{name} must be a floating-point tensor (batch, heads, length, width), got {came}")
        if t.is_meta:
            raise ValueError(f"{name} is on the meta device and holds no numbers; load the model's weights first")
    if w.device != v.device:
        raise ValueError(f"{rows} is on {w.device} but values are on {v.device}; move them to one device")
    b, h, n_q, last = w.shape
    wanted = v.shape[3] if rows == "output" else v.shape[2]
    what = "the values' width" if rows == "output" else "the number of keys"
    if v.shape[0] != b or v.shape[1] == 0 or h % v.shape[1] or last != wanted:
        raise ValueError(
            f"{rows} {tuple(w.shape)} and values {tuple(v.shape)} do not fit: they must share the batch, {rows}' heads "
            f"must be a multiple of the values' heads, and {rows}' last axis must be {what}"
        )
    n_k = v.shape[2]
    seen = g.key_visible
    if seen is not None and (seen.dtype != torch.bool or tuple(seen.shape) != (b, n_k)):
        raise ValueError(f"key_visible must be bool (batch, keys) = ({b}, {n_k}), got {seen.dtype} {tuple(seen.shape)}")
    if g.mask is not None:
        m = g.mask
        fits = m.dim() == 4 and m.shape[0] in (1, b) and m.shape[1] in (1, h) and tuple(m.shape[2:]) == (n_q, n_k)
        if m.dtype != torch.bool or not fits:
            raise ValueError(
                f"mask must be bool (batch or 1, heads or 1, q, k) = ({b}, {h}, {n_q}, {n_k}), "
                f"got {m.dtype} {tuple(m.shape)}"
            )
    if g.offset and not g.causal:
        raise ValueError(f"offset={g.offset} has no meaning without causal=True")
    return g
