"""What experiments on translation share: a model's loss on held-out pairs, what it says, and how good that is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnlab.data.parallel import padded
from attnlab.models import LengthPenalty, Transformer, Translation, beam_search
from attnlab.provenance import write_atomic
from attnlab.training import Term
from papers.common.pairs import Corpus, ShapedSource

__all__ = [
    "bleu_counts",
    "bleu_of",
    "corpus_bleu",
    "held_out_nll",
    "mean_loss",
    "translate",
    "write_lines",
]


# Batches of a validation set that are looked at on the way.
LOOKED_AT = 8


@torch.no_grad()
def held_out_nll(model: Transformer, source: ShapedSource) -> float:
    """-log p of a token of the translations in the first batches, without smoothing."""
    batches = [source.batch(step) for step in range(min(LOOKED_AT, source.steps_per_epoch))]
    return float(mean_loss(model, batches, Translation(label_smoothing=0.0)))


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Iterable[Mapping[str, Tensor]], term: Term) -> Tensor:
    """A term over what it counts in all batches, while the model does not learn."""
    training, device = model.training, next(model.parameters()).device
    model.eval()
    total, count = torch.zeros((), device=device), torch.zeros((), device=device)
    for batch in ({name: t.to(device) for name, t in batch.items()} for batch in batches):
        output = model(**{name: t for name, t in batch.items() if name != "labels"})
        loss = term(model, output, batch, 0)
        total, count = total + loss.total.float(), count + torch.as_tensor(loss.count, device=device)
    model.train(training)
    return total / count


def translate(
    model: Transformer,
    corpus: Corpus,
    sources: Sequence[Any],
    *,
    beams: int,
    longest: int,
    penalty: float = 0.6,
    batch: int = 250,
) -> list[str]:
    """What the model says for each source, in their order; like lengths are searched together.

    Neither side is longer than ``longest``: of a longer source the end is read. One beam is greedy.
    """
    specials, device = corpus.tokeniser.specials, next(model.parameters()).device
    assert specials.pad is not None
    assert specials.eos is not None
    sources = [row[-(longest - 1) :] for row in sources]
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    said: dict[int, str] = {}
    for lo in range(0, len(order), batch):
        chosen = order[lo : lo + batch]
        ids = padded([torch.tensor([*sources[i], specials.eos]).numpy() for i in chosen], specials.pad).to(device)
        beams_of_rows = beam_search(
            model,
            ids,
            attention_mask=ids != specials.pad,
            eos=specials.eos,
            bos=specials.bos,
            beams=beams,
            max_new=min(longest, int(1.5 * ids.shape[1]) + 10),
            length_penalty=LengthPenalty(alpha=penalty if beams > 1 else 0.0),
        )
        said |= {i: corpus.decode(best[0].tokens) for i, best in zip(chosen, beams_of_rows, strict=True)}
    return [said[i] for i in range(len(sources))]


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """A file of one text a line; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(f"{line}\n" for line in lines))


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """SacreBLEU with its defaults (13a, mixed case)."""
    return float(_metric().corpus_score(list(hypotheses), [list(references)]).score)


def bleu_counts(hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """(sentences, 10): n-grams that are right and all of them, n = 1 to 4, and both lengths; BLEU is of their sums."""
    # The order of n-grams matters to a sentence's score alone, not to what is counted.
    metric = _metric(effective_order=True)
    scores = [metric.sentence_score(h, [r]) for h, r in zip(hypotheses, references, strict=True)]
    return np.array([[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores], np.int64)


def bleu_of(counts: np.ndarray) -> float:
    """BLEU of summed counts, as ``corpus_bleu`` has it."""
    right, total = counts[:4].astype(int).tolist(), counts[4:8].astype(int).tolist()
    bleu = _metric().compute_bleu(right, total, int(counts[8]), int(counts[9]), smooth_method="exp")
    return float(bleu.score)


def _metric(*, effective_order: bool = False) -> Any:
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise ImportError('scoring needs sacrebleu: pip install "attnlab[train]"') from error
    # Forced: outputs whose full stop stands apart are not asked about.
    return BLEU(effective_order=effective_order, force=True)
