"""OVA's causal task: one small language model per kernel, trained alike, then with its attention approximated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.adapters import swap
from attnlab.data import IGNORED, Blocks, CausalSource, TokenStore
from attnlab.data.tokenisers import WordTokeniser
from attnlab.devices import best_device
from attnlab.measure import parameter_count
from attnlab.models import Transformer, named_config
from attnlab.models.losses import CausalLM
from attnlab.training import Recipe, Schedule
from papers.value_aware.config import ValueAwareConfig
from papers.value_aware.training import PartRun, fit, on_device, uncompiled

__all__ = ["EXACT", "Score", "causal_loss", "causal_model", "kernel_specs", "run_lm", "sliding_windows"]

EXACT = {"exp": "softmax", "poly": "kernel:poly,degree=2", "elu": "kernel:elu"}
Windows = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Score:
    """-log p summed over the predicted tokens, and how many they are."""

    nll: float
    tokens: int

    @property
    def loss(self) -> float:
        """The mean, in nats per token."""
        return self.nll / self.tokens

    def perplexity(self, count: int | None = None) -> float:
        """exp of the mean over ``count`` units, such as words; by default over tokens."""
        return math.exp(min(700.0, self.nll / (self.tokens if count is None else count)))


def causal_model(config: ValueAwareConfig, kernel: str, *, vocab: int) -> Transformer:
    """The paper's model (A.2) in our vocabulary, from the config's seed: the same for every kernel."""
    torch.manual_seed(config.seed)
    return Transformer(
        replace(
            named_config("value-aware-lm"),
            vocab=vocab,
            layers=config.lm_layers,
            width=config.lm_width,
            heads=config.lm_heads,
            hidden=4 * config.lm_width,
            max_length=config.lm_length,
            dropout=config.lm_dropout,
            causal_attention=EXACT[kernel],
        )
    )


def kernel_specs(kernel: str, r: int | str) -> tuple[str, str]:
    """The value-oblivious and the value-aware mechanism with r keys of this kernel."""
    of_kernel = {"exp": "", "poly": ",kernel=poly,degree=2", "elu": ",kernel=elu"}[kernel]
    return f"top-r:r={r}{of_kernel}", f"value-aware:r={r}{of_kernel}"


def sliding_windows(
    store: TokenStore, eos: int, *, length: int, context: int, unknown: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Windows over the documents, each followed by </s>; each token is a label once, after at least ``context`` others.

    Only labels of the first window have fewer. The token ``unknown`` is never a label.

    >>> store = TokenStore(np.arange(10, 18), np.array([0, 8]))
    >>> tokens, labels = sliding_windows(store, 2, length=5, context=3)
    >>> tokens.tolist()
    [[10, 11, 12, 13, 14], [12, 13, 14, 15, 16], [14, 15, 16, 17, 2]]
    >>> labels.tolist()
    [[-100, 11, 12, 13, 14], [-100, -100, -100, 15, 16], [-100, -100, -100, 17, 2]]
    """
    stream = np.concatenate([np.append(np.asarray(store[i], np.int64), eos) for i in range(len(store))])
    if len(stream) < length:
        raise ValueError(f"the text has {len(stream)} tokens, too few for one window of {length}")
    last = len(stream) - length
    starts = np.array([*range(0, last, length - context), last])
    at = starts[:, None] + np.arange(length)
    tokens = stream[at]
    # Labels of the window before are context in this one.
    done = np.concatenate([[1], starts[:-1] + length])
    labels = np.where((at >= done[:, None]) & (tokens != (-1 if unknown is None else unknown)), tokens, IGNORED)
    return tokens, labels


@torch.no_grad()
def causal_loss(model: Any, windows: Windows) -> Score:
    """-log p of the windows' labels, each from the tokens before it in its window."""
    total, count = 0.0, 0
    for batch in windows:
        output = model(batch["input_ids"])
        # Only the labelled positions are scored against the whole vocabulary.
        chosen = batch["labels"][:, 1:] != IGNORED
        nll = output.head.nll(output.hidden[:, :-1][chosen], batch["labels"][:, 1:][chosen])
        total += float(nll.double().sum())
        count += int(chosen.sum())
    return Score(total, count)


def run_lm(kernel: str, run: PartRun) -> None:
    """Train one kernel's model; then measure its rows of Table 2 and Figure 2."""
    config, part = run.config, run.part
    device, tokeniser = best_device(), run.corpus.tokeniser()
    if (config.lm_vocabulary == "words") != isinstance(tokeniser, WordTokeniser):
        raise ValueError(
            f"{run.corpus.folder} has a {type(tokeniser).__name__}, but lm_vocabulary is {config.lm_vocabulary!r}"
        )
    model = causal_model(config, kernel, vocab=-(-tokeniser.vocab_size // 64) * 64)
    decoder = model.decoder
    assert decoder is not None
    length, specials = config.lm_length, tokeniser.specials
    blocks = Blocks(run.corpus.store("train"), specials, length=length, form="stream", seed=config.seed)
    valid = _windows(run, "valid", device, context=length // 2)

    def curve(step: int, model: Any) -> dict[str, float]:
        loss = causal_loss(model, valid).loss
        part.row(
            "lm_curves", kernel=kernel, seed=config.seed, step=step, tokens=step * config.lm_batch * length, loss=loss
        )
        return {"valid/loss": loss}

    facts = fit(
        model,
        CausalSource(blocks, config.lm_batch, seed=config.seed),
        term=CausalLM(),
        recipe=Recipe(lr=config.lm_lr, betas=(0.9, 0.98), weight_decay=0.01, clip=config.lm_clip),
        schedule=lambda steps: Schedule("inverse_sqrt", warmup=max(1, round(config.lm_warmup * steps))),
        steps=config.lm_steps,
        blocks=decoder.blocks,
        curve=curve,
        run=run,
    )
    parameters = parameter_count(model)
    part.fact("training", facts | {"parameters": parameters, "tokens_in_corpus": len(blocks.store.tokens)})
    with uncompiled():
        _judge(model, kernel, run, device)


def _judge(model: Transformer, kernel: str, run: PartRun, device: torch.device) -> None:
    """Put approximations in place of the model's attention, and measure the rows of Table 2 and Figure 2."""
    config, part = run.config, run.part
    meta = run.corpus.store("wikitext103-test").meta
    # The words that are predicted. Where tokens are words it is not needed, and of a part of the text it is not known.
    words = meta["words"] - meta["unknown_words"] if "words" in meta and config.eval_rows is None else None
    windows = _windows(run, "wikitext103-test", device, context=config.lm_context)
    part.fact("test", {"tokens": sum(int((w["labels"] != IGNORED).sum()) for w in windows), "words": words})
    d = config.lm_width // config.lm_heads
    table: dict[str, dict[str, Any]] = {EXACT[kernel]: {"mechanism": "softmax"}}
    for r, shown in ((1, "1"), (d + 1, "d+1")):
        oblivious, aware = kernel_specs(kernel, r)
        table |= {oblivious: {"mechanism": f"top-r:r={shown}"}, aware: {"mechanism": f"value-aware:r={shown}"}}

    def cell(spec: str) -> dict[str, Any]:
        score = _score(model, spec, windows)
        return {
            "spec": spec,
            "perplexity": score.perplexity(words),
            "perplexity_per_token": score.perplexity(),
            "loss": score.loss,
            "predicted": score.tokens,
        }

    seed = {"seed": config.seed}
    part.rows("table_2", {spec: {"kernel": kernel, **row, **seed} for spec, row in table.items()}, cell)

    def loss_on(chosen: Windows) -> Callable[[str], dict[str, Any]]:
        def point(spec: str) -> dict[str, Any]:
            score = _score(model, spec, chosen)
            return {"loss": score.loss, "predicted": score.tokens}

        return point

    # With all keys the value-oblivious oracle is exact.
    sweep = {kernel_specs(kernel, r)[0] if r < config.lm_length else EXACT[kernel]: r for r in config.lm_r}
    part.rows(
        "figure_2",
        {spec: {"kernel": kernel, "r": r, **seed} for spec, r in sweep.items()},
        loss_on(windows[:: config.sweep_every]),
    )
    # The search for value-aware keys between 1 and d + 1 is slow, so both kinds are scored on a few windows.
    few = [{name: t[-config.between_rows :] for name, t in windows[len(windows) // 2].items()}]
    wanted: dict[str, dict[str, Any]] = {EXACT[kernel]: {"kernel": kernel, "family": "softmax", **seed}}
    for r in (1, *config.between_r):
        for family, spec in zip(("top-r", "value-aware"), kernel_specs(kernel, r), strict=True):
            wanted[spec] = {"kernel": kernel, "family": family, "r": r, **seed}
    part.rows("figure_2_few", wanted, loss_on(few))


def _score(model: Transformer, spec: str, windows: Windows) -> Score:
    with swap(model, spec):
        return causal_loss(model, windows)


def _windows(run: PartRun, name: str, device: torch.device, *, context: int) -> Windows:
    """The windows of a store in batches on the device. By whole words <unk> is a word, and so it is predicted too."""
    config, specials = run.config, run.corpus.tokeniser().specials
    assert specials.eos is not None
    unknown = None if config.lm_vocabulary == "words" else specials.unk
    tokens, labels = sliding_windows(
        run.corpus.store(name), specials.eos, length=config.lm_length, context=context, unknown=unknown
    )
    tokens, labels = tokens[: config.eval_rows], labels[: config.eval_rows]

    def cut() -> Iterator[dict[str, Tensor]]:
        for lo in range(0, len(tokens), 2 * config.eval_batch):
            rows = slice(lo, lo + 2 * config.eval_batch)
            yield {"input_ids": torch.from_numpy(tokens[rows]), "labels": torch.from_numpy(labels[rows])}

    return on_device(cut(), device)
