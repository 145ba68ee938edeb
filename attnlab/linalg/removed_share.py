"""The share of each row of W that effective attention removes, from outputs and values instead of W."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from attnlab.linalg.prefix import prefix_squares, visible_counts
from attnlab.linalg.projection import column_basis, first_visible, independence_limit
from attnlab.shapes import Bool, Float

__all__ = ["RemovedShares", "removed_share_of_rows"]

# Whether a GPU computes shares beside its other work.
SIDE_STREAM = True
_STREAMS: dict[torch.device, Any] = {}


def removed_share_of_rows(
    output: Float[Tensor, "b h q e"],
    squares: Float[Tensor, "b h q"],
    v: Float[Tensor, "b g k e"],
    *,
    key_visible: Bool[Tensor, "b k"] | None,
    causal: bool,
    offset: int,
) -> Float[Tensor, "b h q"]:
    """1 - |w_perp|^2 / |w|^2 of each row w with w V = o and |w|^2 = ``squares``, V the values that its query sees.

    w_perp = o (V^T V)^+ V^T has |w_perp|^2 = o (V^T V)^+ o^T. Where a query sees no more keys than V has rank, w_perp
    is w and the share is zero. Rounding in ``output`` is amplified by the condition of V, so it comes in at least
    float32. Values are zero at keys that no query sees.

    >>> v = torch.tensor([[[[1.0], [1.0], [2.0]]]])
    >>> w = torch.tensor([[[[0.5, 0.3, 0.2]]]])
    >>> share = removed_share_of_rows(w @ v, w.square().sum(-1), v, key_visible=None, causal=False, offset=0)
    >>> share.round(decimals=4)
    tensor([[[0.3684]]])
    """
    shares = RemovedShares(v, output.shape[2], key_visible=key_visible, causal=causal, offset=offset)
    shares.start(output, squares)
    return shares.result()


class RemovedShares:
    """``removed_share_of_rows`` in steps: a GPU does what needs values, then outputs, while it does other work, too.

    That runs on a stream of its own, and ``result`` is all that waits for it: the heads whose shares are in doubt are
    done again.
    """

    def __init__(
        self,
        v: Float[Tensor, "b g k e"],
        n_q: int,
        *,
        key_visible: Bool[Tensor, "b k"] | None,
        causal: bool,
        offset: int,
    ) -> None:
        self.v, self.key_visible, self.causal, self.offset = v, key_visible, causal, offset
        self.stream = _side_stream(v) if SIDE_STREAM and v.is_cuda else None
        self.prefixes: Any = None
        self.known: Tensor | None = None
        self.ready: Any = None
        if causal and n_q > 0 and _kernel_serves(v):
            with self._aside():
                self.prefixes = _prefixes(v, n_q, key_visible, offset)

    def start(self, output: Float[Tensor, "b h q e"], squares: Float[Tensor, "b h q"]) -> None:
        """Begin with the rows."""
        self.output, self.squares = output, squares
        if self.prefixes is None or output.dtype != torch.float32:
            return
        from attnlab.kernels.removed import removed_shares

        with self._aside():
            self.known, in_doubt = removed_shares(output, squares, self.prefixes)
            in_doubt = in_doubt.amax(0)
            self.in_doubt = torch.empty(in_doubt.shape, dtype=in_doubt.dtype, pin_memory=in_doubt.is_cuda)
            self.in_doubt.copy_(in_doubt, non_blocking=True)
            self.ready = torch.cuda.current_stream(self.v.device).record_event() if self.v.is_cuda else None

    def result(self) -> Float[Tensor, "b h q"]:
        """The shares of all rows."""
        v, (output, squares) = self.v, (self.output, self.squares)
        groups, doubtful = output.shape[1] // v.shape[1], [1] * v.shape[1]
        if self.stream is not None:
            # What comes after uses the shares, and the memory of what they were made of.
            torch.cuda.current_stream(v.device).wait_stream(self.stream)
        if self.known is not None:
            if self.ready is not None:
                self.ready.synchronize()
            doubtful = self.in_doubt.tolist()
            if not any(doubtful):
                return self.known
        shares = []
        # One key/value head at a time: the rows are widened to float64.
        for g in range(v.shape[1]):
            heads = slice(g * groups, (g + 1) * groups)
            if self.known is not None and not doubtful[g]:
                shares.append(self.known[:, heads])
                continue
            kept, trivial = _kept(output[:, None, heads], v[:, g : g + 1], self.key_visible, self.causal, self.offset)
            whole = squares[:, heads]
            share = 1 - kept / whole.masked_fill(whole == 0, 1)
            shares.append(share.clamp(0, 1).masked_fill(trivial | (whole == 0), 0).to(squares.dtype))
        return torch.cat(shares, 1)

    def _aside(self) -> AbstractContextManager[Any]:
        """On the stream beside the current one, after what that was given so far."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.v.device))
        return torch.cuda.stream(self.stream)


def _side_stream(v: Tensor) -> Any:
    """One stream for each device, whose few programs start before those of the kernel that they run beside."""
    if v.device not in _STREAMS:
        _STREAMS[v.device] = torch.cuda.Stream(v.device, priority=-1)
    return _STREAMS[v.device]


def _kernel_serves(v: Tensor) -> bool:
    if not v.is_cuda or v.dtype == torch.float64:
        return False
    from attnlab.kernels import AVAILABLE

    if not AVAILABLE:
        return False
    from attnlab.kernels.removed import WIDEST

    return v.shape[-1] <= WIDEST and v.shape[2] > 0


def _prefixes(v: Tensor, n_q: int, key_visible: Tensor | None, offset: int) -> Any:
    from attnlab.kernels.removed import prefixes

    e, counts, exists = v.shape[-1], None, None
    first = v[:, :, :e]
    if key_visible is not None:
        first, exists, _ = first_visible(v, key_visible[:, None], e)
        counts = visible_counts(key_visible, n_q, offset)[1]
    limit = independence_limit(v.dtype, max(first.shape[2:]))
    return prefixes(v, (first, exists), counts, n_q, offset=offset, independent=limit)


def _kept(
    o: Float[Tensor, "b 1 r q e"], v: Float[Tensor, "b 1 k e"], key_visible: Tensor | None, causal: bool, offset: int
) -> tuple[Float[Tensor, "b r q"], Bool[Tensor, "b 1 q"]]:
    """(|w_perp|^2 of each row, whether w_perp is w) of the query heads that read one key/value head."""
    if causal and v.shape[2] and o.shape[3]:
        squares, trivial = prefix_squares(o, v, key_visible, offset)
        return squares[:, 0], trivial
    basis = column_basis(v, None if key_visible is None else key_visible[:, None])
    return (o.double() @ basis.whiten[:, :, None]).square().sum(-1)[:, 0], basis.trivial[..., None]
