"""The probe by forcing heads, on a Hugging Face encoder-decoder."""

from __future__ import annotations

import pytest
import torch

from attnlab.adapters import record, swap
from attnlab.dynamics import forced_probe, position_spec


def bart() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"d_model": 8, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(vocab_size=13, max_position_embeddings=16, dropout=0.0, **size, **heads)
    batch = {"input_ids": torch.randint(4, 13, (3, 5)), "decoder_input_ids": torch.randint(4, 13, (3, 4))}
    return transformers.BartForConditionalGeneration(config).eval(), batch


def test_forcing_every_head_is_equation_4() -> None:
    model, batch = bart()
    y = torch.randint(4, 13, (3, 4))
    y[1, 2:] = -1

    def answer() -> torch.Tensor:
        return model(**batch).logits

    beta = forced_probe(answer, lambda spec: swap(model, spec, layers="cross"), y, keys=5)
    with swap(model, "position:at=3", layers="cross"), record(model) as trace:
        expected = answer().log_softmax(-1)[0, 1, y[0, 1]]
        assert trace["cross", 1].weights()[..., 3].eq(1).all()
    torch.testing.assert_close(beta[0, 1, 3], expected.detach())
    assert (beta[1, 2:] == -torch.inf).all()
    torch.testing.assert_close(answer(), model(**batch).logits)


def test_one_head_alone_leaves_the_others() -> None:
    model, batch = bart()
    with record(model) as before:
        model(**batch)
    with swap(model, position_spec(2, head=1, heads=2), layers=("cross", 0)), record(model) as after:
        model(**batch)
    torch.testing.assert_close(after["cross", 0].weights()[:, 0], before["cross", 0].weights()[:, 0])
    assert after["cross", 0].weights()[:, 1, :, 2].eq(1).all()


def test_a_head_beyond_the_last_is_refused() -> None:
    with pytest.raises(ValueError, match="head must lie between 0 and 1, got 2"):
        position_spec(0, head=2, heads=2)
