"""IBM Model 1 (Brown et al., 1993) as KTIW section 4.2 uses it, in sparse arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attnlab.dynamics.corpus import Bitext, PairTable, indexed_counts, links
from attnlab.shapes import Float, Int

__all__ = ["IBMModel1", "fit_ibm", "ibm_alpha", "ibm_beta", "translations"]


def translations(counts: PairTable) -> PairTable:
    """Trans(o | i) = C[i, o] / sum_o' C[i, o'] (Eq. 17): what one step of EM from a uniform table gives.

    >>> from attnlab.dynamics.corpus import bitext, count_table
    >>> translations(count_table(bitext([[0], [0]], [[1, 2], [1]]))).value.round(3).tolist()
    [0.667, 0.333]
    """
    return replace(counts, value=_by_source(counts.source, counts.value))


@dataclass(frozen=True)
class IBMModel1:
    """Trans after EM; ``log_likelihood[j]`` is the corpus' before step j + 1, in nats a target word with a source."""

    trans: PairTable
    log_likelihood: tuple[float, ...]
    converged: bool

    @property
    def steps(self) -> int:
        """Steps of EM; the first is the normalised count table."""
        return len(self.log_likelihood)


def fit_ibm(corpus: Bitext, *, steps: int = 100, tolerance: float = 1e-6) -> IBMModel1:
    """EM from a uniform table (Eqs. 17-19 in turn) until a step gains less than ``tolerance`` nats a word.

    Four bytes are kept for each link of a source to a target position, beside the table itself. ``tolerance=0`` runs
    all steps.
    """
    if steps < 1:
        raise ValueError(f"EM needs at least one step, got {steps}")
    counts, pair = indexed_counts(corpus)
    lengths = np.repeat(np.diff(corpus.source_at), np.diff(corpus.target_at))
    lengths = lengths[lengths > 0]
    if not len(lengths):
        return IBMModel1(counts, (), True)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    value = np.full(len(counts), 1 / len(np.unique(counts.target)))
    history: list[float] = []
    for _ in range(steps):
        beta = value[pair]
        total = np.add.reduceat(beta, starts)
        history.append(float(np.log(total / lengths).mean()))
        if len(history) > 1 and tolerance and history[-1] - history[-2] < tolerance:
            # The table that was just measured is returned; this pass made no step.
            return IBMModel1(replace(counts, value=value), tuple(history[:-1]), True)
        beta /= np.repeat(total, lengths)
        value = _by_source(counts.source, np.bincount(pair, beta, minlength=len(counts)))
    return IBMModel1(replace(counts, value=value), tuple(history), False)


def ibm_beta(trans: PairTable, corpus: Bitext) -> tuple[Float[Tensor, "rows k"], Int[Tensor, " rows"]]:
    """beta[t, l] = Trans(y_t | x_l) (Eq. 18): a row for each target position of the corpus in order, and its length L.

    With a NULL word its column comes first. A pair that never co-occurred has 0; so has an unseen word.
    """
    lengths = np.repeat(np.diff(corpus.source_at), np.diff(corpus.target_at))
    out = np.zeros((len(lengths), int(lengths.max(initial=0))))
    inside = np.arange(out.shape[1]) < lengths[:, None]
    chunks = [trans.get(source, target) for source, target, _ in links(corpus)]
    out[inside] = np.concatenate(chunks) if chunks else 0.0
    return torch.from_numpy(out), torch.from_numpy(lengths)


def ibm_alpha(trans: PairTable, corpus: Bitext) -> tuple[Float[Tensor, "rows k"], Int[Tensor, " rows"]]:
    """alpha[t, l] = beta[t, l] / sum_l' beta[t, l'] (Eq. 19); uniform where no x_l translates to y_t."""
    beta, lengths = ibm_beta(trans, corpus)
    inside = torch.arange(beta.shape[1]) < lengths[:, None]
    unknown = (beta.sum(1, keepdim=True) == 0) & inside
    beta = beta.masked_fill(unknown, 1.0)
    return beta / beta.sum(1, keepdim=True).clamp_min(torch.finfo(beta.dtype).tiny), lengths


def _by_source(source: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Values divided by their sum over each source word; the table is sorted, so a word's entries lie together."""
    if not len(value):
        return value
    starts = np.flatnonzero(np.concatenate([[True], source[1:] != source[:-1]]))
    total = np.add.reduceat(value, starts)
    return value / np.repeat(total, np.diff(np.append(starts, len(value))))
