"""``python -m papers value-aware``: its models, windows and scores, and its parts from training to claims."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attnlab.adapters import swap
from attnlab.data import IGNORED, TokenStore, load_tokeniser, train_wordpiece, write_store
from papers.__main__ import main
from papers.common.claims import judge
from papers.common.row_store import Part
from papers.value_aware import claims
from papers.value_aware.causal_lm import EXACT, causal_loss, causal_model, kernel_specs, sliding_windows
from papers.value_aware.config import CONFIGS, KEYS, ValueAwareConfig
from papers.value_aware.masked_lm import continued_model, masked_score, table_1_specs
from papers.value_aware.run import Folders, part_names, reproduce, run_part
from papers.value_aware.tables import collect, merged_with, notes_of
from papers.value_aware.training import Rendezvous, plan_steps
from papers.value_aware.words import articles_of, prepare_words

WORDS = list("abcdefghijklmnopqrs")
CONFIG = ValueAwareConfig(
    kernels=("exp", "poly"),
    lm_layers=1,
    lm_width=6,
    lm_heads=2,
    lm_length=17,
    lm_batch=3,
    lm_steps=2,
    lm_context=11,
    lm_r=(1, 4, 17),
    mlm_short=13,
    mlm_long=29,
    mlm_tokens=58,
    mlm_steps=2,
    mlm_r=(1, 5, 29),
    mlm_lsh=((4, 2),),
    between_r=(2,),
    between_rows=1,
    sweep_every=2,
    curve_points=1,
    eval_batch=5,
)


def test_the_papers_settings_have_a_name() -> None:
    """Table 4 and A.2: 8 instances of 512 tokens in a batch, two epochs of ten million of them."""
    paper = CONFIGS["paper"]
    assert (paper.seed, paper.mlm_lr, paper.mlm_warmup, paper.mlm_clip, paper.mlm_dropout) == (42, 5e-6, 0.1, 5.0, 0.0)
    assert (paper.mlm_short, paper.mlm_long, paper.mlm_tokens) == (512, 4096, 4096)
    assert paper.mlm_steps == pytest.approx(2 * 10e6 / 8, rel=0.01)
    assert (paper.lm_layers, paper.lm_width, paper.lm_width // paper.lm_heads, paper.lm_length) == (6, 512, 64, 512)
    assert (paper.lm_batch, paper.lm_lr, paper.lm_clip, paper.lm_context) == (128, 5e-4, None, 400)
    assert round(paper.lm_warmup * paper.lm_steps) == 4000


def test_the_papers_causal_models_read_whole_words() -> None:
    """Issue 20, point 12: A.2's 156M parameters need WikiText-103's vocabulary."""
    paper = CONFIGS["paper"]
    assert paper.lm_vocabulary == "words"
    with torch.device("meta"):
        model = causal_model(paper, "exp", vocab=267_744)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(156e6, rel=0.01)


LINES = [" = A title = \n", " \n", " The cat <unk> sat . \n", " It @-@ sat . \n", " = Other = \n", " the END \n"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stores of a tiny WikiText-103 by whole words."""
    source, out = tmp_path_factory.mktemp("wikitext"), tmp_path_factory.mktemp("words") / "stores"
    for split in ("train", "valid", "test"):
        (source / f"wiki.{split}.tokens").write_text("".join(LINES * 4))
    prepare_words(source, out)
    return out


def test_words_are_those_of_the_training_file(words: Path, tmp_path: Path) -> None:
    tokeniser = load_tokeniser(words / "tokenizer")
    path = tmp_path / "wiki.tokens"
    path.write_text("".join(LINES))
    first, second = articles_of(path)
    assert first == "= A title = <eos> The cat <unk> sat . <eos> It @-@ sat ."
    # As published: with its cases, with @-@, and with <unk> as the one unknown word.
    assert tokeniser.decode(tokeniser.encode_batch([second])[0]) == "= Other = <eos> the END"
    [ids] = tokeniser.encode_batch([first])
    assert ids.count(tokeniser.specials.unk) == 1
    assert tokeniser.vocab_size == 4 + len(set((first + " " + second).split()) - {"<unk>"})
    with pytest.raises(ValueError, match=r"holds no wiki.train.tokens"):
        prepare_words(tmp_path / "nowhere", tmp_path / "out")


def test_a_causal_part_by_whole_words(words: Path, corpus: Path, model: Path, tmp_path: Path) -> None:
    by_words = replace(CONFIG, lm_vocabulary="words", kernels=("exp",))
    run_part("lm-exp", by_words, Folders(corpus, model, words), tmp_path)
    rows = collect(by_words, tmp_path, ["lm-exp"])["tables"]["table_2"]
    exact = next(row for row in rows if row["mechanism"] == "softmax")
    # Every word but the first, <unk> and the ends of lines and articles among them.
    assert exact["predicted"] == 4 * (15 + 1 + 6 + 1) - 1
    assert exact["perplexity"] == pytest.approx(math.exp(exact["loss"]))
    with pytest.raises(ValueError, match="has a FastTokeniser, but lm_vocabulary is 'words'"):
        run_part("lm-exp", by_words, Folders(corpus, model, corpus), tmp_path / "other")
    with pytest.raises(ValueError, match="name by --words"):
        reproduce(by_words, folders=Folders(corpus, model), out=tmp_path / "o.json", work=tmp_path / "work")


def test_the_papers_config_does_not_take_the_shipped_vocabulary(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["value-aware", "--config", "paper", "--corpus", str(corpus), "--work", str(tmp_path / "work")]
    assert main([*command, "--out", str(tmp_path / "o.json")]) == 2
    assert "name it by --model" in capsys.readouterr().err
    assert main([*command, "--out", str(tmp_path / "o.json"), "--only", "lm"]) == 2
    assert "name by --words" in capsys.readouterr().err


def test_notes_say_how_much_of_the_text_is_scored() -> None:
    """Issue 20, point 12."""
    assert notes_of(CONFIG)["table_1"].endswith("Scored on every batch.")
    assert notes_of(replace(CONFIG, table_every=4))["table_1"].endswith("Scored on one batch in 4.")
    assert notes_of(replace(CONFIG, sweep_every=3))["figure_1"] == "Scored on one batch in 3."


def test_a_masked_lm_that_does_not_fit_is_refused(corpus: Path, model: Path, tmp_path: Path) -> None:
    from transformers import BertForMaskedLM, RobertaConfig, RobertaForMaskedLM

    roberta = RobertaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    RobertaForMaskedLM(roberta).save_pretrained(tmp_path / "roberta")
    with pytest.raises(ValueError, match="of type 'roberta'; only a BERT"):
        continued_model(tmp_path / "roberta", positions=13, dropout=0.0)
    small = BertForMaskedLM.from_pretrained(model)
    small.resize_token_embeddings(7)
    small.save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match="tokens and the model 7"):
        run_part("mlm-short", CONFIG, Folders(corpus, tmp_path / "small"), tmp_path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four stores of words that follow one another, and their tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    texts = [" ".join(WORDS[(start + i) % 19] for i in range(71)) for start in rng.integers(0, 19, 12)]
    tokeniser = train_wordpiece(texts, vocab_size=64)
    tokeniser.save(folder / "tokenizer")
    tokeniser = load_tokeniser(folder / "tokenizer")
    for name, part in {
        "train": texts[:6],
        "valid": texts[6:8],
        "wikitext103-valid": texts[8:10],
        "wikitext103-test": texts[10:],
    }.items():
        write_store(folder / name, part, tokeniser)
    meta = folder / "wikitext103-test" / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"words": 144, "unknown_words": 2}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A tiny BERT with 13 positions and heads of 4."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = BertConfig(
        vocab_size=64,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=13,
        attention_probs_dropout_prob=0.0,
        type_vocab_size=1,
    )
    BertForMaskedLM(config).save_pretrained(folder)
    return folder


def test_windows_predict_every_token_once_with_context() -> None:
    store = TokenStore(np.arange(100, 167), np.array([0, 23, 67]))
    tokens, labels = sliding_windows(store, 2, length=17, context=11)
    stream = [*range(100, 123), 2, *range(123, 167), 2]
    assert [int(t) for t in labels[labels != IGNORED]] == stream[1:]
    first = (labels != IGNORED).argmax(1)
    assert first[0] == 1
    assert (first[1:] >= 11).all()
    assert (tokens[:, 1:][labels[:, 1:] != IGNORED] == labels[:, 1:][labels[:, 1:] != IGNORED]).all()


def test_unknown_words_are_context_and_no_labels() -> None:
    store = TokenStore(np.array([5, 1, 6, 7, 1]), np.array([0, 5]))
    tokens, labels = sliding_windows(store, 2, length=4, context=2, unknown=1)
    assert tokens.tolist() == [[5, 1, 6, 7], [6, 7, 1, 2]]
    assert labels.tolist() == [[-100, -100, 6, 7], [-100, -100, -100, 2]]


def test_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="too few for one window of 17"):
        sliding_windows(TokenStore(np.arange(5), np.array([0, 5])), 2, length=17, context=11)


def test_causal_loss_of_a_uniform_model_is_log_of_the_vocabulary() -> None:
    model = causal_model(CONFIG, "exp", vocab=64).eval()
    torch.nn.init.zeros_(model.tokens.weight)
    labels = torch.tensor([[-100, -100, 7, 9, 3]])
    score = causal_loss(model, [{"input_ids": torch.tensor([[5, 6, 7, 9, 3]]), "labels": labels}])
    assert score.tokens == 3
    assert score.loss == pytest.approx(math.log(64))
    # Three tokens that are two words.
    assert score.perplexity(2) == pytest.approx(64**1.5)


@pytest.mark.parametrize("kernel", list(EXACT))
def test_value_aware_with_one_key_more_than_the_width_is_exact_for_each_kernel(kernel: str) -> None:
    model = causal_model(CONFIG, kernel, vocab=64).eval()
    tokens = torch.randint(0, 64, (2, 17))
    windows = [{"input_ids": tokens, "labels": tokens}]
    exact = causal_loss(model, windows).loss
    oblivious, aware = kernel_specs(kernel, 4)
    with swap(model, aware):
        assert causal_loss(model, windows).loss == pytest.approx(exact, rel=1e-5)
    with swap(model, oblivious):
        assert abs(causal_loss(model, windows).loss - exact) > 1e-6


def test_positions_repeat_in_parts_and_the_first_part_is_unchanged(model: Path) -> None:
    from transformers import BertForMaskedLM

    own = BertForMaskedLM.from_pretrained(model).bert.embeddings.position_embeddings.weight.detach()
    short, long = (continued_model(model, positions=n, dropout=0.0) for n in (13, 29))
    places = long.bert.embeddings.position_embeddings.requires_grad_(False)
    assert places.part.shape == (3, 8)
    table = places(torch.arange(29))
    assert torch.equal(table[:13], own)
    torch.testing.assert_close(table[13:26] - own, places.part[1].expand(13, 8))
    torch.testing.assert_close(table[26:] - own[:3], places.part[2].expand(3, 8))
    assert places.part[1:].std() == pytest.approx(float((own - own.mean(0)).std()), rel=0.5)
    tokens = torch.randint(5, 24, (2, 13))
    with torch.no_grad():
        torch.testing.assert_close(short.eval()(tokens).logits, long.eval()(tokens).logits)


def test_masked_score_counts_wrong_answers(model: Path) -> None:
    net = continued_model(model, positions=13, dropout=0.0).eval()
    tokens = torch.randint(5, 24, (2, 13))
    answers = net(tokens).logits.argmax(-1)
    labels = torch.full_like(tokens, IGNORED)
    labels[:, 3:7] = answers[:, 3:7]
    labels[0, 3] = (answers[0, 3] + 1) % 64
    score = masked_score(net, [{"input_ids": tokens, "labels": labels}])
    assert (score["mlm_error"], score["predicted"]) == (12.5, 8)


def test_steps_are_planned_by_the_cost_of_a_step() -> None:
    rates = {"lm-exp": 8.0, "lm-poly": 2.0, "mlm-long": 4.0, "mlm-short": 4.0}
    # Costs in device seconds: 1/32 + 1/8 for the causal pair, 1/16 + 1/16 for the masked one.
    assert plan_steps(rates, seconds=100, share={"lm": 0.75, "mlm": 0.25}) == {"lm": 480, "mlm": 200}
    assert plan_steps({"lm-exp": 5.0}, seconds=10, share={"lm": 0.75, "mlm": 0.25}) == {"lm": 50}


def test_a_failing_mechanism_is_noted_and_the_others_are_measured(tmp_path: Path) -> None:
    part = Part(tmp_path / "part.json")

    def measure(spec: str) -> dict[str, float]:
        if spec == "bad":
            raise RuntimeError("out of memory\nand more")
        return {"loss": 1.5}

    part.rows("figure_2", {"bad": {"r": 1}, "good": {"r": 2}}, measure)
    stored = json.loads((tmp_path / "part.json").read_text())
    assert stored["tables"] == {"figure_2": [{"r": 2, "loss": 1.5}]}
    assert stored["facts"] == {"failed: figure_2 bad": "out of memory"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernels": ("cosine",)}, "exp, poly and elu"),
        ({"lm_context": 512}, "lm_context"),
        ({"mlm_tokens": 100}, "no row of 2048"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ValueAwareConfig(**change)  # type: ignore[arg-type]


def test_unknown_group_is_refused() -> None:
    with pytest.raises(ValueError, match="lm or mlm"):
        part_names(CONFIG, "both")


def test_parts_fill_every_table_and_the_claims_read_them(corpus: Path, model: Path, tmp_path: Path) -> None:
    names = part_names(CONFIG)
    assert names == ["mlm-long", "mlm-short", "lm-exp", "lm-poly"]
    for name in names:
        run_part(name, CONFIG, Folders(corpus, model), tmp_path)
    result = collect(CONFIG, tmp_path, names)
    tables = result["tables"]
    assert set(tables) == set(KEYS)
    assert not [fact for facts in result["parts"].values() for fact in facts if fact.startswith("failed")]

    rows = {row["mechanism"]: row for row in tables["table_1"]}
    assert set(rows) == set(table_1_specs(4))
    assert rows["value-aware:r=d+1"]["spec"] == "value-aware:r=5"
    assert rows["value-aware:r=d+1"]["loss"] == pytest.approx(rows["softmax"]["loss"], rel=1e-5)
    assert rows["softmax"]["mlm_error_paper"] == 24.2
    assert "mlm_error_paper" not in rows["orf:features=256,variant=corrected"]

    cells = {(row["kernel"], row["mechanism"]): row for row in tables["table_2"]}
    assert len(cells) == 10
    for kernel in CONFIG.kernels:
        exact, aware = cells[kernel, "softmax"], cells[kernel, "value-aware:r=d+1"]
        assert aware["perplexity"] == pytest.approx(exact["perplexity"], rel=1e-5)
        # 142 words that are known, and every token but the first of both documents with their </s>.
        assert exact["predicted"] == 2 * 72 - 1
        assert exact["perplexity"] == pytest.approx(math.exp(exact["loss"] * 143 / 142))
    assert cells["poly", "top-r:r=1"]["perplexity_paper"] == 6700.2

    swept = {(row["family"], row["r"]) for row in tables["figure_1"]}
    assert swept >= {(family, r) for family in ("top-r", "window") for r in CONFIG.mlm_r}
    whole = [row["loss"] for row in tables["figure_1"] if row["r"] == 29]
    assert whole[0] == pytest.approx(whole[1], rel=1e-5)
    assert {(row["kernel"], row["r"]) for row in tables["figure_2"]} == {
        (kernel, r) for kernel in CONFIG.kernels for r in CONFIG.lm_r
    }
    assert [row["step"] for row in tables["figure_3_curves"] if row["model"] == "long"] == [0, 2]
    assert {row["model"]: row["length"] for row in tables["figure_3"]} == {
        "long": CONFIG.mlm_long,
        f"long, read at {CONFIG.mlm_short}": CONFIG.mlm_short,
        "short": CONFIG.mlm_short,
    }

    verdicts = {claim.name: claim.test(result).state for claim in claims.CLAIMS if "kernel" not in claim.name}
    assert verdicts["ova-aware-is-exact"] == "held"


def test_a_saved_model_is_scored_without_training_again(
    corpus: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from papers.value_aware import masked_lm as value_aware_mlm

    run_part("mlm-short", CONFIG, Folders(corpus, model), tmp_path)
    before = json.loads((tmp_path / "mlm-short.json").read_text())
    monkeypatch.setattr(value_aware_mlm, "fit", None)
    run_part("mlm-short", CONFIG, Folders(corpus, model), tmp_path)
    assert json.loads((tmp_path / "mlm-short.json").read_text()) == before


@pytest.mark.slow
def test_processes_agree_on_the_steps_and_leave_a_results_file(corpus: Path, model: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, lm_steps=None, mlm_steps=None, train_seconds=4.0, probe_seconds=0.5)
    out = tmp_path / "value-aware.json"
    reproduce(config, folders=Folders(corpus, model), out=out, work=tmp_path / "work", seconds=300)
    result = json.loads(out.read_text())
    assert result["unfinished"] == {}
    assert set(result["tables"]) == set(KEYS)
    steps = {name: part["training"]["steps"] for name, part in result["parts"].items()}
    assert steps["lm-exp"] == steps["lm-poly"]
    assert steps["mlm-long"] == steps["mlm-short"]
    with pytest.raises(ValueError, match="earlier run"):
        reproduce(config, folders=Folders(corpus, model), out=out, work=tmp_path / "work")


def test_masked_models_trained_again_leave_no_row_of_earlier_ones(tmp_path: Path) -> None:
    def made(work: str, model: str, step: int, error: float) -> None:
        part = Part(tmp_path / work / f"mlm-{model}.json")
        part.row("figure_3", model=model, mlm_error=error, predicted=10_000)
        part.row("figure_3_curves", model=model, step=step, mlm_error=error)

    for work, step, long, short in (("one", 7, 40.0, 45.0), ("two", 5, 44.0, 44.5)):
        (tmp_path / work).mkdir()
        made(work, "long", step, long)
        made(work, "short", step, short)
    words = Part(tmp_path / "one" / "lm-exp.json")
    words.row("table_2", kernel="exp", mechanism="softmax", perplexity=7.0)
    words.fact("training", {"steps": 3})
    first = collect(CONFIG, tmp_path / "one", ["mlm-long", "mlm-short", "lm-exp"])
    # 5 points, and a standard error of 0.70 for each proportion in per cent.
    assert first["intervals"]["ova-longer-is-better"] == pytest.approx([3.63, 6.37], abs=0.01)
    second = merged_with(first, collect(CONFIG, tmp_path / "two", ["mlm-long", "mlm-short"]))
    assert [row["step"] for row in second["tables"]["figure_3_curves"]] == [5, 5]
    assert second["tables"]["table_2"] == first["tables"]["table_2"]
    assert second["parts"]["lm-exp"]["training"] == {"steps": 3}
    verdict = next(claim for claim in claims.CLAIMS if claim.name == "ova-longer-is-better")
    assert judge(verdict, {"value-aware": first}).state == "held"
    assert judge(verdict, {"value-aware": second}).state == "not testable at this scale"


def test_parts_that_are_late_are_ended_and_named(corpus: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "value-aware.json"
    result = reproduce(CONFIG, folders=Folders(corpus, model), out=out, work=tmp_path / "work", only="lm", seconds=0.1)
    assert set(result["unfinished"]) == {"lm-exp", "lm-poly"}
    assert json.loads(out.read_text())["name"] == "value-aware"


def test_a_resumed_part_keeps_its_rows_and_measures_only_the_others(tmp_path: Path) -> None:
    first = Part(tmp_path / "lm-exp.json", keys=KEYS)
    first.row("table_2", kernel="exp", mechanism="softmax", perplexity=7.0)
    first.row("lm_curves", kernel="exp", step=0, loss=9.0)
    again = Part(tmp_path / "lm-exp.json", keys=KEYS)
    asked = []

    def measure(spec: str) -> dict[str, float]:
        asked.append(spec)
        return {"perplexity": 8.0}

    wanted = {spec: {"kernel": "exp", "mechanism": spec} for spec in ("softmax", "top-r:r=1")}
    again.rows("table_2", wanted, measure)
    # A step that is evaluated once more, after a kill, takes the place of its row.
    again.row("lm_curves", kernel="exp", step=0, loss=9.5)
    assert asked == ["top-r:r=1"]
    assert [row["perplexity"] for row in again.content["tables"]["table_2"]] == [7.0, 8.0]
    assert again.content["tables"]["lm_curves"] == [{"kernel": "exp", "step": 0, "loss": 9.5}]


def test_a_resumed_training_has_the_steps_that_were_planned(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path, "lm-exp")
    assert rendezvous.planned() is None
    (tmp_path / "steps.json").write_text('{"lm": 17, "mlm": 5}')
    assert rendezvous.planned() == 17
