"""Everything together: small models learn small tasks, and the searches find what they learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnlab.models import (
    CausalLM,
    MaskedLM,
    Transformer,
    Translation,
    beam_search,
    greedy_search,
    load_transformer,
    named_config,
    save_transformer,
)

PAD, BOS, EOS, WORDS = 0, 1, 2, 11


def train(
    model: Transformer,
    term: Callable[..., tuple[Tensor, Tensor]],
    batch: Callable[[int], dict[str, Tensor]],
    steps: int,
) -> float:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 50) * (1 - s / steps))
    model.train()
    for step in range(steps):
        inputs = batch(step)
        output = model(**{name: t for name, t in inputs.items() if name != "labels"})
        total, count = term(model, output, inputs, step)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    return (total / count).item()


def reversal(step: int) -> dict[str, Tensor]:
    """A sequence of 2 to 5 words, padded on the right, and its reversal."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(3, WORDS, (32, 5), generator=generator)
    lengths = torch.randint(2, 6, (32,), generator=generator)
    rows = [row[:n] for row, n in zip(words, lengths.tolist(), strict=True)]

    def stacked(rows: list[Tensor], length: int, value: int) -> Tensor:
        return torch.stack([torch.nn.functional.pad(r, (0, length - len(r)), value=value) for r in rows])

    backwards = [r.flip(0) for r in rows]
    bos, eos = torch.tensor([BOS]), torch.tensor([EOS])
    return {
        "input_ids": stacked(rows, 5, PAD),
        "attention_mask": stacked([torch.ones_like(r) for r in rows], 5, 0),
        "decoder_input_ids": stacked([torch.cat([bos, r]) for r in backwards], 6, PAD),
        "labels": stacked([torch.cat([r, eos]) for r in backwards], 6, -100),
    }


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["softmax", "kernel:elu"])
def test_a_translator_learns_to_reverse(spec: str, tmp_path: object) -> None:
    config = replace(
        named_config("attnlab-translation"), vocab=WORDS, width=64, heads=4, layers=2, hidden=128, dropout=0.0
    )
    model = Transformer(replace(config, causal_attention=spec))
    train(model, Translation(label_smoothing=0.1), reversal, steps=400)
    model = load_transformer(save_transformer(model, tmp_path))
    test = reversal(10_000)
    wanted = [tuple(t for t in row if t != -100) for row in test["labels"].tolist()]
    arguments = {"attention_mask": test["attention_mask"], "bos": BOS, "eos": EOS, "max_new": 8}
    greedy = [h.tokens for h in greedy_search(model, test["input_ids"], **arguments)]
    beam = [row[0].tokens for row in beam_search(model, test["input_ids"], beams=4, **arguments)]
    for outputs in (greedy, beam):
        assert sum(f == w for f, w in zip(outputs, wanted, strict=True)) >= 30


def counting(step: int) -> dict[str, Tensor]:
    """Each token is the one before it plus the first, modulo the words."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(0, WORDS, (32, 1), generator=generator)
    return {"input_ids": first * torch.arange(1, 9) % WORDS}


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
def test_a_language_model_learns_to_count(positions: str) -> None:
    config = replace(named_config("attnlab-lm"), vocab=WORDS, width=64, heads=4, layers=2, dropout=0.0)
    # Embeddings as large as the sinusoids added to them.
    sinusoidal = positions == "sinusoidal"
    model = Transformer(
        replace(config, positions=positions, embed_scale=sinusoidal, init="xavier" if sinusoidal else "normal")
    )
    train(model, CausalLM(), counting, steps=200)
    prompts = counting(0)["input_ids"][:, :2]
    for row, outputs in zip(prompts.tolist(), greedy_search(model, prompts, eos=None, max_new=6), strict=True):
        assert outputs.tokens == tuple(row[0] * i % WORDS for i in range(3, 9))


def repetition(step: int) -> dict[str, Tensor]:
    """Four words, twice; some of the first four are masked."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, WORDS, (32, 4), generator=generator).repeat(1, 2)
    masked = torch.rand(words.shape, generator=generator) < torch.tensor([0.4] * 4 + [0.0] * 4)
    return {"input_ids": words.masked_fill(masked, WORDS), "labels": words.masked_fill(~masked, -100)}


@pytest.mark.slow
def test_a_masked_model_learns_to_look_elsewhere() -> None:
    model = Transformer(replace(named_config("attnlab-mlm"), vocab=WORDS + 1, width=64, heads=4, layers=2, dropout=0.0))
    assert train(model, MaskedLM(), repetition, steps=300) < 0.1
