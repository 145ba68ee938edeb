"""The input of every reading: a recorded layer, or weights and values with the masks of an attention call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from attnlab.attention import mask_with_bias
from attnlab.fields import expect
from attnlab.shapes import Bool, Float
from attnlab.trace import LayerTrace

__all__ = ["Masks", "ReadingInput"]


class Masks(TypedDict, total=False):
    """Which keys a query sees, as an ``AttentionCall`` says it: (b, k) flags, causal with an offset, (b, h, q, k)."""

    key_visible: Tensor | None
    causal: bool
    offset: int
    mask: Tensor | None


@dataclass(frozen=True, eq=False)
class ReadingInput:
    """One attention: a row per query (its weights, or its output), values, and which keys each query sees.

    ``ReadingInput.of`` builds and checks one; every reading takes it in place of a recorded layer.
    """

    # (b, h, q, k) or (b, h, q, e); (b, g, k, e); (b, k); (b or 1, h or 1, q, k). Plain types, so that a user's mistake
    # reaches the checks below, which say what was wrong.
    rows: Tensor
    values: Tensor
    key_visible: Tensor | None = None
    causal: bool = False
    offset: int = 0
    mask: Tensor | None = None
    # The weight of W_O as (m, h*e), where it is known.
    projection: Tensor | None = None
    # Whether a mechanism computed the weights: it has set those at hidden keys to zero.
    recorded: bool = False

    @classmethod
    def of(
        cls,
        source: LayerTrace | ReadingInput | Tensor,
        values: Tensor | None = None,
        *,
        rows: str = "weights",
        needs_values: bool = True,
        **masks: Unpack[Masks],
    ) -> ReadingInput:
        """The checked input; ``rows`` ("weights" or "output") names what ``source`` is when it is a tensor.

        A reading of the weights alone passes ``needs_values=False``, and then values may be left out.
        """
        if isinstance(source, Tensor):
            if values is None and needs_values:
                raise ValueError(f"pass a recorded layer (trace[3]), or {rows} and values; got {rows} without values")
            if values is None:
                values = source.new_zeros(source.shape[0], 1, source.shape[-1], 1)
            made = cls(source, values, **masks)
            _check(made, rows)
            return made
        masked = masks.get("key_visible") is not None or masks.get("mask") is not None
        if values is not None or masked or masks.get("causal") or masks.get("offset"):
            raise ValueError("a recorded layer brings its own values and masks; pass it alone")
        if isinstance(source, ReadingInput):
            return source
        expect("layer", source, LayerTrace, f"a recorded layer (trace[3]), or {rows} as a tensor")
        call = source.call
        made = cls(
            source.output if rows == "output" else source.weights(),
            call.v,
            call.key_visible,
            call.causal,
            call.offset,
            mask_with_bias(call),
            projection=source.projection,
            recorded=True,
        )
        _check(made, rows)
        return made

    def visible(self, lo: int = 0, hi: int | None = None) -> Bool[Tensor, "#b #h #q k"] | None:
        """Which keys queries lo to hi see, broadcastable; None when every query sees every key."""
        visible = None if self.mask is None else self.mask[:, :, lo:hi]
        if self.key_visible is not None:
            unpadded = self.key_visible[:, None, None]
            visible = unpadded if visible is None else visible & unpadded
        if self.causal:
            queries = torch.arange(self.rows.shape[2], device=self.rows.device)[lo:hi, None]
            past = torch.arange(self.values.shape[2], device=self.rows.device) <= queries + self.offset
            visible = past[None, None] if visible is None else visible & past
        return visible

    def items(self, lo: int, hi: int) -> ReadingInput:
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
        """Values with zero at keys that no query sees, so that NaN or infinity there cannot spread."""
        v = self.values
        if self.key_visible is not None:
            v = v.masked_fill(~self.key_visible[:, None, :, None], 0)
        end = self.rows.shape[2] + self.offset
        if self.causal and end < v.shape[2]:
            v = v.masked_fill((torch.arange(v.shape[2], device=v.device) >= end)[:, None], 0)
        if self.mask is not None:
            visible = self.mask.any(2)
            per_group = visible.shape[1] > 1
            visible = visible.unflatten(1, (v.shape[1], -1)).any(2) if per_group else visible
            v = v.masked_fill(~visible[..., None], 0)
        return v

    def clean_weights(self) -> Float[Tensor, "b h q k"]:
        """W with zero at hidden keys, so that NaN or infinity there cannot spread."""
        if self.recorded:
            return self.rows
        if self.causal and self.mask is None and self.key_visible is None:
            return self.rows.tril(self.offset)
        visible = self.visible()
        return self.rows if visible is None else self.rows.masked_fill(~visible, 0)


def _check(source: ReadingInput, rows: str) -> None:
    """Raise a ValueError that says what is wrong."""
    _check_tensor(rows, source.rows)
    _check_tensor("values", source.values)
    _check_fit(rows, source.rows, source.values)
    _check_masks(source)


def _check_tensor(name: str, t: Tensor) -> None:
    if not isinstance(t, Tensor) or t.dim() != 4 or not t.is_floating_point():
        came = f"{tuple(t.shape)} {t.dtype}" if isinstance(t, Tensor) else type(t).__name__
        raise ValueError(f"{name} must be a floating-point tensor (batch, heads, length, width), got {came}")
    if t.is_meta:
        raise ValueError(f"{name} is on the meta device and holds no numbers; load the model's weights first")


def _check_fit(rows: str, w: Tensor, v: Tensor) -> None:
    if w.device != v.device:
        raise ValueError(f"{rows} is on {w.device} but values are on {v.device}; move them to one device")
    last_axis, meaning = (
        (v.shape[3], "the values' width") if rows == "output" else (v.shape[2], "the number of keys")
    )  # fmt: skip
    if v.shape[0] != w.shape[0] or v.shape[1] == 0 or w.shape[1] % v.shape[1] or w.shape[3] != last_axis:
        raise ValueError(
            f"{rows} {tuple(w.shape)} and values {tuple(v.shape)} do not fit: they must share the batch, {rows}' heads "
            f"must be a multiple of the values' heads, and {rows}' last axis must be {meaning}"
        )


def _check_masks(source: ReadingInput) -> None:
    b, h, n_q, _ = source.rows.shape
    n_k = source.values.shape[2]
    flags, m = source.key_visible, source.mask
    if flags is not None and (flags.dtype != torch.bool or tuple(flags.shape) != (b, n_k)):
        raise ValueError(
            f"key_visible must be bool (batch, keys) = ({b}, {n_k}), got {flags.dtype} {tuple(flags.shape)}"
        )
    if m is not None:
        fits = m.dim() == 4 and m.shape[0] in (1, b) and m.shape[1] in (1, h) and tuple(m.shape[2:]) == (n_q, n_k)
        if m.dtype != torch.bool or not fits:
            raise ValueError(
                f"mask must be bool (batch or 1, heads or 1, q, k) = ({b}, {h}, {n_q}, {n_k}), "
                f"got {m.dtype} {tuple(m.shape)}"
            )
    if source.offset and not source.causal:
        raise ValueError(f"offset={source.offset} has no meaning without causal=True")
