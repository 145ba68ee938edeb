"""ELECTRA: what is replaced, what the two losses are, and guidance of both halves."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from attnlab.guidance import Guidance, guide
from attnlab.models import TransformerConfig
from papers.guidance.electra_model import Electra, GeneratedTokens, ReplacedTokens
from tests.tolerance import assert_close

CONFIG = TransformerConfig(kind="encoder", vocab=31, width=16, heads=4, layers=2, norm="post", embed_norm=True)
REAL = torch.tensor([[1, 5, 6, 7, 8, 2], [1, 9, 9, 9, 2, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
LABELS = torch.tensor([[-100, 5, -100, 7, -100, -100], [-100, -100, 9, -100, -100, -100]])
MASKED = torch.where(LABELS == -100, REAL, 4)


def model() -> Electra:
    torch.manual_seed(0)
    return Electra(CONFIG, generator_width=8, generator_heads=2)


def test_only_masked_places_can_be_replaced() -> None:
    electra = model()
    out = electra(MASKED, LABELS, MASK)
    assert torch.equal(out.tokens[LABELS == -100], REAL[LABELS == -100])
    assert torch.equal(out.replaced, (out.tokens != REAL).float())
    assert int(out.masked.sum()) == 3
    # Over many draws the words are the generator's: here nearly uniform over 31.
    drawn = torch.stack([electra(MASKED, LABELS, MASK).tokens[0, 1] for _ in range(60)])
    assert len(drawn.unique()) > 10


def test_the_losses() -> None:
    electra = model().eval()
    batch = {"input_ids": MASKED, "labels": LABELS, "attention_mask": MASK}
    out = electra(MASKED, LABELS, MASK)
    logits = electra.generator(MASKED, attention_mask=MASK).logits
    loss = GeneratedTokens()(electra, out, batch, 0)
    wanted = cross_entropy(logits.flatten(0, 1), LABELS.flatten(), ignore_index=-100, reduction="sum")
    assert_close(loss.total, wanted)
    assert loss.count == 3
    loss = ReplacedTokens(weight_of=7.0)(electra, out, batch, 0)
    each = binary_cross_entropy_with_logits(out.logits, out.replaced, reduction="none")
    assert_close(loss.total, 7 * (each * MASK).sum())
    assert loss.count == MASK.sum()
    # The detector's loss has no gradient for the generator, whose tokens are sampled.
    grads = torch.autograd.grad(loss.total, list(electra.generator.parameters()), allow_unused=True)
    assert all(g is None for g in grads)


def test_generator_and_discriminator_are_both_guided() -> None:
    electra = model().eval()
    guidance = Guidance(heads={"same": 1, "prev": 1}, reduction="row")
    with guide(electra.generator, guidance) as first, guide(electra.discriminator, guidance) as second:
        out = electra(MASKED, LABELS, MASK)
        (first.total() + second.total()).backward()
    assert [len(term.by_head()) for term in (first, second)] == [2, 2]
    with guide(electra.discriminator, guidance) as again:
        electra.discriminator(out.tokens, attention_mask=MASK)
    assert_close(again.total(), second.total())
    assert electra.generator.encoder.blocks[0].attention.qkv.weight.grad.abs().max() > 0


def test_a_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match="generator and discriminator of ELECTRA are encoders"):
        Electra(
            TransformerConfig(kind="decoder", vocab=5, width=4, heads=1, layers=1), generator_width=4, generator_heads=1
        )
