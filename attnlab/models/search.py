"""Sampling, greedy and beam search with caches, for decoders and encoder-decoders; rows do not change one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from attnlab.models.attention import attentions
from attnlab.models.cache import Cache
from attnlab.models.transformer import EncoderOutput, Transformer
from attnlab.models.vocabulary import at_least_float32
from attnlab.shapes import Float, Int

__all__ = ["Hypothesis", "LengthPenalty", "beam_search", "greedy_search", "sample"]


class Hypothesis(NamedTuple):
    """A continuation: its tokens (the end token too, the prompt not), log p of them, and the score it is ranked by."""

    tokens: tuple[int, ...]
    log_prob: float
    score: float


@dataclass(frozen=True)
class LengthPenalty:
    """What log p of n tokens, the end token among them, is divided by: n^alpha, or ((5 + n) / 6)^alpha.

    The first is fairseq's, the second Wu et al.'s (2016, Eq. 14, without coverage). alpha = 0 ranks by log p alone;
    a larger alpha favours longer outputs.

    >>> LengthPenalty(alpha=1.0, form="wu")(7)
    2.0
    """

    alpha: float = 1.0
    form: str = "fairseq"

    def __post_init__(self) -> None:
        if self.form not in ("fairseq", "wu"):
            raise ValueError(f"form must be fairseq or wu, got {self.form!r}")

    def __call__(self, n: int) -> float:
        base = n if self.form == "fairseq" else (5 + n) / 6
        return float(base**self.alpha)


def greedy_search(
    model: Transformer,
    input_ids: Int[Tensor, "b k"],
    *,
    eos: int | None,
    max_new: int,
    bos: int | None = None,
    attention_mask: Tensor | None = None,
    cached: bool | None = None,
    cache: Cache | None = None,
) -> list[Hypothesis]:
    """The most probable next token, again and again: ``beam_search`` with one beam."""
    ranked = beam_search(
        model,
        input_ids,
        eos=eos,
        max_new=max_new,
        bos=bos,
        attention_mask=attention_mask,
        cached=cached,
        cache=cache,
        beams=1,
        length_penalty=LengthPenalty(alpha=0.0),
    )
    return [best for (best,) in ranked]


@torch.no_grad()
def beam_search(
    model: Transformer,
    input_ids: Int[Tensor, "b k"],
    *,
    eos: int | None,
    max_new: int,
    bos: int | None = None,
    attention_mask: Tensor | None = None,
    beams: int = 4,
    length_penalty: LengthPenalty | None = None,
    n_best: int = 1,
    cached: bool | None = None,
    cache: Cache | None = None,
) -> list[list[Hypothesis]]:
    """The ``n_best`` continuations of each row, best first, as fairseq finds them.

    Each step keeps the ``beams`` best unfinished prefixes. A prefix whose end is among the ``beams`` best candidates is
    finished, and a row is done with ``beams`` finished ones. Outputs have at most ``max_new`` tokens, and the last one
    must be ``eos``; with ``eos=None`` nothing ends before ``max_new``.

    A decoder continues ``input_ids``; an encoder-decoder reads them and starts from ``bos``. ``cached=None`` uses a
    cache unless a mechanism cannot (``cannot()["offset"]``). ``cache`` is an empty cache to use, such as the one of
    ``attnlab.evicting``.
    """
    if min(beams, max_new, n_best) < 1 or n_best > beams:
        raise ValueError(
            f"beams, max_new and n_best must be positive and n_best <= beams, got {beams}, {max_new}, {n_best}"
        )
    if not 0 <= (eos or 0) < model.config.vocab:
        raise ValueError(f"eos must be a token below {model.config.vocab}, got {eos}")
    training = model.training
    model.eval()
    try:
        past = _Past(model, input_ids, bos=bos, mask=attention_mask, max_new=max_new, cached=cached, cache=cache)
        finished = _search(past, beams=beams, eos=eos, max_new=max_new)
    finally:
        model.train(training)
    for row, outputs in enumerate(finished):
        if not outputs:
            raise ValueError(f"row {row}: no output has a finite probability; the model's weights or states may be NaN")
    penalty = length_penalty or LengthPenalty()
    ranked = [[Hypothesis(tuple(t), p, p / penalty(len(t))) for t, p in row] for row in finished]
    return [sorted(row, key=lambda hypothesis: -hypothesis.score)[:n_best] for row in ranked]


@torch.no_grad()
def sample(
    model: Transformer,
    input_ids: Int[Tensor, "b k"],
    *,
    eos: int | None,
    max_new: int,
    temperature: float = 1.0,
    seed: int = 0,
    bos: int | None = None,
    attention_mask: Tensor | None = None,
    cached: bool | None = None,
) -> list[tuple[int, ...]]:
    """The tokens that continue each row, drawn one after the other from p^(1 / temperature), up to ``eos``.

    At temperature 0 the most probable token is taken; other than in ``greedy_search`` the last need not be ``eos``.
    """
    if max_new < 1 or not temperature >= 0:
        raise ValueError(f"max_new must be positive and temperature at least 0, got {max_new}, {temperature}")
    draw = torch.Generator(device=input_ids.device).manual_seed(seed)
    training = model.training
    model.eval()
    try:
        past = _Past(model, input_ids, bos=bos, mask=attention_mask, max_new=max_new, cached=cached, cache=None)
        log_probs = past.first()
        rows = torch.arange(len(log_probs), device=log_probs.device)
        new: list[Tensor] = []
        ended = torch.zeros_like(rows, dtype=torch.bool)
        while True:
            if temperature == 0:
                token = log_probs.argmax(-1)
            else:
                token = torch.multinomial((log_probs / temperature).softmax(-1), 1, generator=draw)[:, 0]
            new.append(token)
            ended |= token == (-1 if eos is None else eos)
            if len(new) == max_new or bool(ended.all()):
                break
            log_probs = past.next(rows, token, same_source=True)
    finally:
        model.train(training)
    return [_up_to(row, eos) for row in torch.stack(new, 1).tolist()]


def _up_to(tokens: list[int], eos: int | None) -> tuple[int, ...]:
    return tuple(tokens[: tokens.index(eos) + 1] if eos in tokens else tokens)


Finished = list[tuple[list[int], float]]


def _search(past: _Past, *, beams: int, eos: int | None, max_new: int) -> list[Finished]:
    log_probs = past.first()
    batch, vocab = log_probs.shape
    device = log_probs.device
    finished: list[Finished] = [[] for _ in range(batch)]
    # The rows of the batch that are still searched, and their beams: a row starts with one, the others are impossible.
    live = torch.arange(batch, device=device)
    scores = log_probs.new_full((batch, beams), -torch.inf)
    scores[:, 0] = 0
    tokens = torch.zeros(batch, beams, 0, dtype=torch.long, device=device)
    past.select(live.repeat_interleave(beams))
    log_probs = log_probs.repeat_interleave(beams, dim=0)
    for step in range(1, max_new + 1):
        if step == max_new and eos is not None:
            log_probs = _only(log_probs, eos)
        total = (scores[:, :, None] + log_probs.view(len(live), beams, vocab)).flatten(1)
        # Of 2 x beams candidates at most one per beam is an end, so as many as there are beams go on.
        best, index = total.topk(min(2 * beams, beams * vocab), dim=-1)
        beam, token = index // vocab, index % vocab
        ends = torch.zeros_like(token, dtype=torch.bool) if eos is None else token == eos
        ending = ends if eos is not None or step < max_new else ~ends
        # One transfer from the device for every output that ends at this step.
        i, rank = (ending & best.isfinite())[:, :beams].nonzero().unbind(1)
        ended_tokens = torch.cat([tokens[i, beam[i, rank]], token[i, rank, None]], dim=-1)
        for row, ended, p in zip(live[i].tolist(), ended_tokens.tolist(), best[i, rank].tolist(), strict=True):
            if len(finished[row]) < beams:
                finished[row].append((ended, p))
        keep = [i for i, row in enumerate(live.tolist()) if len(finished[row]) < beams]
        if not keep or step == max_new:
            break
        going_on = (ends.long() * ends.shape[1] + torch.arange(ends.shape[1], device=device)).argsort(-1)[:, :beams]
        scores, beam, token = (t.gather(-1, going_on)[keep] for t in (best, beam, token))
        kept = torch.tensor(keep, device=device)
        rows = kept[:, None] * beams + beam
        tokens = torch.cat([tokens.flatten(0, 1)[rows], token[..., None]], dim=-1)
        log_probs = past.next(rows.flatten(), token.flatten(), same_source=len(keep) == len(live))
        live = live[kept]
    return finished


class _Past:
    """Growing sequences and the log-probabilities of their next tokens, from a cache or from scratch each time."""

    def __init__(
        self,
        model: Transformer,
        input_ids: Int[Tensor, "b k"],
        *,
        bos: int | None,
        mask: Tensor | None,
        max_new: int,
        cached: bool | None,
        cache: Cache | None,
    ) -> None:
        self.model = model
        self.source: EncoderOutput | None = None
        self.tokens, self.mask = input_ids, mask
        if model.config.kind == "encoder-decoder":
            if bos is None:
                raise ValueError("an encoder-decoder starts from bos: give the token its targets begin with")
            self.source = model.encode(input_ids, attention_mask=mask)
            self.tokens, self.mask = input_ids.new_full((input_ids.shape[0], 1), bos), None
        elif bos is not None:
            raise ValueError("a decoder continues input_ids: put the first token there instead of giving bos")
        if self.tokens.shape[1] == 0 or (self.mask is not None and not self.mask.bool().any(-1).all()):
            raise ValueError("every row needs at least one token to continue")
        self.cache = self._checked(cache, cached) if cache is not None else self._own_cache(max_new, cached)

    def _own_cache(self, max_new: int, cached: bool | None) -> Cache | None:
        if cached is None:
            mechanisms = [layer.current_mechanism() for layer in attentions(self.model, ("decoder",))]
            cached = not any("offset" in mech.cannot() for mech in mechanisms)
        # The last token is never read.
        capacity = self.tokens.shape[1] + max_new - 1
        return self.model.make_cache(self.tokens.shape[0], capacity) if cached else None

    @staticmethod
    def _checked(cache: Cache, cached: bool | None) -> Cache:
        if cached is False:
            raise ValueError("cached=False and a cache contradict each other; leave one of them out")
        if cache.length:
            raise ValueError(f"the cache holds {cache.length} tokens already; a search begins with an empty one")
        return cache

    def first(self) -> Float[Tensor, "b v"]:
        """What may follow the prompts."""
        hidden = self._hidden(self.tokens, self.mask)
        if self.mask is None:
            return self._log_probs(hidden[:, -1])
        places = torch.arange(hidden.shape[1], device=hidden.device)
        last = (places * self.mask.bool()).amax(-1)
        return self._log_probs(hidden[torch.arange(len(last), device=hidden.device), last])

    def select(self, rows: Int[Tensor, " n"], *, same_source: bool = False) -> None:
        """Make sequence i what sequence ``rows[i]`` was."""
        if torch.equal(rows, torch.arange(self.tokens.shape[0], device=rows.device)):
            return
        self.tokens = self.tokens[rows]
        self.mask = None if self.mask is None else self.mask[rows]
        if self.cache is not None:
            self.cache.select(rows, same_source=same_source)
        if self.source is not None and not same_source:
            visible = self.source.visible
            self.source = EncoderOutput(self.source.hidden[rows], None if visible is None else visible[rows])

    def next(self, rows: Int[Tensor, " n"], token: Int[Tensor, " n"], *, same_source: bool) -> Float[Tensor, "n v"]:
        """What may follow sequences ``rows``, each continued by a token."""
        self.select(rows, same_source=same_source)
        new = token[:, None]
        self.tokens = torch.cat([self.tokens, new], dim=1)
        if self.mask is not None:
            self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=1)
        hidden = self._hidden(self.tokens, self.mask) if self.cache is None else self._hidden(new, None)
        return self._log_probs(hidden[:, -1])

    def _hidden(self, tokens: Int[Tensor, "b q"], mask: Tensor | None) -> Float[Tensor, "b q m"]:
        return self.model.decode(tokens, self.source, attention_mask=mask, cache=self.cache).hidden

    def _log_probs(self, hidden: Float[Tensor, "b m"]) -> Float[Tensor, "b v"]:
        if self.model.head is None:
            raise ValueError("this model has head='none' and so no tokens to choose from")
        return log_softmax(at_least_float32(self.model.head(hidden)), dim=-1)


def _only(log_probs: Float[Tensor, "n v"], token: int) -> Float[Tensor, "n v"]:
    others = torch.full_like(log_probs, -torch.inf)
    others[:, token] = log_probs[:, token]
    return others
