"""Appendix A.1 of KTIW: does the probe agree with the attention that would be optimal for a linear output layer?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from attnlab.data import IGNORED
from attnlab.devices import best_device
from attnlab.dynamics import agreement, optimal_attention, random_agreement
from attnlab.provenance import write_json
from attnlab.training import load_weights
from papers.ktiw.corpora import Corpus
from papers.ktiw.models.lstm import Translator
from papers.ktiw.readings import examples, read
from papers.ktiw.study import make_model

__all__ = ["optimal_agreement"]

# The most numbers of gamma in memory at once, in double precision.
NUMBERS = 1 << 26


def optimal_agreement(corpus: Corpus, folder: Path, *, sentences: int = 128, width: int = 256) -> dict[str, Any]:
    """A(alpha_opt, beta) of the trained ``linear`` run on validation sentences, and alpha_opt's distance to optimal."""
    device = best_device()
    model = make_model(corpus, "linear", width=width)
    step = load_weights(model, folder / "linear", which="best")
    assert isinstance(model, Translator)
    model.to(device).eval()
    on = examples(corpus, "valid", count=sentences, device=device, batch=16)
    reading = read(model, on)
    weights, gaps, at = torch.zeros_like(reading.beta), [], 0
    with torch.no_grad():
        for batch in on.batches:
            mask = batch["attention_mask"].bool()
            out = model(
                batch["input_ids"], decoder_input_ids=batch["decoder_input_ids"], attention_mask=batch["attention_mask"]
            )
            # gamma_l = W h_l and gamma_s = W d_t (Eq. 33), with the output's bias in gamma_s.
            gamma = model.context(out.source.hidden) @ model.output.weight.T
            rows, places = (batch["labels"] != IGNORED).nonzero(as_tuple=True)
            size = max(1, NUMBERS // gamma[0].numel())
            for chunk in torch.arange(len(rows), device=device).split(size):
                b, t = rows[chunk], places[chunk]
                best = optimal_attention(
                    gamma[b],
                    batch["labels"][b, t],
                    bias=model.output(out.states[b, t]),
                    lengths=mask[b].sum(1),
                    tolerance=1e-4,
                    steps=1000,
                )
                weights[at : at + len(chunk), : gamma.shape[1]] = best.weights
                gaps.append(best.gap)
                at += len(chunk)
    gap = torch.cat(gaps)
    result = {
        "a_opt_beta": 100 * float(agreement(weights, reading.beta, lengths=on.lengths).nanmean()),
        "a_alpha_beta": 100 * float(agreement(reading.alpha, reading.beta, lengths=on.lengths).nanmean()),
        "a_opt_alpha": 100 * float(agreement(weights, reading.alpha, lengths=on.lengths).nanmean()),
        "a_random": 100 * float(random_agreement(weights, reading.beta, lengths=on.lengths, shuffles=5).nanmean()),
        "targets": len(gap),
        "solved": float((gap <= 1e-4).double().mean()),
        "largest_gap": float(gap.max()),
        "step": step,
    }
    write_json(folder / "optimal.json", result)
    return result
