"""ABC's experiments in the small: the fast forms are the slow ones, rows find their place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import attnlab as al
from attnlab.models import MaskedLM, Transformer, TransformerConfig
from papers.abc import decoding, doc_mt, lm, mlm, mt
from papers.abc.dense_attention import DenseKernel, DenseSlots, dense_attention
from papers.abc.encoder import SomeMasked, from_bert
from papers.abc.family import family_rows
from papers.abc.run import EXPERIMENTS
from papers.common.finetuning import Classifier, Tuning, tune
from papers.common.row_store import Part, begin_work, collect
from papers.effective.glue import Examples
from tests.adapters import zoo as hf_zoo
from tests.tolerance import assert_close

SLOTS = (
    "abc-mlp:slots=5",
    "abc-mlp:slots=3,activation=relu",
    "abc-mlp:slots=3,activation=sigmoid",
    "abc-random:slots=3",
    "abc-linformer:slots=3,length=31",
    "abc-mlp:slots=3,normalise=write",
)
KERNELS = ("rfa:features=64", "t2r:features=19", "kernel:elu")


@pytest.mark.parametrize("spec", [*SLOTS, *KERNELS])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_dense_form_is_the_mechanism(spec: str, padded: bool, causal: bool) -> None:
    torch.manual_seed(0)
    mech = al.mechanism(spec)
    q, k, v = torch.randn(2, 4, 23, 8), torch.randn(2, 2, 23, 8), torch.randn(2, 2, 23, 8)
    inputs = [t.requires_grad_() for t in (q, k, v, torch.randn(2, 23, 7))]
    seen = torch.ones(2, 23, dtype=torch.bool)
    seen[0, :3], seen[1, 20:] = False, False
    call = al.AttentionCall(q, k, v, x=inputs[3], key_visible=seen if padded else None, causal=causal)
    dense = DenseSlots(mech) if spec in SLOTS else DenseKernel(mech)
    outputs = [m(call) for m in (mech, dense)]
    assert_close(outputs[1], outputs[0])
    learned = list(mech.parameters()) if isinstance(mech, torch.nn.Module) else []
    weight = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad((out * weight).sum(), [*inputs, *learned], allow_unused=True) for out in outputs]
    for slow, fast in zip(*gradients, strict=True):
        if slow is not None:
            assert_close(fast, slow)


def test_the_dense_form_is_undone_and_leaves_the_names_of_parameters() -> None:
    config = TransformerConfig(
        kind="decoder", vocab=23, width=16, heads=2, layers=2, causal_attention=("abc-mlp:slots=3", "rfa")
    )
    model = Transformer(config)
    names, kinds = list(model.state_dict()), [type(b.attention.mechanism) for b in model.decoder.blocks]
    with dense_attention(model):
        assert [type(b.attention.mechanism) for b in model.decoder.blocks] == [DenseSlots, DenseKernel]
    assert list(model.state_dict()) == names
    assert [type(b.attention.mechanism) for b in model.decoder.blocks] == kinds


def test_a_converted_hugging_face_model_runs_densely_too() -> None:
    model = al.convert(hf_zoo.build("llama"), "abc-mlp:slots=3")
    tokens = torch.randint(3, 61, (2, 11))
    with torch.no_grad():
        expected = model(tokens).logits
        with dense_attention(model):
            assert_close(model(tokens).logits, expected)


def test_bert_becomes_our_transformer() -> None:
    theirs = hf_zoo.build("bert")
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    ours = from_bert(theirs.eval())
    tokens, mask = torch.randint(3, 61, (2, 11)), torch.ones(2, 11, dtype=torch.long)
    mask[1, 7:] = 0
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=mask).logits
        logits = ours(tokens, attention_mask=mask).logits
    assert_close(logits[mask.bool()], expected[mask.bool()])


def test_a_fixed_number_of_places_gives_the_same_loss() -> None:
    model = from_bert(hf_zoo.build("bert"))
    tokens = torch.randint(3, 61, (2, 29))
    labels = torch.where(torch.rand(2, 29) < 0.2, tokens, -100)
    batch = {"input_ids": tokens, "labels": labels}
    output = model(tokens)
    fixed, plain = (term(model, output, batch, 0) for term in (SomeMasked(), MaskedLM()))
    torch.testing.assert_close(fixed.total, plain.total)
    assert int(fixed.count) == int(plain.count) == int((labels != -100).sum())


def test_classifiers_start_alike_and_leave_their_encoder_alone() -> None:
    encoder = al.convert(from_bert(hf_zoo.build("bert")), "abc-mlp:slots=3")
    before = {n: p.detach().clone() for n, p in encoder.named_parameters()}
    first, second = (Classifier(encoder, classes=2, seed=5) for _ in range(2))
    for p, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, other)
    # Class 1 is what begins with token 7; rows of several lengths, so that there is padding.
    draw = torch.Generator().manual_seed(3)
    ids = [[7 if i % 2 else 5, *torch.randint(9, 61, (2 + i % 5,), generator=draw).tolist()] for i in range(40)]
    some = Examples(ids, [[0] * len(row) for row in ids], [float(row[0] == 7) for row in ids], [("",)] * 40)
    with dense_attention(encoder):
        fitted, predicted = tune(
            {"a": encoder}, {"train": some, "dev": some}, Tuning(batch=8, length=11, lr=3e-3, epochs=8)
        )
    assert fitted.steps == 40
    assert (predicted["a"]["dev"] == torch.tensor(some.labels)).float().mean() > 0.9
    assert all(torch.equal(before[n], p) for n, p in encoder.named_parameters())


def test_every_row_of_the_paper_is_trained() -> None:
    from papers.common.folders import paper_table

    for table in lm.TABLES:
        variants = lm.variants_of(table, lm.CONFIGS["paper"])
        assert {(r["model"], r["n"]) for r in paper_table("abc-lm", table)} == {(v.model, v.n) for v in variants}
    named = {"3a": mt.TABLE_3A, "7": mt.TABLE_7}
    ours = {(v.model, v.cross, v.causal) for v in named["3a"]}
    assert {(r["model"], r["cross"], r["causal"]) for r in paper_table("abc-mt", "table_3a")} == ours
    assert {(r["cross"], r["causal"]) for r in paper_table("abc-mt", "table_5")} == {
        (v.cross, v.causal) for v in mt.TABLE_5
    }
    seven = {(v.model, v.cross, v.causal) for v in named["7"]} | {("BASE", None, None)}
    seven |= {("MLP-exp", 32, n) for n in (8, 32)}
    assert {(r["model"], r["cross"], r["causal"]) for r in paper_table("abc-mt", "table_7")} == seven
    assert {r["model"] for r in paper_table("abc-doc-mt", "table_3b")} == {v.model for v in doc_mt.VARIANTS}
    wanted = {(r["model"], r["n"]) for r in paper_table("abc-mlm", "table_4")}
    assert wanted <= {(v.model, v.n) for v in mlm.VARIANTS}


def test_results_are_collected_from_several_folders(tmp_path: Path) -> None:
    for i, seed in enumerate((0, 1)):
        work = tmp_path / f"run-{i}"
        begin_work(work, {"width": 8}, seed=seed)
        part = Part(work / "part-x.json", keys=lm.KEYS)
        for ppl in (90.0, 100.0 + i):
            part.row("table_2a", model="BASE", n=None, context=480, perplexity=ppl, seed=seed)
    out = tmp_path / "results" / "abc-lm.json"
    result = collect("abc-lm", "ABC", [tmp_path / "run-0", tmp_path / "run-1"], out, keys=lm.KEYS, notes=lm.NOTES)
    assert result == json.loads(out.read_text())
    assert [(r["seed"], r["perplexity"], r["perplexity_paper"]) for r in result["tables"]["table_2a"]] == [
        (0, 100.0, 19.0),
        (1, 101.0, 19.0),
    ]


def run(name: str, *arguments: str) -> None:
    from papers.__main__ import main

    assert main([name, *arguments]) == 0


def test_decoding_from_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "abc-decoding.json"
    small = ("layers=1", "batch=2", "lengths=[4,8,16,32]", "repeats=1", "together=1")
    run("abc-decoding", "--work", str(tmp_path / "work"), "--out", str(out), "--set", *small)
    tables = json.loads(out.read_text())["tables"]
    assert {r["model"] for r in tables["figure_1"]} == set(decoding.MODELS)
    memory = {(r["model"], r["length"]): r["memory"] for r in tables["figure_2"]}
    for name in decoding.MODELS:
        grows = memory[name, 32] > 1.5 * memory[name, 8]
        assert grows == (name == "softmax")
    exponents = {(r["model"], r["quantity"]): r["exponent"] for r in tables["exponents"]}
    assert exponents["softmax", "memory"] == pytest.approx(1, abs=0.1)
    assert exponents["ABC_MLP", "memory"] == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match="four rising lengths"):
        decoding.AbcDecodingConfig(lengths=(8, 4, 2, 1))


def test_settings_of_a_command_are_checked() -> None:
    from papers.common.folders import with_changes

    changed = with_changes(doc_mt.AbcDocMtConfig(), ["translation.width=8", "window=3"])
    assert (changed.translation.width, changed.window) == (8, 3)
    with pytest.raises(ValueError, match="has no setting 'widht'"):
        with_changes(mt.AbcMtConfig(), ["widht=3"])
    names = {"abc-lm", "abc-mt", "abc-doc-mt", "abc-mlm", "abc-decoding", "abc-distill", "abc-figures"}
    assert set(EXPERIMENTS) == names | {"abc-family"}


def test_the_table_of_the_family_is_what_the_code_says() -> None:
    of = {row["member"].strip("`"): row for row in family_rows()}
    assert {name for name, row in of.items() if row["causal"].startswith("no")} == {
        "abc-cluster", "abc-compressive", "abc-luna", "abc-workspace",
    }  # fmt: skip
    assert {name for name, row in of.items() if row["depends_on"] == "content"} == {
        "abc-cluster", "abc-hybrid", "abc-luna", "abc-mlp", "abc-select", "abc-workspace",
    }  # fmt: skip
