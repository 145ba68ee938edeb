"""ABC's language models from the command line, in the small: Table 2, Table 4, and distillation."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attnlab as al
from attnlab.data import IGNORED, load_tokeniser, train_wordpiece, write_store
from attnlab.models import Cache, Transformer, named_config
from papers.abc import decoding, distillation, lm, mlm
from papers.abc.dense_attention import DenseSlots
from papers.abc.lm_differences import differences
from tests.adapters import zoo as hf_zoo
from tests.papers.glue_files import write_mnli

WORDS = list("abcdefghijklmnopqrs")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of words that follow one another, and their tokenizer, no larger than the zoo's vocabulary."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [
        " ".join(WORDS[(start + i) % 19] for i in range(71)) for start in np.random.default_rng(0).integers(19, size=12)
    ]
    train_wordpiece(texts, vocab_size=hf_zoo.VOCABULARY).save(folder / "tokenizer")
    tokeniser = load_tokeniser(folder / "tokenizer")
    assert tokeniser.vocab_size <= hf_zoo.VOCABULARY
    held_out = {"valid": texts[8:10], "wikitext103-valid": texts[9:11], "wikitext103-test": texts[10:]}
    for name, lines in {"train": texts[:8], **held_out}.items():
        write_store(folder / name, lines, tokeniser)
    return folder


def saved(name: str, corpus: Path, folder: Path) -> Path:
    """A model of the zoo with the corpus's tokenizer."""
    hf_zoo.build(name).save_pretrained(folder)
    for path in (corpus / "tokenizer").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def run(name: str, *arguments: str | Path) -> dict[str, list[dict[str, Any]]]:
    """The tables that a command writes."""
    from papers.__main__ import main

    assert main([name, *map(str, arguments)]) == 0
    return json.loads(Path(arguments[arguments.index("--out") + 1]).read_text())["tables"]


def test_table_2_from_two_processes(corpus: Path, tmp_path: Path) -> None:
    small = (
        "width=8",
        "heads=1",
        "layers=1",
        "deep_layers=2",
        "batch=2",
        "deep_context=5",
        "contexts=[0,11]",
        "length=17",
    )
    halves = ['models=["BASE-None","Linformer-64"]', 'models=["ABC_RD-64","ABC_MLP-32","ABC_MLP-64"]']
    for i, half in enumerate(halves):
        work = tmp_path / str(i)
        run("abc-lm", "--corpus", corpus, "--tables", "table_2a", "--steps", 3, "--work", work, "--out", work / "r.json",
            "--set", *small, half)  # fmt: skip
    tables = run("abc-lm", "--collect", "--work", tmp_path / "0", tmp_path / "1", "--out", tmp_path / "r.json")
    wanted = {(v.model, v.n) for v in lm.TABLES["table_2a"]}
    assert {(r["model"], r["n"], r["context"]) for r in tables["table_2a"]} == {
        (*w, c) for w in wanted for c in (0, 11)
    }
    assert all(r["perplexity"] > 1 for r in tables["table_2a"])
    assert {(r["model"], r["n"]) for r in tables["training"]} == wanted
    for row in tables["training"]:
        assert row["tokens"] == 3 * 2 * 17
        # Parameters beyond the embeddings: 12 width^2 and some vectors; Linformer's and ABC's control besides.
        assert row["parameters"] - row["without_embeddings"] == 64 * 8
        assert row["tokens_per_parameter"] == row["tokens"] / row["without_embeddings"]
    assert {r["step"] for r in tables["curves"]} == {3}
    ends = {(r["model"], r["n"]): r["loss"] for r in tables["curves"]}
    assert {(r["model"], r["n"]): r["end"] for r in tables["table_2a_training"]} == ends


def test_perplexities_over_those_of_base_are_of_the_same_seed() -> None:
    perplexities = (
        (0, "BASE", None, 10.0),
        (0, "ABC_MLP", 64, 11.0),
        (1, "BASE", None, 100.0),
        (1, "ABC_MLP", 64, 130.0),
    )
    rows = [{"model": m, "n": n, "context": 0, "seed": seed, "perplexity": p} for seed, m, n, p in perplexities]
    # A seed that only one of them has counts for neither.
    rows.append({"model": "ABC_MLP", "n": 64, "context": 0, "seed": 2, "perplexity": 7.0})
    tables = lm.derived({"table_2a": rows})
    means = {row["model"]: row["times_base"] for row in tables["table_2a_means"]}
    assert means == {"BASE": 1.0, "ABC_MLP": pytest.approx(1.2)}
    assert [row["ABC_MLP-64"] for row in tables["table_2a_seeds"]] == pytest.approx([1.1, 1.3])


def deep(**perplexities: tuple[float, ...]) -> dict[str, list[dict[str, Any]]]:
    """Table 2b of these models, a perplexity for each seed."""
    memory = {"BASE": None, "ELU": 128}
    return {
        "table_2b": [
            {"model": model, "n": memory.get(model, 64), "seed": seed, "perplexity": value}
            for model, values in perplexities.items()
            for seed, value in enumerate(values)
        ]
    }


def test_the_interval_of_a_ratio_is_pooled_over_the_table() -> None:
    # Logarithms of (0, 0), (0, 2): without the models' and the seeds' means +-1/2 is left, so that s = 1 with one degree
    # of freedom, and the mean difference of 1 is known to t = 12.7.
    [row] = differences(deep(ABC_MLP=(1.0, 1.0), ELU=(1.0, math.exp(2))))
    assert row["first"] == "ABC_MLP-64"
    assert [math.log(row[name]) for name in ("ratio", "low", "high")] == pytest.approx(
        [-1, -1 - 12.706, -1 + 12.706], 1e-3
    )
    assert row["first_ahead"] == 1


def test_table_2b_has_a_row_for_every_kernel(corpus: Path, tmp_path: Path) -> None:
    tables = run(
        "abc-lm", "--corpus", corpus, "--tables", "table_2b", "--steps", 2, "--work", tmp_path, "--out",
        tmp_path / "r.json", "--set", "width=8", "heads=1", "deep_layers=2", "batch=2", "deep_context=5",
        "contexts=[0]", "length=17",
    )  # fmt: skip
    assert {(r["model"], r["n"]) for r in tables["table_2b"]} == {(v.model, v.n) for v in lm.TABLES["table_2b"]}
    assert {r["perplexity_paper"] for r in tables["table_2b"]} == {18.5, 22.8, 21.3, 20.8, 19.1}
    assert {r["perplexity_dev_paper"] for r in tables["table_2b_means"]} == {17.9, 22.0, 20.4, 20.1, 18.6}
    assert all(r["perplexity_dev"] not in (1.0, r["perplexity"]) for r in tables["table_2b"])


SMALL_DEEP = (
    "width=8", "heads=1", "deep_layers=2", "batch=2", "deep_context=5", "contexts=[0]", "length=17", "warmup=2",
)  # fmt: skip


def test_table_2b_as_the_paper_trains_it(corpus: Path, tmp_path: Path) -> None:
    """Nesterov's momentum at a rate of 1, and a T2R that starts from the trained BASE."""
    tables = run(
        "abc-lm", "--config", "paper", "--corpus", corpus, "--tables", "table_2b", "--steps", 4, "--work", tmp_path,
        "--out", tmp_path / "r.json", "--set", *SMALL_DEEP, "t2r_updates=0.5", 'models=["BASE-None","T2R-pretrained-64"]',
    )  # fmt: skip
    config = json.loads((tmp_path / "r.json").read_text())["config"]
    assert (config["recipe"]["kind"], config["recipe"]["lr"], config["final_norm"]) == ("nesterov", 1.0, False)
    training = {row["model"]: row for row in tables["training"]}
    assert (training["BASE"]["steps"], training["T2R-pretrained"]["steps"]) == (4, 2)
    assert training["T2R-pretrained"]["start"] == "BASE"
    rows = {row["model"]: row for row in tables["table_2b"]}
    assert rows["T2R-pretrained"]["perplexity_paper"] == 20.8
    assert all(math.isfinite(row["perplexity"]) for row in rows.values())


def test_a_pretrained_t2r_begins_with_the_weights_of_base() -> None:
    config = replace(lm.AbcLmConfig(), width=8, heads=1, deep_layers=2, t2r_pretrained=True)
    base, *_, pretrained = lm.variants_of("table_2b", config)
    runs = [lm.LmRun(v, 0, lm.build(config, "table_2b", v, vocab=64, seed=0)) for v in (base, pretrained)]
    torch.nn.init.normal_(runs[0].model.tokens.weight)
    features = {n: p.clone() for n, p in runs[1].model.named_parameters() if "mechanism" in n}
    lm.start_from_trained(runs[1:], runs[:1])
    after = dict(runs[1].model.named_parameters())
    assert features
    assert all(torch.equal(after[n], p) for n, p in features.items())
    assert all(torch.equal(after[n], p) for n, p in runs[0].model.named_parameters())
    with pytest.raises(ValueError, match="starts from the trained BASE; name it in models, too"):
        lm.variants_of("table_2b", replace(config, models=("T2R-pretrained-64",)))


def test_table_4_continued_and_as_converted(corpus: Path, tmp_path: Path) -> None:
    glue = tmp_path / "glue"
    write_mnli(glue, [("a b c", "d e")] * 12)
    tables = run(
        "abc-mlm", "--corpus", corpus, "--glue", glue, "--model", saved("bert", corpus, tmp_path / "bert"),
        "--seconds", 6, "--work", tmp_path / "work", "--out", tmp_path / "r.json", "--set", "length=29", "batch=2",
        "tune_length=13", "tune_batch=4", 'tasks=["MNLI"]', "seeds=[0]", 'epochs={"MNLI":1}',
    )  # fmt: skip
    models = {(r["model"], r["n"], r["continued"]) for r in tables["table_4"]}
    assert models == {(v.model, v.n, True) for v in mlm.VARIANTS} | {
        (v.model, v.n, False) for v in mlm.VARIANTS if v.n != 64
    }
    assert len(tables["pretraining"]) == 2 * len(mlm.VARIANTS)
    assert {r["part"] for r in tables["training"]} == {"continued", "MNLI"}
    losses = {(r["model"], r["n"], r["continued"]): r["loss"] for r in tables["pretraining"]}
    for row in tables["continuing"]:
        assert row["0"] == losses[row["model"], row["n"], False]
        assert row["end"] == losses[row["model"], row["n"], True]


@pytest.mark.parametrize("kind", ["masked", "sampled"])
def test_every_method_of_distillation_is_measured(kind: str, corpus: Path, tmp_path: Path) -> None:
    own = ("--corpus", corpus) if kind == "masked" else ("--sampled", "--rows", 8)
    name = "bert" if kind == "masked" else "llama"
    tables = run(
        "abc-distill", *own, "--model", saved(name, corpus, tmp_path / name), "--spec", "abc-mlp:slots=3", "--batch", 2,
        "--length", 13, "--seconds", 0.2, "--work", tmp_path / "work", "--out", tmp_path / "r.json", "--set",
        "points=1", "probe=1",
    )  # fmt: skip
    assert [r["method"] for r in tables["summary"]] == list(distillation.METHODS)
    ends = tables["ends"][0]
    for row in tables["summary"]:
        gap = (ends["converted"] - row["loss"]) / (ends["converted"] - ends["teacher"])
        assert row["gap_closed"] == pytest.approx(gap)
    assert [r["method"] for r in tables["closed_after"]] == list(distillation.METHODS)


def test_a_batch_without_a_label_teaches_nothing(corpus: Path, tmp_path: Path) -> None:
    """Of 26 tokens one batch in thirty hides none; its loss was NaN, and a run that ended on it failed."""
    model = al.load_model(saved("bert", corpus, tmp_path / "bert")).model
    case = distillation.masked_case(model, "abc-mlp:slots=3", corpus, batch=2, length=13)
    [full, *_] = [batch for batch in case.held_out if (batch["labels"] != IGNORED).any()]
    empty = {**full, "labels": torch.full_like(full["labels"], IGNORED)}
    loss = distillation.label_loss(model.eval(), empty, causal=False)
    loss.backward()
    assert loss == 0
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    with_empty = replace(case, held_out=[full, empty])
    expected = distillation.label_loss(model, full, causal=False).item()
    assert distillation.held_out_loss(model, with_empty) == expected


def test_a_method_that_diverges_does_not_stop_the_others(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(*_: Any, **__: Any) -> None:
        raise ValueError("the model stage diverged")

    monkeypatch.setattr(distillation, "distill", diverge)
    tables = run(
        "abc-distill", "--corpus", corpus, "--model", saved("bert", corpus, tmp_path / "bert"), "--spec",
        "abc-mlp:slots=3", "--batch", 2, "--length", 13, "--seconds", 0.1, "--work", tmp_path / "work", "--out",
        tmp_path / "r.json", "--set", "points=1", "probe=1",
    )  # fmt: skip
    assert [r["method"] for r in tables["summary"]] == ["continued", "continued, twice the rate"]
    facts = json.loads((tmp_path / "work" / "part-masked-0.json").read_text())["facts"]
    assert len(facts) == 4


def test_only_results_that_exist_are_drawn(tmp_path: Path) -> None:
    from papers.__main__ import main

    points = [(1.0, 0.2), (3.0, 0.7)]
    rows = [
        {"subject": subject, "method": method, "seconds": x, "gap_closed": y, **more}
        for subject, more in (("on a GPU", {"h200_seconds": 0.5}), ("on a CPU", {}))
        for method in ("continued", "distilled")
        for x, y in points
    ]
    (tmp_path / "abc-distill.json").write_text(json.dumps({"tables": {"curve": rows}}))
    assert main(["abc-figures", "--results", str(tmp_path), "--out", str(tmp_path / "docs")]) == 0
    [path] = (tmp_path / "docs").iterdir()
    drawn = path.read_text()
    assert drawn.count("seconds of an H200 alone") == 1
    assert drawn.count("distilled") == 2


@pytest.mark.parametrize("name", decoding.MODELS)
def test_a_step_of_decoding_begins_with_the_same_tensors_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors that a captured graph reads must live as long as the graph."""
    config = decoding.AbcDecodingConfig(batch=2, lengths=(4, 8, 16, 32), together=1)
    cross, causal = decoding.MODELS[name]
    model = Transformer(
        replace(named_config("translation-wmt14"), layers=1, cross_attention=cross, causal_attention=causal)
    ).eval()
    # The tensors themselves are kept, since the id of a freed tensor may be used again.
    seen: list[dict[int, Tensor]] = []
    decode = model.decode

    def noted(*given: Any, cache: Cache, **settings: Any) -> Any:
        memories = [*cache.layers, *cache.cross, *(m.state for m in cache.cross if m.state is not None)]
        held = [t for memory in memories for t in tensors_in(memory)]
        seen.append({id(t): t for t in held})
        assert cache.length == (0 if len(seen) == 1 else 7)
        return decode(*given, cache=cache, **settings)

    monkeypatch.setattr(model, "decode", noted)
    steps, held = decoding._steps(model, config, 7)
    for _ in range(3):
        steps()
    assert held == sum(t.numel() * t.element_size() for t in seen[1].values())
    for again in seen[2:]:
        assert again.keys() == seen[1].keys()


def tensors_in(thing: Any) -> list[Tensor]:
    """Every tensor that an object's attributes reach, but for those of a mechanism."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, nn.Module) or not hasattr(thing, "__dict__"):
        return []
    return [t for value in vars(thing).values() for t in tensors_in(value)]


@pytest.mark.parametrize("logits", [60.0, 200.0])
def test_the_dense_form_of_slots_that_fill_late(logits: float) -> None:
    """Control logits that rise over the text, so that early slots hold e^-60 of what comes: gradients are the member's.

    Beyond e^-87 such slots count as empty, and nothing overflows either.
    """
    torch.manual_seed(0)
    mech = al.AbcMlp(slots=3)
    q, k, v = (torch.randn(1, 2, 17, 5, requires_grad=True) for _ in range(3))
    x = (logits * (torch.arange(17.0) / 16 - 0.5))[None, :, None].requires_grad_()
    call = al.AttentionCall(q, k, v, x=x, causal=True)
    mech(call)
    with torch.no_grad():
        mech.weight.fill_(1.0)
    outs = [form(call) for form in (mech, DenseSlots(mech))]
    grads = [torch.autograd.grad(out.square().sum(), [q, k, v, x, mech.weight]) for out in outs]
    for dense in (outs[1], *grads[1]):
        assert dense.isfinite().all()
    if logits < 87:
        torch.testing.assert_close(outs[1], outs[0], atol=1e-4, rtol=1e-4)
        for dense, expected in zip(grads[1], grads[0], strict=True):
            torch.testing.assert_close(dense, expected, atol=1e-3, rtol=1e-3)


def test_attention_without_a_fused_kernel_is_softmax() -> None:
    torch.manual_seed(0)
    call = al.AttentionCall(*(torch.randn(2, 3, 5, 7) for _ in range(3)))
    torch.testing.assert_close(mlm.Unfused()(call), al.mechanism("softmax")(call))
