"""ABC_MLP in float64 from its equations, and the kernels held against it: outputs, states and every gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from attnlab.kernels.abc import abc_attention

EMPTY = -1e30
# Relative errors, ||a - b|| / ||b||. Control logits of larger scale put one key into a slot, and then their gradient
# is a difference of nearly equal terms.
BOUND = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
LOGITS_BOUND = {torch.float32: 1e-5, torch.float16: 1.5e-2, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Case:
    """One call of the kernels: sizes, the scale of the control logits, and its other arguments."""

    d: int = 32
    slots: int = 8
    length: int = 37
    batch: int = 1
    heads: int = 2
    groups: int = 1
    keys: int | None = None
    scale: float = 1.0
    causal: bool = True
    masked: bool = False
    started: bool = False
    ended: bool = False
    packed: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


def dense(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, *, causal: bool, seen: Tensor | None, state: tuple[Tensor, ...] | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Eqs. 3-5 and Appendix B.1 with every exp(s_i - z_t) written out."""
    (b, h, n_q, d), (g, n_k), n = q.shape, k.shape[1:3], s.shape[3]
    if seen is not None:
        s = s.masked_fill(~seen[:, None, :, None], EMPTY)
        k, v = (t.masked_fill(~seen[:, None, :, None], 0) for t in (k, v))
    if state is None:
        state = (q.new_zeros(b, g, n, d), q.new_zeros(b, g, n, d), q.new_full((b, g, n), EMPTY))
    logs = torch.cat([state[2].unsqueeze(2), s], 2)
    z = logs.logcumsumexp(2)[:, :, 1:] if causal else logs.logsumexp(2, keepdim=True)
    phi = (s.unsqueeze(2) - z.unsqueeze(3)).clamp(max=0).exp() * (s > EMPTY / 2).unsqueeze(2)
    if causal:
        phi = phi * torch.ones(n_q, n_k, dtype=torch.bool, device=q.device).tril()[:, :, None]
    past = ((state[2].unsqueeze(2) - z).exp() * (state[2] > EMPTY / 2).unsqueeze(2)).unsqueeze(-1)
    memory_k = torch.einsum("bgtin,bgid->bgtnd", phi, k) + past * state[0].unsqueeze(2)
    memory_v = torch.einsum("bgtin,bgid->bgtnd", phi, v) + past * state[1].unsqueeze(2)
    each = [t.repeat_interleave(h // g, 1) for t in (memory_k, memory_v, z)]
    scores = d**-0.5 * torch.einsum("bhtd,bhtnd->bhtn", q, each[0].expand(-1, -1, n_q, -1, -1))
    empty = each[2] <= EMPTY / 2
    p = scores.masked_fill(empty, EMPTY).softmax(-1).masked_fill(empty, 0)
    out = torch.einsum("bhtn,bhtnd->bhtd", p, each[1].expand(-1, -1, n_q, -1, -1))
    return out, (memory_k[:, :, -1], memory_v[:, :, -1], z[:, :, -1])


def inputs(case: Case, seed: int = 0) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """q, k, v, control and the first state if there is one; the visible keys; where packed sequences begin."""
    generator = torch.Generator(case.device).manual_seed(seed)
    n_k = case.length if case.keys is None else case.keys
    rows = len(case.packed) or case.batch

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=case.device)

    made = [normal(case.batch, case.heads, case.length, case.d)]
    made += [normal(case.batch, case.groups, n_k, case.d) for _ in range(2)]
    made.append(case.scale * normal(case.batch, case.groups, n_k, case.slots))
    made = [t.to(case.dtype) for t in made]
    if case.started:
        made += [normal(rows, case.groups, case.slots, case.d) for _ in range(2)]
        made.append(case.scale * normal(rows, case.groups, case.slots))
    seen = None
    if case.masked:
        seen = torch.rand(case.batch, n_k, generator=generator, device=case.device) > 0.3
        # Rows that see nothing yet.
        seen[:, :3] = False
    bounds = None
    if case.packed:
        assert (sum(case.packed), case.batch) == (case.length, 1)
        bounds = torch.tensor([0, *case.packed], device=case.device).cumsum(0).to(torch.int32)
    return [t.requires_grad_() for t in made], seen, bounds


def errors(case: Case, seed: int = 0) -> dict[str, float]:
    """Relative errors against float64 of the output, the last state and every gradient."""
    ours, seen, bounds = inputs(case, seed)
    theirs = [t.detach().double().requires_grad_() for t in ours]
    if case.masked:
        with torch.no_grad():
            # Hidden tokens may be NaN.
            for t in ours[1:4]:
                t[(~seen)[:, None].expand(t.shape[:3])] = torch.nan
    state = (ours[4], ours[5], ours[6]) if case.started else None
    out, last = abc_attention(
        *ours[:4], causal=case.causal, key_visible=seen, cu_seqlens=bounds, state=state
    )  # fmt: skip
    with torch.no_grad():
        # Without gradients other kernels read.
        alone, _ = abc_attention(*ours[:4], causal=case.causal, key_visible=seen, cu_seqlens=bounds, state=state)
    expected, end = _packed(case, theirs) if case.packed else dense(
        *theirs[:4], causal=case.causal, seen=seen, state=tuple(theirs[4:]) or None
    )  # fmt: skip
    generator = torch.Generator(case.device).manual_seed(seed + 1)
    pull = [torch.randn(t.shape, generator=generator, device=case.device) for t in (out, *last)]
    ours_loss, their_loss = (out * pull[0].to(out.dtype)).sum(), (expected * pull[0].to(out.dtype).double()).sum()
    if case.ended:
        for got, want, by in zip(last, end, pull[1:], strict=True):
            ours_loss, their_loss = ours_loss + (got * by).sum(), their_loss + (want * by.double()).sum()
    names = ("dq", "dk", "dv", "ds", "first K", "first V", "first z")
    gradients = zip(torch.autograd.grad(ours_loss, ours), torch.autograd.grad(their_loss, theirs), strict=True)
    pairs: dict[str, tuple[Any, Any]] = {"out": (out, expected), "out alone": (alone, expected)}
    pairs |= {f"last {name}": pair for name, pair in zip("KVz", zip(last, end, strict=True), strict=True)}
    pairs |= dict(zip(names, gradients, strict=False))
    result = {name: relative(got, want) for name, (got, want) in pairs.items()}
    if case.started:
        # dz = dK K + dV V - c is a difference that may nearly vanish: errors are relative to its terms.
        (_, dk), (_, dv), (got, want) = pairs["first K"], pairs["first V"], pairs["first z"]
        terms = (dk * theirs[4]).sum(-1).norm() + (dv * theirs[5]).sum(-1).norm()
        result["first z"] = ((got.double() - want).norm() / torch.maximum(terms, want.norm())).item()
    return result


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is full of NaN: as bytes, 255 is NaN in any dtype."""
    kept = torch.empty, torch.empty_like

    def full(make: Any) -> Any:
        def made(*args: Any, **how: Any) -> Tensor:
            t: Tensor = make(*args, **how)
            return t.fill_(torch.nan if t.is_floating_point() else 255 if t.dtype == torch.uint8 else 0)

        return made

    torch.empty, torch.empty_like = map(full, kept)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = kept


def relative(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; where nothing is expected, ||got|| itself."""
    norm = want.norm().item()
    return (got.double() - want.double()).norm().item() / (norm if norm > 1e-12 else 1.0)


def bound(name: str, case: Case) -> float:
    """What the error of an output, a state or a gradient must be below."""
    return (LOGITS_BOUND if name in ("ds", "first z") and case.scale > 1 else BOUND)[case.dtype]


def check(case: Case, seed: int = 0) -> None:
    """Raise unless every error is below its bound; NaN never is."""
    relative_errors = errors(case, seed)
    for name, error in relative_errors.items():
        assert error < bound(name, case), f"{case}: {name} is off by {error:.1e}, {relative_errors}"


def _packed(case: Case, made: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Each sequence by itself."""
    outs, ends, begin = [], [], 0
    for i, length in enumerate(case.packed):
        state = tuple(t[i : i + 1] for t in made[4:]) or None
        rows = [t[:, :, begin : begin + length] for t in made[:4]]
        begin += length
        if length == 0:
            assert state is not None
            ends.append(state)
            continue
        out, end = dense(*rows, causal=case.causal, seen=None, state=state)
        outs.append(out)
        ends.append(end)
    return torch.cat(outs, 2), tuple(torch.cat([end[j] for end in ends]) for j in range(3))
