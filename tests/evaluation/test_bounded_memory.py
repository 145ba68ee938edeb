"""A causal model beside its twin with a bounded memory: losses, bytes, decoding, and what is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlab as al
from attnlab.adapters.cache_bytes import held_bytes
from attnlab.adapters.evict import token_losses
from attnlab.adapters.prefill import last_logits
from attnlab.data import bundled_text
from attnlab.evaluation import bounded_memory
from attnlab.evaluation.bounded_memory import (
    MemoryConfig,
    compare_memories,
    make_twin,
    refuse_without_cache,
    usable_lengths,
)
from attnlab.progress import Progress

TEXT = bundled_text("moby-dick")
QUICK = MemoryConfig(lengths=(31, 131), batch=3, steps=2, repeats=2, new_tokens=5)


@pytest.fixture(scope="module")
def models() -> tuple[al.LoadedModel, al.LoadedModel]:
    return al.shipped_model("lm"), al.shipped_model("lm-bounded")


@pytest.fixture(scope="module")
def result(models: tuple[al.LoadedModel, al.LoadedModel]) -> dict[str, Any]:
    seen: list[int] = []
    found = compare_memories(
        *models, TEXT, config=QUICK, progress=Progress("x"), on_result=lambda part: seen.append(len(part["rows"]))
    )
    assert seen == [1, 2]
    return found


def test_every_length_has_both_models(result: dict[str, Any]) -> None:
    short, long = result["rows"]
    assert (short["length"], long["length"]) == (31, 131)
    # 31 tokens fit into the memory.
    assert short["loss_above"] == pytest.approx(0, abs=1e-5)
    assert long["bounded_loss"] - long["full_loss"] == pytest.approx(long["loss_above"], abs=1e-6)
    assert long["loss_above_low"] <= long["loss_above"] <= long["loss_above_high"]
    assert long["bounded_bytes"] == short["bounded_bytes"]
    assert long["full_bytes"] / short["full_bytes"] == pytest.approx(131 / 31)
    for row in result["rows"]:
        assert min(row["full_tokens_per_second"], row["bounded_tokens_per_second"]) > 0
    assert result["complete"]
    assert result["keys"]["size"] == sum(result["keys"][name] for name in ("sinks", "window", "slots"))


def test_the_losses_are_those_of_the_models(
    result: dict[str, Any], models: tuple[al.LoadedModel, al.LoadedModel]
) -> None:
    # Both windows of 131 tokens: the first token of each is the tokenizer's, which is not predicted.
    tokenizer = models[0].tokenizer
    before = tokenizer("")["input_ids"]
    room = 131 - len(before)
    ids = tokenizer(TEXT[:6000], add_special_tokens=False)["input_ids"]
    rows = torch.tensor([before + ids[i : i + room] for i in (0, room)])
    for name, loaded in zip(("full_loss", "bounded_loss"), models, strict=True):
        with torch.no_grad():
            assert token_losses(loaded.model, rows, None).mean().item() == pytest.approx(
                result["rows"][1][name], rel=1e-4
            )


def test_both_models_continue_the_passage(result: dict[str, Any]) -> None:
    said = result["continuation"]
    assert TEXT.startswith(said["passage"])
    assert said["passage"].endswith(".")
    assert said["passage_tokens"] > result["keys"]["size"]
    assert not said["full"].startswith(said["passage"][:20])


@torch.no_grad()
def test_buffers_made_once_decode_what_the_default_cache_does(models: tuple[al.LoadedModel, al.LoadedModel]) -> None:
    from transformers import DynamicCache

    ids = models[0].tokenizer(TEXT[:900], return_tensors="pt")["input_ids"]
    for loaded in models:
        plain, other = DynamicCache(), DynamicCache()
        token = last_logits(loaded.model, ids, plain)[:, -1].argmax(-1, keepdim=True)
        last_logits(loaded.model, ids, other)
        assert held_bytes(plain) == al.adapters.cache_bytes.cache_bytes(loaded.model, ids.shape[1])
        batched = bounded_memory._for_batch(loaded, other, 3, ids.shape[1] + 4)
        for _ in range(3):
            expected = last_logits(loaded.model, token, plain)
            got = last_logits(loaded.model, token.repeat(3, 1), batched)
            torch.testing.assert_close(got, expected.expand_as(got), atol=1e-3, rtol=1e-4)
            token = expected[:, -1].argmax(-1, keepdim=True)


def test_lengths_beyond_the_model_or_the_text_are_left_out(models: tuple[al.LoadedModel, al.LoadedModel]) -> None:
    full = models[0]
    lengths, notes = usable_lengths(full, TEXT, MemoryConfig(lengths=(512, 8192, 16384)))
    assert lengths == (512, 8192)
    assert notes == ["the model reads at most 8,192 tokens, so longer texts are left out"]
    lengths, notes = usable_lengths(full, TEXT[:4000], MemoryConfig(lengths=(512, 8192)))
    assert lengths == (512,)
    assert "so longer ones are left out" in notes[0]
    with pytest.raises(ValueError, match="there is no length to measure"):
        usable_lengths(full, "a b", MemoryConfig(lengths=(512,)))
    with pytest.raises(ValueError, match="lengths must be at least"):
        MemoryConfig(lengths=(8,))


def test_a_model_for_short_texts_is_measured_at_its_own_lengths(
    models: tuple[al.LoadedModel, al.LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_memory, "max_length", lambda model: 256)
    lengths, notes = usable_lengths(models[0], TEXT, MemoryConfig())
    assert lengths == (64, 128, 256)
    assert notes == ["the model reads at most 256 tokens, so longer texts are left out"]


def test_a_twin_made_on_the_spot_has_the_model_s_weights(models: tuple[al.LoadedModel, al.LoadedModel]) -> None:
    full = models[0]
    twin = make_twin(full, TEXT, MemoryConfig(lengths=(256,)))
    assert not al.is_converted(full.model)
    mech = twin.model.attnlab["decoder_0"]
    assert mech.size == 64
    # Scores that start from the model's attention vary as much as the regression says: by 1 over the tokens.
    assert mech.weight.abs().sum() > 0
    for name, weight in full.model.state_dict().items():
        assert torch.equal(twin.model.state_dict()[name], weight), name


def test_what_has_no_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="does not write one token after another"):
        refuse_without_cache(al.shipped_model())
