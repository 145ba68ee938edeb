"""Guidance end to end: on a Hugging Face model by hand, and as a term of the training loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf

import attnlab as al
from attnlab.guidance import Guidance, GuidanceTerm, guidance_loss, guide, layer_targets, pattern_audit
from attnlab.models import Transformer, TransformerConfig
from attnlab.patterns import SpecialTokens
from attnlab.training import Recipe, Settings, train
from attnlab.training.terms import CrossEntropy
from tests.tolerance import assert_close

TOKENS = SpecialTokens(period=(9,), delimiters=(1, 2))
HEADS = {"next": 1, "first": 1, "delim": 1}


class Texts:
    """Padded texts of random words between delimiters, with labels everywhere."""

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(3, 31, (4, 11), generator=generator)
        mask = torch.ones_like(ids)
        ids[:, 0], ids[:, -1] = 1, 2
        ids[1, 7:], mask[1, 7:] = 0, 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def bert(**settings: object) -> tf.BertForMaskedLM:
    return tf.BertForMaskedLM(
        tf.BertConfig(
            vocab_size=31,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=37,
            max_position_embeddings=16,
            **settings,
        )
    )


def followed(table: list[dict[str, object]]) -> dict[tuple[int, int], float]:
    """How closely each guided head follows the pattern it was given."""
    given = dict(enumerate(HEADS))
    return {(r["layer"], r["head"]): r["closeness"] for r in table if given.get(r["head"]) == r["pattern"]}


def test_thirty_steps_move_the_guided_heads_to_their_patterns() -> None:
    model, texts = bert().train(), Texts()
    guidance = Guidance(heads=HEADS, alpha0=1, schedule="constant", reduction="row")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def audit() -> list[dict[str, object]]:
        batch = texts.batch(1000)
        with torch.no_grad(), al.record(model.eval()) as trace:
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        model.train()
        mask = batch["attention_mask"]
        return pattern_audit(trace, batch["input_ids"], patterns=list(HEADS), attention_mask=mask, tokens=TOKENS)

    before = followed(audit())
    with guide(model, guidance, tokens=TOKENS) as term:
        for step in range(30):
            batch = texts.batch(step)
            output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            loss = term(model, output, batch, step)
            assert loss.count == term.count(batch, step)
            optimizer.zero_grad()
            (term.weight(step) * loss.total / loss.count).backward()
            optimizer.step()
    after = followed(audit())
    assert before.keys() == after.keys() == {(layer, head) for layer in range(2) for head in range(3)}
    assert max(before.values()) < 0.3
    for (layer, head), closeness in after.items():
        # Next has to find its way through the position embeddings, and thirty steps bring it part of it.
        assert closeness > (0.5 if head == 0 else 0.9), (layer, head, after)


def test_dropout_does_not_reach_the_loss() -> None:
    model, batch = bert(attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0).train(), Texts().batch(0)
    term_of = Guidance(heads=HEADS, layers=(0,))
    totals = []
    with guide(model, term_of, tokens=TOKENS) as term:
        for _ in range(2):
            output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            totals.append(term(model, output, batch, 0).total.item())
    assert totals[0] == totals[1]


def test_gradients_are_the_same_under_checkpointing() -> None:
    batch = Texts().batch(0)
    slopes = []
    for checkpointing in (False, True):
        torch.manual_seed(5)
        model = bert(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with guide(model, Guidance(heads=HEADS), tokens=TOKENS) as term:
            output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            (output.logits.square().mean() + term(model, output, batch, 0).total).backward()
        slopes.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, again in zip(*slopes, strict=True):
        assert_close(again, plain)


def test_a_window_cuts_the_pattern() -> None:
    settings = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tf.MistralForCausalLM(
        tf.MistralConfig(vocab_size=31, intermediate_size=37, sliding_window=3, max_position_embeddings=16, **settings)
    )
    batch = Texts().batch(0)
    with torch.no_grad(), al.record(model) as trace:
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    first = layer_targets("first", trace[0].call, batch["input_ids"], attention_mask=batch["attention_mask"])
    assert first.rows[0, 0].tolist() == [True] * 3 + [False] * 8


def test_afterwards_the_model_is_plain() -> None:
    model, batch = bert().eval(), Texts().batch(0)
    before = model.config._attn_implementation
    with guide(model, Guidance(heads={"next": 1})) as term:
        model(input_ids=batch["input_ids"])
    assert model.config._attn_implementation == before
    assert len(term.by_head()) == 2
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def small(kind: str) -> Transformer:
    torch.manual_seed(3)
    return Transformer(TransformerConfig(kind=kind, vocab=31, width=24, heads=4, layers=2))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_as_a_term_of_the_training_loop(tmp_path: Path, accumulate: int) -> None:
    model = small("encoder")
    guidance = Guidance(heads=HEADS, alpha0=10, hold=0.75, steps=20, reduction="row")
    settings = Settings(
        steps=20, recipe=Recipe(lr=1e-2), accumulate=accumulate, log_every=1, device="cpu", precision="no"
    )
    with guide(model, guidance, tokens=TOKENS) as term:
        train(model, Texts(), terms=[CrossEntropy(), term], settings=settings, run_dir=tmp_path / "run")
        lines = al_metrics(tmp_path / "run")
    assert lines[-1]["guidance"] < lines[0]["guidance"] / 2
    # At the last step alpha is 0: the loss is the task's alone.
    assert lines[-1]["loss"] == pytest.approx(lines[-1]["cross_entropy"], rel=1e-5)


def al_metrics(run: Path) -> list[dict[str, float]]:
    from attnlab.training import read_metrics

    return [line["values"] for line in read_metrics(run) if line["kind"] == "train"]


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_translation_has_a_term_for_each_kind(kind: str) -> None:
    model = small("encoder-decoder")
    batch = Texts().batch(0)
    batch["decoder_input_ids"] = torch.randint(3, 31, (4, 5))
    guidance = Guidance(heads={"first": 1, "same": 1}, kind=kind, reduction="row")
    with guide(model, guidance) as term:
        output = model(
            batch["input_ids"],
            attention_mask=batch["attention_mask"].bool(),
            decoder_input_ids=batch["decoder_input_ids"],
        )
        loss = term(model, output, batch, 0)
    assert int(loss.count) == int(term.count(batch, 0)) == {"encoder": 40, "decoder": 20, "cross": 20}[kind]
    loss.total.backward()
    assert isinstance(term, GuidanceTerm)


def test_a_recorded_causal_model() -> None:
    model = tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=31, n_embd=24, n_layer=2, n_head=3, n_positions=16, bos_token_id=1, eos_token_id=2)
    )
    batch = Texts().batch(0)
    with al.record(model) as trace:
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    loss = guidance_loss(trace, Guidance(heads={"prev": 2}), batch["input_ids"], attention_mask=batch["attention_mask"])
    loss.total.backward()
    assert model.transformer.h[0].attn.c_attn.weight.grad.abs().max() > 0
