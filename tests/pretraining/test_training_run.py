"""A run on a text resumes from its folder alone, and never on another text than it began with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlab.data import train_wordpiece
from attnlab.pretraining import CorpusConfig, PretrainConfig, resume_language_model, train_language_model
from attnlab.pretraining import corpus as corpus_module
from attnlab.training import RunError, list_checkpoints
from attnlab.training.checkpoints import read_checkpoint
from tests.training.faults import CONFIG, TEXT, outcome


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with corpus.txt and the run ``cut``, which was killed after step 4; and how the whole run ended."""
    folder = tmp_path_factory.mktemp("begun")
    (folder / "corpus.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train_language_model(CorpusConfig(text="corpus.txt", vocab=64), CONFIG, run_dir=Path("cut"))
    whole = outcome(folder / "cut")
    shutil.rmtree(folder / "cut" / "model")
    shutil.rmtree(list_checkpoints(folder / "cut")[-1])
    (folder / "cut" / "result.json").unlink()
    return folder, whole


@pytest.fixture
def cut(begun: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the killed run, whose text was named by a path from another folder than this one."""
    copy = tmp_path / "cut"
    shutil.copytree(begun[0] / "cut", copy)
    monkeypatch.chdir(tmp_path)
    return copy


@pytest.fixture
def other_text(begun: tuple[Path, dict[str, Any]]) -> Any:
    """The corpus is another while the test runs."""
    text = begun[0] / "corpus.txt"
    text.write_text(TEXT.replace("fox", "cat"))
    yield text
    text.write_text(TEXT)


@pytest.fixture
def no_text(begun: tuple[Path, dict[str, Any]]) -> Any:
    """The corpus is gone while the test runs."""
    text = begun[0] / "corpus.txt"
    text.unlink()
    yield text
    text.write_text(TEXT)


def zero(run: Path) -> None:
    [file] = run.glob("tokens/*/tokens.npy")
    tokens = np.load(file, mmap_mode="r+")
    tokens[: len(tokens) // 2] = 0
    tokens.flush()


def test_a_run_goes_on_from_any_folder(begun: tuple[Path, dict[str, Any]], cut: Path) -> None:
    resume_language_model(cut)
    assert outcome(cut) == begun[1]


def test_tokens_that_were_changed_are_made_again(begun: tuple[Path, dict[str, Any]], cut: Path) -> None:
    zero(cut)
    resume_language_model(cut)
    assert outcome(cut) == begun[1]


def test_without_its_text_a_run_goes_on_with_its_tokens(
    begun: tuple[Path, dict[str, Any]], cut: Path, no_text: Path
) -> None:
    resume_language_model(cut)
    assert outcome(cut) == begun[1]


def test_another_text_changes_nothing_while_the_tokens_are_there(
    begun: tuple[Path, dict[str, Any]], cut: Path, other_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume_language_model(cut)
    assert "corpus.txt has changed since the run began; going on with the tokens" in capsys.readouterr().err
    assert outcome(cut) == begun[1]


def test_neither_tokens_nor_text_is_refused(cut: Path, no_text: Path) -> None:
    zero(cut)
    with pytest.raises(RunError, match=r"corpus.txt is gone, and the tokens made from it are not in the run's folder"):
        resume_language_model(cut)


@pytest.mark.parametrize("lost", ["tokens", "tokenizer"])
def test_another_text_in_place_of_what_is_lost_is_refused(cut: Path, other_text: Path, lost: str) -> None:
    shutil.rmtree(cut / lost)
    with pytest.raises((RunError, ValueError), match=r"corpus.txt (has changed|is not the text)"):
        resume_language_model(cut)


def test_another_tokeniser_is_refused(cut: Path, no_text: Path) -> None:
    train_wordpiece(["a red fox"] * 3, vocab_size=40).save(cut / "tokenizer")
    with pytest.raises(RunError, match="the tokeniser made from it are not in the run's folder"):
        resume_language_model(cut)


def test_a_start_that_was_killed_leaves_its_tokeniser_to_no_other(tmp_path: Path) -> None:
    """Of two starts with different vocabularies the second trains a tokeniser of its own."""
    text, run = tmp_path / "corpus.txt", tmp_path / "run"
    text.write_text(TEXT)
    train_wordpiece([TEXT] * 3, vocab_size=90).save(run / "tokenizer")
    train_language_model(CorpusConfig(text=str(text), vocab=64), CONFIG, run_dir=run)
    assert len(json.loads((run / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]) <= 64


def test_a_refused_start_leaves_the_folder_to_the_corrected_one(tmp_path: Path) -> None:
    text, run = tmp_path / "corpus.txt", tmp_path / "run"
    text.write_text(TEXT)
    with pytest.raises(ValueError, match="bert-LAYERSxWIDTH"):
        train_language_model(CorpusConfig(text=str(text), vocab=64), PretrainConfig(model="bert-x"), run_dir=run)
    train_language_model(CorpusConfig(text=str(text), vocab=64), CONFIG, run_dir=run)
    assert read_checkpoint(list_checkpoints(run)[-1]).step == CONFIG.steps


def test_the_folder_is_locked_before_anything_is_made_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start while the first trains its tokeniser is refused, and the tokeniser is the first one's."""
    text, run = tmp_path / "corpus.txt", tmp_path / "run"
    text.write_text(TEXT)
    train_tokeniser = corpus_module.train_wordpiece

    def second_start(*arguments: Any, **options: Any) -> Any:
        with pytest.raises(RunError, match="is being written by process"):
            train_language_model(CorpusConfig(text=str(text), vocab=50), CONFIG, run_dir=run)
        return train_tokeniser(*arguments, **options)

    monkeypatch.setattr(corpus_module, "train_wordpiece", second_start)
    train_language_model(CorpusConfig(text=str(text), vocab=64), CONFIG, run_dir=run)
    assert json.loads((run / "run.json").read_text())["config"]["corpus"]["vocab"] == 64


def test_run_json_of_other_types_is_refused(cut: Path) -> None:
    file = cut / "run.json"
    described = json.loads(file.read_text())
    del described["checksum"]
    for change in ({"steps": "6"}, {"lengths": ["8"]}, {"lr": None}, {"guidance": 3}, {"compile": 1}, {"unheard": 1}):
        config = described["config"] | {"pretrain": described["config"]["pretrain"] | change}
        file.write_text(json.dumps(described | {"config": config}))
        with pytest.raises(ValueError, match=r"run.json has"):
            resume_language_model(cut)


def test_malformed_lines_are_skipped_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": line}) for line in TEXT.split("\n\n")]
    text.write_text("\n".join([*lines, "oops"]))
    with pytest.raises(ValueError, match="mend or remove the line"):
        train_language_model(CorpusConfig(text=str(text), vocab=64), CONFIG, run_dir=tmp_path / "run")
    train_language_model(CorpusConfig(text=str(text), vocab=64, skip_malformed=True), CONFIG, run_dir=tmp_path / "run")
    assert "1 malformed line skipped" in capsys.readouterr().err
