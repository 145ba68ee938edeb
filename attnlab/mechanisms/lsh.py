"""LSH attention: queries see the keys that fall into their chunk, or the one before, after sorting by hash."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism, hide_unseen, query_chunks, repeat_groups, scores
from attnlab.chunks import chunk_budget
from attnlab.fields import check_fields
from attnlab.mechanisms.softmax import softmax
from attnlab.registry import register
from attnlab.shapes import Bool, Float, Int

__all__ = ["Lsh"]

CPU_CHUNK = 1 << 19


@register("lsh", examples=("lsh:r=4,rounds=2", "lsh:r=14,rounds=1"))
@dataclass(frozen=True)
class Lsh(Mechanism):
    """r = 2B keys a round: those of chunks i - 1 and i, for a query of chunk i, sorted by hash (OVA, A.1).

    A hash is argmax([-R x; R x]) with C = 2 L / B values; ties keep their order. A key found in several rounds counts
    several times before normalising. The first chunk has no predecessor, so its queries see B keys. L counts
    visible keys, so that padding changes nothing; queries have their own number and the same number of chunks. Where
    B >= L there is one chunk and attention is exact. The same R serves every head, batch and call.
    """

    r: int = 64
    rounds: int = 4
    seed: int = 0

    # Which keys a query meets depends on all the other queries.
    whole_queries = True
    exempt = dict.fromkeys(
        ("causal_outputs_ignore_the_future", "prefill_then_steps_equals_whole", "hidden_keys_change_nothing"),
        "sorting by hash places a query among all keys and queries, those it may not see too; they get no weight",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.r, bool) or not isinstance(self.r, int) or self.r < 2 or self.r % 2:
            raise ValueError(f"r must be an even int of at least 2 (two chunks of r / 2 keys), got {self.r!r}")
        if isinstance(self.rounds, bool) or not isinstance(self.rounds, int) or self.rounds < 1:
            raise ValueError(f"rounds must be an int of at least 1, got {self.rounds!r}")

    def least_bytes(self, call: AttentionCall) -> int:
        """The chunk of every query and key in every round, and the hyperplanes."""
        b, h, n_q, n_k = call.sizes
        return self.rounds * (4 * b * h * (n_q + n_k) + 16 * call.q.shape[3] * -(-n_k // self.r))

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        call = hide_unseen(call)
        return _weights(call, *_chunks(self, call))

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        call = hide_unseen(call)
        of_queries, of_keys = _chunks(self, call)
        v = repeat_groups(call.v, call.groups)
        out, lo = [], 0
        for part in query_chunks(call, CPU_CHUNK if call.q.device.type == "cpu" else 1 << 26):
            hi = lo + part.q.shape[2]
            out.append(_weights(part, of_queries[:, :, :, lo:hi], of_keys) @ v)
            lo = hi
        return torch.cat(out, dim=2)


def _weights(
    call: AttentionCall, of_queries: Int[Tensor, "t b h q"], of_keys: Int[Tensor, "t b h k"]
) -> Float[Tensor, "b h q k"]:
    """W proportional to hits times kappa: a key met in several rounds counts several times."""
    s = scores(call)
    hits = torch.zeros_like(s)
    for query_chunk, key_chunk in zip(of_queries, of_keys, strict=True):
        behind = query_chunk.unsqueeze(-1) - key_chunk.unsqueeze(-2)
        hits += (behind >= 0) & (behind <= 1)
    return softmax(s + hits.log_()).to(call.q.dtype)


@torch.no_grad()
def _chunks(mech: Lsh, call: AttentionCall) -> tuple[Int[Tensor, "t b h q"], Int[Tensor, "t b h k"]]:
    """The chunk of every query and key in every round."""
    b, _, n_q, n_k = call.sizes
    everything = torch.ones(b, n_k, dtype=torch.bool, device=call.q.device)
    keys = everything if call.key_visible is None else call.key_visible
    # In self-attention a query whose own key is hidden is padding: it takes no place among the others.
    queries = keys if n_q == n_k else torch.ones(b, n_q, dtype=torch.bool, device=call.q.device)
    half = mech.r // 2
    n_keys = keys.sum(-1)
    chunks = ((n_keys + half - 1) // half).clamp_min(1)
    most = max(1, -(-n_k // half))
    hyperplanes = _hyperplanes(mech.seed, mech.rounds, most, call.q.shape[-1]).to(call.q.device)
    of_keys, of_queries = [], []
    for R in hyperplanes:
        place = _sorted_places(_hash(repeat_groups(call.k, call.groups), R, chunks), keys)
        of_keys.append((place // half).masked_fill(~keys[:, None], -9))
        place = _sorted_places(_hash(call.q, R, chunks), queries)
        # As many chunks of queries as of keys, where there are more or fewer of them.
        place = place * n_keys[:, None, None] // queries.sum(-1).clamp_min(1)[:, None, None]
        of_queries.append((place // half).clamp_max((chunks - 1)[:, None, None]))
    return torch.stack(of_queries).int(), torch.stack(of_keys).int()


def _hash(x: Float[Tensor, "b h n d"], R: Float[Tensor, "c d"], chunks: Int[Tensor, " b"]) -> Int[Tensor, "b h n"]:
    """argmax([-R x; R x]) over the first ``chunks`` rows of R: C = 2 L / B values for a row of length L."""
    idle = (torch.arange(R.shape[0], device=x.device) >= chunks[:, None])[:, None, None, None, :]
    size = max(1, chunk_budget(CPU_CHUNK) // max(1, x.shape[0] * x.shape[1] * R.shape[0]))
    hashes = []
    for part in x.split(size, dim=2):
        projected = part.double() @ R.mT
        both = torch.stack([-projected, projected], -2).masked_fill(idle, -torch.inf)
        hashes.append(both.flatten(-2).argmax(-1))
    return torch.cat(hashes, 2)


def _sorted_places(hashes: Int[Tensor, "b h n"], real: Bool[Tensor, "b n"]) -> Int[Tensor, "b h n"]:
    """The place of each position after a stable sort by hash, padding last."""
    hashes = hashes.masked_fill(~real[:, None], torch.iinfo(hashes.dtype).max)
    return hashes.argsort(dim=-1, stable=True).argsort(dim=-1)


@functools.lru_cache(maxsize=32)
def _hyperplanes(seed: int, rounds: int, rows: int, d: int) -> Float[Tensor, "t c d"]:
    """Standard Gaussians from numpy, whose first rows do not depend on how many are asked for."""
    drawn = [np.random.default_rng([seed, t]).standard_normal((rows, d)) for t in range(rounds)]
    return torch.from_numpy(np.stack(drawn))
