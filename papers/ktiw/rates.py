"""Ours, beside Table 11: does the proxy become logistic regression only if it is trained at a higher rate?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attnlab.dynamics import agreement, logistic_proxy, train_proxy
from attnlab.progress import each
from papers.common.row_store import make_results, write_results
from papers.ktiw.assemble import PAPER
from papers.ktiw.config import study_config
from papers.ktiw.corpora import TITLES, Corpus
from papers.ktiw.readings import examples, proxy_rows

__all__ = ["write_proxy_rates"]

FACTORS = (1, 20)


def write_proxy_rates(corpora: Sequence[Corpus], out: Path | str, *, count: int = 1000) -> dict[str, Any]:
    """A(beta_px, beta_log) on validation texts, for the proxy trained at the paper's rate and at twenty times that."""
    rows, device = [], torch.device("cpu")
    for corpus in each([one for one in corpora if one.kind == "classification"], lambda corpus: corpus.name):
        on = examples(corpus, "valid", count=count, device=device)
        logistic = logistic_proxy(corpus.train, corpus.valid, words=corpus.vocab)
        gold = proxy_rows(logistic, on)
        paper = study_config(corpus).proxy
        for factor in FACTORS:
            proxy = replace(paper, lr=factor * paper.lr)
            fitted = train_proxy(corpus.train, corpus.valid, words=corpus.vocab, outputs=2, config=proxy)
            agreed = agreement(proxy_rows(fitted.model, on), gold, lengths=on.lengths).nanmean()
            row: dict[str, Any] = {"dataset": TITLES[corpus.name], "rate": proxy.lr, "epochs": len(fitted.losses) - 1}
            rows.append({**row, "loss": round(min(fitted.losses), 3), "a_px_log": round(100 * float(agreed), 2)})
    config = {"count": count, "factors": list(FACTORS)}
    return write_results(out, make_results("ktiw-proxy-rates", PAPER, {"rates": rows}, config=config))
