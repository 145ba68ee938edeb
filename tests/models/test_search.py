from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from attnlab.models import Hypothesis, LengthPenalty, Transformer, attentions, beam_search, greedy_search
from tests.models.small import make, some_tokens

EOS, BOS = 2, 0


def tiny(kind: str, vocab: int = 4, **fields: object) -> Transformer:
    return make(kind, vocab=vocab, **fields)


def log_prob(model: Transformer, prompt: Tensor, tokens: tuple[int, ...]) -> float:
    """log p of a continuation, from one forward pass over the whole of it."""
    continued = torch.tensor([[*([BOS] if model.config.kind == "encoder-decoder" else prompt.tolist()), *tokens]])
    if model.config.kind == "encoder-decoder":
        logits = model(prompt[None], decoder_input_ids=continued).logits
    else:
        logits = model(continued).logits
    chosen = logits.log_softmax(-1)[0, -len(tokens) - 1 : -1]
    return sum(chosen[i, t].item() for i, t in enumerate(tokens))


def everything(vocab: int, max_new: int) -> list[tuple[int, ...]]:
    """Every output that ends in EOS and has at most ``max_new`` tokens."""
    others = [t for t in range(vocab) if t != EOS]
    return [(*body, EOS) for n in range(max_new) for body in itertools.product(others, repeat=n)]


def arguments(kind: str) -> dict[str, int]:
    return {"eos": EOS, "bos": BOS} if kind == "encoder-decoder" else {"eos": EOS}


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("penalty", [LengthPenalty(0.0), LengthPenalty(1.0), LengthPenalty(0.6, "wu")])
def test_a_wide_beam_is_enumeration(kind: str, penalty: LengthPenalty) -> None:
    model = tiny(kind)
    prompt = some_tokens(1, 5, 4)
    outputs = everything(vocab=4, max_new=4)
    scored = [(log_prob(model, prompt[0], t) / penalty(len(t)), t) for t in outputs]
    best = sorted(scored, reverse=True)[:7]
    (hypotheses,) = beam_search(
        model, prompt, **arguments(kind), max_new=4, beams=len(outputs), n_best=7, length_penalty=penalty
    )
    assert [h.tokens for h in hypotheses] == [t for _, t in best]
    for hypothesis, (score, tokens) in zip(hypotheses, best, strict=True):
        assert hypothesis.score == pytest.approx(score, abs=1e-9)
        assert hypothesis.log_prob == pytest.approx(log_prob(model, prompt[0], tokens), abs=1e-9)


def naive_beam(model: Transformer, prompt: Tensor, *, beams: int, max_new: int, alpha: float) -> list[Hypothesis]:
    """The definition, with lists: one row, every log-probability from a whole forward pass."""
    alive: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    done: list[Hypothesis] = []
    for step in range(1, max_new + 1):
        candidates = [
            ((*tokens, t), log_prob(model, prompt, (*tokens, t)))
            for tokens, _ in alive
            for t in range(model.config.vocab)
            if step < max_new or t == EOS
        ]
        candidates = sorted(candidates, key=lambda c: -c[1])[: 2 * beams]
        for tokens, p in candidates[:beams]:
            if tokens[-1] == EOS and len(done) < beams:
                done.append(Hypothesis(tokens, p, p / len(tokens) ** alpha))
        if len(done) >= beams:
            break
        alive = [c for c in candidates if c[0][-1] != EOS][:beams]
    return sorted(done, key=lambda h: -h.score)


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("beams", [1, 2, 3])
def test_a_narrow_beam_is_the_definition(kind: str, beams: int) -> None:
    model = tiny(kind, vocab=7)
    for prompt in some_tokens(2, 3, 7):
        (hypotheses,) = beam_search(model, prompt[None], **arguments(kind), max_new=6, beams=beams, n_best=beams)
        expected = naive_beam(model, prompt, beams=beams, max_new=6, alpha=1.0)
        assert [h.tokens for h in hypotheses] == [h.tokens for h in expected]
        assert [h.score for h in hypotheses] == pytest.approx([h.score for h in expected], abs=1e-9)


def test_greedy_takes_the_largest_each_time() -> None:
    model = tiny("decoder", vocab=13)
    for prompt in some_tokens(5, 3, 13):
        (greedy,) = greedy_search(model, prompt[None], eos=EOS, max_new=7)
        tokens = prompt.tolist()
        for t in greedy.tokens[:-1]:
            assert model(torch.tensor([tokens])).logits[0, -1].argmax() == t
            tokens.append(t)
        assert greedy.tokens[-1] == EOS
        assert greedy.log_prob == greedy.score == pytest.approx(log_prob(model, prompt, greedy.tokens), abs=1e-9)


def ragged(side: str) -> tuple[list[Tensor], Tensor, Tensor]:
    rows = [some_tokens(1, n, 7)[0] for n in (5, 1, 7, 3)]
    pads = [(7 - len(r), 0) if side == "left" else (0, 7 - len(r)) for r in rows]
    tokens = torch.stack([nn.functional.pad(r, p, value=5) for r, p in zip(rows, pads, strict=True)])
    mask = torch.stack([nn.functional.pad(torch.ones_like(r), p) for r, p in zip(rows, pads, strict=True)])
    return rows, tokens, mask


def same(hypotheses: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    assert [[h.tokens for h in row] for row in hypotheses] == [[h.tokens for h in row] for row in expected]
    for a, b in zip(itertools.chain(*hypotheses), itertools.chain(*expected), strict=True):
        assert a.score == pytest.approx(b.score, abs=1e-9)


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
@pytest.mark.parametrize("cached", [True, False])
def test_a_batch_gives_what_its_rows_give(kind: str, side: str, positions: str, cached: bool) -> None:
    model = tiny(kind, vocab=7, positions=positions)
    if kind == "encoder-decoder":
        # A source that matters, so that rows finish at different steps.
        for block in model.decoder.blocks:
            block.cross.out.weight.data.mul_(5)
    rows, tokens, mask = ragged(side)
    steps = []
    for eos in (2, 3, 6):
        settings = {**arguments(kind), "eos": eos, "max_new": 9, "beams": 3, "n_best": 3}
        together = beam_search(model, tokens, attention_mask=mask, cached=cached, **settings)
        alone = [beam_search(model, row[None], **settings)[0] for row in rows]
        same(together, alone)
        steps.append({max(len(h.tokens) for h in row) for row in alone})
    assert max(map(len, steps)) > 1


@pytest.mark.parametrize("spec", ["softmax", "kernel:elu", "kernel:poly,degree=2"])
@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_cached_equals_uncached(spec: str, kind: str) -> None:
    model = tiny(kind, vocab=13, causal_attention=spec, cross_attention=spec)
    _, tokens, mask = ragged("left")
    settings = {**arguments(kind), "attention_mask": mask, "max_new": 9, "beams": 3, "n_best": 2}
    same(beam_search(model, tokens, cached=True, **settings), beam_search(model, tokens, cached=False, **settings))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
def test_prefill_then_one_token_at_a_time(masked: bool, positions: str) -> None:
    model = tiny("decoder", vocab=13, positions=positions)
    tokens = some_tokens(2, 7, 13)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, :2] = False
    whole = model(tokens, attention_mask=mask if masked else None).logits
    cache = model.make_cache(2, 7)
    parts = [model(tokens[:, :4], attention_mask=mask[:, :4] if masked else None, cache=cache).logits]
    parts += [model(tokens[:, i : i + 1], cache=cache).logits for i in range(4, 7)]
    seen = mask if masked else torch.ones_like(mask)
    torch.testing.assert_close(torch.cat(parts, 1)[seen], whole[seen], rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="holds 7 positions, 8 are needed"):
        model(tokens[:, :1], cache=cache)


def test_without_an_end_token() -> None:
    model = tiny("decoder", vocab=4)
    prompt = some_tokens(1, 3, 4)
    outputs = list(itertools.product(range(4), repeat=3))
    (hypotheses,) = beam_search(model, prompt, eos=None, max_new=3, beams=64, n_best=64)
    assert sorted(h.tokens for h in hypotheses) == outputs
    assert hypotheses[0].tokens == max(outputs, key=lambda t: log_prob(model, prompt[0], t))


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_a_mechanism_may_bring_its_own_cache(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam: an object with ``attend`` and ``select``; here, elu attention as a running sum of constant size."""
    model = tiny(kind, vocab=13, causal_attention="kernel:elu", cross_attention="kernel:elu")

    class RunningSum:
        def __init__(self) -> None:
            self.state: tuple[Tensor, Tensor] | None = None

        def attend(self, mechanism, call, *, key_visible):  # type: ignore[no-untyped-def]
            phi_q, phi_k = nn.functional.elu(call.q) + 1, nn.functional.elu(call.k) + 1
            if key_visible is not None:
                phi_k = phi_k * call.key_visible[:, None, :, None]
            kv = (phi_k[..., None] * call.v[..., None, :]).cumsum(2)
            z = phi_k.cumsum(2)
            if self.state is not None:
                kv, z = (torch.cat([old, old + new], 2) for old, new in zip(self.state, (kv, z), strict=True))
            self.state = kv[:, :, -1:], z[:, :, -1:]
            kv, z = (t[:, :, -call.q.shape[2] :] if call.causal else t[:, :, -1:] for t in (kv, z))
            total = (phi_q * z).sum(-1, keepdim=True)
            return call, (phi_q[..., None, :] @ kv).squeeze(-2) / total.masked_fill(total == 0, 1)

        def select(self, rows: Tensor) -> None:
            if self.state is not None:
                self.state = (self.state[0][rows], self.state[1][rows])

    _, prompt, mask = ragged("left")
    settings = {**arguments(kind), "attention_mask": mask, "max_new": 7, "beams": 3}
    expected = beam_search(model, prompt, **settings)
    for cls in {type(layer.mechanism) for layer in attentions(model, ("decoder", "cross"))}:
        monkeypatch.setattr(cls, "make_cache", lambda mechanism, batch, capacity: RunningSum())
    assert isinstance(model.make_cache(4, 9).layers[0], RunningSum)
    same(beam_search(model, prompt, **settings), expected)


def test_training_mode_is_given_back() -> None:
    model = tiny("decoder", dropout=0.5).train()
    a, b = (greedy_search(model, torch.tensor([[1, 3]]), eos=EOS, max_new=5) for _ in range(2))
    assert a == b
    assert model.training


def test_errors_say_what_to_do() -> None:
    decoder, both = tiny("decoder"), tiny("encoder-decoder")
    tokens = some_tokens(2, 3, 4)
    with pytest.raises(ValueError, match="starts from bos"):
        greedy_search(both, tokens, eos=EOS, max_new=3)
    with pytest.raises(ValueError, match="put the first token there"):
        greedy_search(decoder, tokens, eos=EOS, bos=BOS, max_new=3)
    with pytest.raises(ValueError, match="at least one token"):
        greedy_search(decoder, tokens, eos=EOS, max_new=3, attention_mask=torch.tensor([[1, 1, 1], [0, 0, 0]]))
    with pytest.raises(ValueError, match="n_best <= beams"):
        beam_search(decoder, tokens, eos=EOS, max_new=3, beams=2, n_best=3)
    with pytest.raises(ValueError, match="eos must be a token below 4, got 9"):
        beam_search(decoder, tokens, eos=9, max_new=3)
    nn.init.constant_(decoder.tokens.weight, torch.nan)
    with pytest.raises(ValueError, match="row 0: no output has a finite probability"):
        beam_search(decoder, tokens, eos=EOS, max_new=3)
    with pytest.raises(ValueError, match="form must be fairseq or wu"):
        LengthPenalty(form="other")
