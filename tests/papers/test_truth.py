"""Readings against the truth: cases, scores, the product's mapping, and the command."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from attnlab.adapters import load_model, record, swap
from attnlab.data.bundled import bundled_text
from attnlab.models import Transformer, TransformerConfig
from attnlab.provenance import device_name
from papers.__main__ import main
from papers.truth.cases import Case, copy_cases, earlier_target, facts_cases, needle_cases, padded, recall_cases
from papers.truth.chemistry import FILES, Reaction, chemistry_cases, map_atoms, read_reactions, write_model
from papers.truth.config import CONFIGS
from papers.truth.measure import Subject, measure, scores_of_item
from papers.truth.readings import MAPS, Batch, query_row, read_batch, recorded_stack
from papers.truth.scores import area_under_curve, choose_heads, compare, precision_at, spread
from papers.truth.smiles import element
from papers.truth.tables import devices, tables_of

CONFIG = replace(CONFIGS["smoke"], length=160, sentences=3)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Whole words, and digits one by one."""
    import tokenizers
    import transformers

    from papers.truth import cases

    story = " ".join([*cases.OWNERS, *cases.TOYS, *cases.COLOURS, cases.BETWEEN])
    frame = needle_frame()
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Whitespace(), tokenizers.pre_tokenizers.Digits(individual_digits=True)]
    )
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["[UNK]", "[BOS]"])
    made.train_from_iterator([bundled_text(), story, frame, "Once upon a time, there were some friends had a"], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", bos_token="[BOS]")


def needle_frame() -> str:
    return "A special magic number is hidden 0 1 2 3 4 5 6 7 8 9 played with the"


Generator = Callable[[Any], list[Case]]
CAUSAL: dict[str, Generator] = {
    "needle": lambda tokenizer: needle_cases(tokenizer, bundled_text(), CONFIG),
    "needles": lambda tokenizer: needle_cases(
        tokenizer, bundled_text(), replace(CONFIG, length=260), task="needle-multikey"
    ),
    "copy": lambda tokenizer: copy_cases(tokenizer, bundled_text(), CONFIG),
    "facts": lambda tokenizer: facts_cases(tokenizer, bundled_text(), CONFIG),
    "recall": lambda tokenizer: recall_cases(CONFIG, 0),
}


@pytest.mark.parametrize("task", CAUSAL)
def test_the_source_of_a_copied_token_holds_it(task: str, tokenizer: Any) -> None:
    cases = CAUSAL[task](tokenizer)
    assert len(cases) >= CONFIG.cases
    for case in cases:
        assert case.targets, "a case without a target tells nothing"
        for target in case.targets:
            [source] = target.sources
            assert case.ids[source] == target.answer
            assert source < target.query < len(case.ids)
            assert source in target.candidates
            assert max(target.candidates) == target.query
            assert set(case.substitutes) - {target.answer}
    assert cases == CAUSAL[task](tokenizer), "cases are a pure function of the seed"


def test_reactions_map_atoms_to_atoms_of_their_element() -> None:
    text = Path("papers/truth/reactions.json").read_text(encoding="utf-8")
    entries = json.loads(text)["reactions"]
    assert len(entries) >= 1000
    assert len({entry["template"] for entry in entries}) >= 8
    assert len(text) < 300_000
    for entry in entries:
        reaction = Reaction.of(entry)
        before, after = reaction.atoms
        assert len(reaction.sources) == len(after)
        for atom, sources in zip(after, reaction.sources, strict=True):
            assert {element(reaction.tokens[before[i]]) for i in sources} <= {element(reaction.tokens[atom])}


def test_a_masked_atom_is_hidden_and_asked_for() -> None:
    reactions = read_reactions()[:5]
    vocabulary = {token: i for i, token in enumerate(["[UNK]", "[MASK]", *{t for r in reactions for t in r.tokens}])}
    for seen, masked in zip(
        chemistry_cases(reactions, vocabulary, CONFIG),
        chemistry_cases(reactions, vocabulary, CONFIG, masked=True),
        strict=True,
    ):
        [target] = masked.targets
        assert masked.ids[target.query] == vocabulary["[MASK]"] != target.answer
        assert seen.ids[target.query] == target.answer
        assert set(target.sources) < set(target.candidates)


def test_the_products_mapping_of_a_perfect_map_is_the_truth_and_takes_no_atom_twice() -> None:
    for reaction in read_reactions()[:50]:
        scores = np.full(reaction.same_element.shape, 1e-6)
        taken: set[int] = set()
        for atom, sources in enumerate(reaction.sources):
            free = [i for i in sources if i not in taken]
            taken |= set(free[:1])
            scores[atom, free[:1]] = 1.0
        mapping = map_atoms(scores, reaction)
        assert len(set(mapping)) == len(mapping)
        right = [m in s for m, s in zip(mapping, reaction.sources, strict=True) if s]
        assert np.mean(right) == 1.0


def test_rxnmappers_own_example() -> None:
    """Its first test: with attention that says nothing, neighbours of mapped atoms and elements still decide."""
    reaction = Reaction.of({"reaction": "CC(C)S.Fc1cccnc1F>>CC(C)Sc1ncccc1F", "sources": []})
    before, after = reaction.atoms
    assert [reaction.tokens[i] for i in before] == ["C", "C", "C", "S", "F", "c", "c", "c", "c", "n", "c", "F"]
    product, reactants = reaction.neighbours
    assert product.sum() // 2 == 11
    assert reactants.sum() // 2 == 11
    scores = np.full((len(after), len(before)), 1e-6)
    # The sulphur and the nitrogen are alone of their element.
    assert map_atoms(scores, reaction)[3] == 3
    assert map_atoms(scores, reaction)[5] == 9


def test_a_planted_perfect_reading_scores_one_and_a_random_one_a_half() -> None:
    draw = torch.Generator().manual_seed(0)
    rows, k = 400, 23
    true = torch.zeros(rows, k, dtype=torch.bool)
    true[torch.arange(rows), torch.randint(k - 3, (rows,), generator=draw)] = True
    candidates = torch.ones_like(true)
    candidates[:, -3:] = False
    perfect = true.float()[:, None, None].expand(-1, 2, 3, -1).clone()
    perfect[..., -3:] = 9.0
    noise = torch.rand(rows, 2, 3, k, generator=draw)
    count = torch.ones(rows, dtype=torch.long)
    scores = scores_of_item(
        {"perfect": perfect, "noise": noise}, {"flat": torch.ones(rows, k)}, true, candidates, count
    )
    for of in ("heads", "all heads", "last layer"):
        for metric in ("precision", "auc"):
            assert bool((scores[f"perfect/{of}/{metric}"] == 1).all())
        assert float(scores[f"noise/{of}/auc"].mean()) == pytest.approx(0.5, abs=0.05)
        assert float(scores[f"noise/{of}/precision"].mean()) == pytest.approx(1 / 20, abs=0.03)
    assert bool((scores["flat/whole/auc"] == 0.5).all())
    assert torch.allclose(scores["flat/whole/precision"], torch.full((rows,), 1 / 20))


def test_precision_of_several_sources() -> None:
    scores = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    true = torch.tensor([True, False, True, True, False])
    every = torch.ones(5, dtype=torch.bool)
    assert precision_at(scores, true, every, torch.tensor(3)) == pytest.approx(2 / 3)
    # Of the six pairs of a source and another candidate, four are in order.
    assert area_under_curve(scores, true, every) == pytest.approx(4 / 6)


def test_the_spread_of_a_row() -> None:
    row = torch.tensor([0.0, 0.25, -0.25, 0.5])
    true = torch.tensor([[False, False, True, True]])
    made = spread(torch.stack([row, torch.full((4,), 0.25)])[None, None], true)
    # 1 / (1/16 + 1/16 + 1/4) keys, and four.
    assert made["keys"] == pytest.approx((8 / 3 + 4) / 2)
    assert made["first"] == pytest.approx(0.125)
    assert made["sources"] == pytest.approx((0.75 + 0.5) / 2)
    assert made["head"] == pytest.approx(0.75)


def test_a_head_is_chosen_on_the_other_half() -> None:
    """A head that is right by chance on one half alone gains nothing there."""
    values = torch.zeros(10, 2, 3)
    values[0::2, 0, 1] = 1
    values[1::2, 1, 2] = 1
    chosen, heads = choose_heads(values)
    assert heads == ["1.2", "0.1"]
    assert float(chosen.sum()) == 0
    values[:, 1, 0] = 0.9
    values[0, 0, 1] = values[1, 1, 2] = 0
    assert choose_heads(values)[1] == ["1.0", "1.0"]


def test_differences_are_paired() -> None:
    values = torch.rand(200, generator=torch.Generator().manual_seed(1))
    made = compare(values + 0.01, values, resamples=200, seed=0)
    assert made["difference"] == pytest.approx(0.01, abs=1e-6)
    low, high = made["difference_interval"]
    assert high - low < 1e-6 < made["interval"][1] - made["interval"][0]


@pytest.fixture(scope="module", params=["decoder", "encoder"])
def small(request: pytest.FixtureRequest) -> tuple[Transformer, Batch]:
    """A model of two layers and a padded batch: 19 keys, more than the heads are wide."""
    torch.manual_seed(3)
    config = TransformerConfig(kind=request.param, vocab=31, width=21, heads=3, layers=2, init="xavier")
    draw = torch.Generator().manual_seed(4)
    inputs = padded([torch.randint(1, 31, (n,), generator=draw).tolist() for n in (19, 13)])
    return Transformer(config).eval().requires_grad_(False), Batch(inputs, torch.tensor([17, 11]), torch.tensor([5, 7]))


@pytest.mark.parametrize("name", MAPS)
def test_a_row_alone_is_the_row_of_the_whole_map(name: str, small: tuple[Transformer, Batch]) -> None:
    model, batch = small
    with torch.no_grad(), record(model, keep="all") as trace:
        model(**batch.inputs)
    for layer in recorded_stack(trace):
        whole = MAPS[name](layer)[torch.arange(2), :, batch.query]
        assert torch.allclose(MAPS[name](query_row(layer, batch.query))[:, :, 0], whole, atol=1e-5)


def test_attention_that_is_no_softmax_is_refused(small: tuple[Transformer, Batch]) -> None:
    model, batch = small
    with swap(model, "window:r=3"), pytest.raises(ValueError, match="attends by window:r=3"):
        read_batch(model, batch)


def test_all_readings_of_a_batch(small: tuple[Transformer, Batch]) -> None:
    model, batch = small
    read = read_batch(model, batch, probe=True)
    with torch.no_grad(), record(model) as trace:
        model(**batch.inputs)
    for name in ("effective", "effective norm"):
        rows = torch.stack([MAPS[name](layer)[torch.arange(2), :, batch.query] for layer in trace], 1)
        assert torch.allclose(read.heads[name], rows.abs(), atol=1e-5)
    assert {t.shape for t in read.heads.values()} == {(2, 2, 3, 19)}
    assert {t.shape for t in read.whole.values()} == {(2, 19)}
    # What lies behind the padding of the second text is never read.
    for name, t in read.heads.items():
        assert float(t[1, ..., 13:].abs().max()) == 0, name
    assert 0 < float(read.facts["removed"].min()) < 1
    # Signed gradients of one batch do not mix its items.
    alone = Batch({name: t[1:, :13] for name, t in batch.inputs.items()}, batch.query[1:], batch.answer[1:])
    again = read_batch(model, alone)
    assert torch.allclose(again.heads["gradient, signed"][0], read.heads["gradient, signed"][1, ..., :13], atol=1e-6)
    assert torch.allclose(again.whole["input gradient"][0], read.whole["input gradient"][1, :13], atol=1e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--on", "haystack:smollm2"], "the tasks are needle"),
        (["--on", "recall:first"], "recall takes a seed"),
        (["--on", "recall:0", "--cases", "2"], "at least 4"),
    ],
)
def test_what_cannot_be_run_is_refused(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["truth", *options, "--config", "smoke", "--work", str(tmp_path), "--out", str(tmp_path / "truth.json")]
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_a_file_that_is_no_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_text("no archive")
    with pytest.raises(ValueError, match="is no wheel"):
        write_model(tmp_path / "x.whl", tmp_path / "out")


def test_the_model_of_a_wheel_is_written_as_safetensors(tmp_path: Path) -> None:
    """With a tokenizer of SMILES: that of ALBERT reads no vocab.txt, and would know no token."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "C", "Br", "[N+]", ".", ">>"]
    sizes = {"hidden_size": 8, "embedding_size": 4, "intermediate_size": 8, "num_attention_heads": 2}
    config = tf.AlbertConfig(vocab_size=len(words), num_hidden_layers=1, architectures=["AlbertForMaskedLM"], **sizes)
    weights = tf.AlbertForMaskedLM(config).state_dict() | {"albert.pooler.weight": torch.zeros(2)}
    table = "albert.embeddings.word_embeddings.weight"
    weights[table] = weights[table].T.contiguous().T
    pickled = io.BytesIO()
    torch.save(weights, pickled)
    files = {
        "pytorch_model.bin": pickled.getvalue(),
        "config.json": config.to_json_string(),
        "vocab.txt": "\n".join(words),
    }
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(f"{FILES}/{name}", content)
    folder = tmp_path / "out"
    assert main(["truth-rxnmapper", "--wheel", str(tmp_path / "x.whl"), "--out", str(folder)]) == 0
    model, tokenizer, task = load_model(folder)
    assert task == "mlm"
    assert torch.equal(model.state_dict()[table], weights[table])
    assert tokenizer("CBr.[N+]>>F")["input_ids"] == [2, 5, 6, 8, 7, 9, 1, 3]
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"no vocabulary, .* AlbertTokenizer reads tokenizer\.json or spiece\.model"):
        load_model(folder)


@pytest.mark.slow
def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """A second call trains and measures nothing again, and a lost chunk alone is made anew, to the same numbers."""
    out = tmp_path / "truth.json"
    arguments = ["truth", "--on", "recall:0", "--config", "smoke", "--work", str(tmp_path / "w"), "--out", str(out)]
    assert main(arguments) == 0
    first = json.loads(out.read_text())
    parts = sorted((tmp_path / "w" / "recall-0").glob("part-*"))
    times = [part.stat().st_mtime_ns for part in parts]
    parts[0].unlink()
    assert main(arguments) == 0
    assert [part.stat().st_mtime_ns for part in parts[1:]] == times[1:]
    assert json.loads(out.read_text())["tables"] == first["tables"]
    assert {"config", "seed", "versions", "device", "commit", "command"} <= first.keys()
    assert {row["reading"] for row in first["tables"]["scores"]} >= {*MAPS, "gradient", "rollout", "lexical probe"}
    assert main([*arguments, "--cases", "5"]) == 2


def test_the_device_is_that_of_the_part(tmp_path: Path) -> None:
    """Parts that a GPU has read, and one that a CPU reads here, are of two devices, whoever collects them."""
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(kind="decoder", vocab=31, width=21, heads=3, layers=1, init="xavier")).eval()
    ids = torch.randint(1, 31, (7, 9), generator=torch.Generator().manual_seed(1))
    said = model(input_ids=ids).logits[:, -1].argmax(-1).tolist()
    cases = [
        Case(tuple(row), (earlier_target(8, answer, 3),), (1, 2, 3))
        for row, answer in zip(ids.tolist(), said, strict=True)
    ]
    config = replace(CONFIG, cases=7, chunk=4)
    subject = Subject("copy", "small", model.requires_grad_(False), cases)
    first = measure(subject, config, tmp_path, batch=2)
    assert first.devices == (device_name(torch.device("cpu")),)
    assert (len(first.scores["case"]), first.made) == (7, 7)
    part = tmp_path / "part-00000.safetensors"
    save_file(load_file(part), part, {"device": "a GPU"})
    again = measure(subject, config, tmp_path, batch=2)
    assert again.devices == ("a GPU", *first.devices)
    tables = tables_of(subject, again, config)
    assert devices(tables["subjects"]) == f"a GPU and {first.devices[0]} (copy small)"
    # A run that has no time left keeps what it has.
    (tmp_path / "part-00001.safetensors").unlink()
    some = measure(subject, config, tmp_path, batch=2, minutes=0)
    assert (len(some.scores["case"]), some.made) == (4, 4)
    rows = {(row["reading"], row["of"]): row for row in tables["scores"]}
    assert rows["effective", "one head"]["over_effective_interval"] == [0, 0]
    norm, attention = (rows[name, "all heads"] for name in ("norm", "attention"))
    assert norm["over_effective"] == pytest.approx(norm["precision_more"] + attention["over_effective"])
