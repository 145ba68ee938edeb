"""``attnlab judge``: cases, the protocol, every policy beside the full cache, resuming, many processes, bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import attnlab as al
from attnlab.cli import main
from attnlab.evaluation import judge_run
from attnlab.evaluation.judge import judge
from attnlab.evaluation.judge_cases import JUDGE_TASKS, Tokens, judge_cases
from attnlab.evaluation.judge_grid import JudgeConfig, policy_at
from attnlab.evaluation.judge_run import FULL, SEEN, UNSEEN, Unit, measure
from attnlab.evaluation.ruler import RULER_TASKS
from attnlab.evaluation.tasks import TaskSettings
from attnlab.pages.judge import CANNOT_EITHER, judge_page

LENGTH = 500


@pytest.fixture(scope="module")
def loaded(folder):
    return al.load_model(folder)


@pytest.fixture(scope="module")
def settings(folder):
    return TaskSettings(lambada=folder / "lambada.jsonl", passages=None, lengths=(LENGTH,), cases=3)


@pytest.fixture(scope="module")
def needles(loaded, settings):
    return tuple(judge_cases("needle", LENGTH, settings, Tokens(loaded.tokenizer, settings)))


def config_of(settings, *policies, **changes):
    options = {"budgets": (0.5, 0.25), "tasks": ("needle", "loss", "lambada"), "batch": 2} | changes
    return JudgeConfig(policies or ("h2o", "keydiff"), settings=settings, **options)


def answers_of(loaded, cases, *specs, column=UNSEEN, alike=None):
    verdicts = measure(loaded, Unit(cases, column, specs), {} if alike is None else alike)
    return {verdict.policy: verdict.answers for verdict in verdicts}


def scores_of(result):
    return {(row["task"], row["length"], row["spec"]): (row["unseen"], row["seen"]) for row in result["rows"]}


@pytest.mark.parametrize("task", JUDGE_TASKS)
def test_cases_take_exactly_their_length_and_need_no_padding(loaded, settings, task):
    length = 2048 if task in ("common-words", "variables") else 1100
    tokens = Tokens(loaded.tokenizer, settings)
    cases = judge_cases(task, length, settings, tokens)
    assert cases == judge_cases(task, length, settings, Tokens(loaded.tokenizer, settings))
    assert len({case.digest for case in cases}) == len(cases) == 3
    assert len({(len(case.context), len(case.question), case.new_tokens) for case in cases}) == 1
    for case in cases:
        assert len(case.context) + len(case.question) + (case.new_tokens or len(case.target)) == length
        context, question = (loaded.tokenizer.decode(ids) for ids in (case.context, case.question))
        assert all(answer in context and answer not in question for answer in case.answers)
        assert bool(case.answers) == (task in RULER_TASKS) == (not case.target)
    other = judge_cases(task, length, replace(settings, seed=1), tokens)
    assert {case.digest for case in cases}.isdisjoint(case.digest for case in other)


def test_a_passage_is_cut_before_its_last_sentence(loaded, settings, tmp_path):
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"text": 'They met. "Who are you?" she asked. He said his name was John'}))
    settings = replace(settings, lambada=file)
    (case,) = judge_cases("lambada", LENGTH, settings, Tokens(loaded.tokenizer, settings))
    context, question, word = (loaded.tokenizer.decode(ids) for ids in (case.context, case.question, case.target))
    assert context.endswith('They met. "Who are you?" she asked.')
    assert question == " He said his name was"
    assert word == " John"


def test_the_full_cache_writes_what_generate_writes(loaded, needles):
    for column in (UNSEEN, SEEN):
        answers = answers_of(loaded, needles, FULL, column=column)[FULL]
        for case, answer in zip(needles, answers, strict=True):
            ids = torch.tensor([[*case.context, *case.question]])
            written = loaded.model.generate(ids, max_new_tokens=case.new_tokens, do_sample=False)[0, ids.shape[1] :]
            assert answer["text"] == loaded.tokenizer.decode(written, skip_special_tokens=True)[:200]


def test_the_full_caches_loss_is_the_models(loaded, settings):
    cases = tuple(judge_cases("loss", LENGTH, settings, Tokens(loaded.tokenizer, settings)))
    for case, answer in zip(cases, answers_of(loaded, cases, FULL)[FULL], strict=True):
        ids = torch.tensor([[*case.context, *case.question, *case.target]])
        with torch.no_grad():
            logits = loaded.model(ids[:, :-1]).logits[0, -64:]
        expected = torch.nn.functional.cross_entropy(logits, ids[0, -64:])
        assert answer["score"] == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("column", [UNSEEN, SEEN])
def test_the_context_is_compressed_before_or_after_the_question(loaded, needles, column):
    """The protocol, step by step, by the public names."""
    spec, case = policy_at("tova", 0.25), needles[1]
    cut = 0 if column == UNSEEN else len(case.question) - 1
    read, rest = torch.tensor([[*case.context, *case.question[:cut]]]), torch.tensor([case.question[cut:]])
    with torch.no_grad(), al.evicting(loaded.model, spec) as cache:
        loaded.model(read, past_key_values=cache)
        assert max(cache.kept()) == read.shape[1] // 4
        written = [loaded.model(rest, past_key_values=cache).logits[:, -1].argmax(-1)]
        while len(written) < case.new_tokens:
            written.append(loaded.model(written[-1][None], past_key_values=cache).logits[:, -1].argmax(-1))
    text = loaded.tokenizer.decode(torch.cat(written).tolist(), skip_special_tokens=True)
    assert answers_of(loaded, needles, spec, column=column)[spec][1]["text"] == text[:200]


def test_policies_that_answer_together_answer_as_alone(loaded, needles, monkeypatch):
    specs = [policy_at(policy, 0.25) for policy in ("h2o", "keydiff", "random", "snapkv:window=4")]
    alike: dict[str, bool] = {}
    # The first time the logits of every policy alone are compared.
    first = answers_of(loaded, needles, *specs, alike=alike)
    assert list(alike.values()) == [True] * 4
    together = answers_of(loaded, needles, *specs, alike=alike)
    # Room for two at a time.
    monkeypatch.setattr(judge_run, "MOST_POSITIONS", 2 * len(needles))
    in_pairs = answers_of(loaded, needles, *specs, alike=alike)
    monkeypatch.setattr(judge_run, "JOINABLE", ())
    assert first == together == in_pairs == answers_of(loaded, needles, *specs)
    assert len({json.dumps(answers) for answers in first.values()}) > 1


def test_a_cache_that_the_models_own_attention_misreads_answers_alone(loaded, needles, monkeypatch):
    """As where a cache holds more than keys and values, once it has dropped some; all keys are read rightly."""
    whole, quarter = policy_at("h2o", 1), policy_at("h2o", 0.25)
    read = len(needles[0].context)

    def misread(cache):
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        return [(k, v if k.shape[2] == read else -v) for k, v in layers]

    monkeypatch.setattr(judge_run, "even_keys", misread)
    alike: dict[str, bool] = {}
    answers_of(loaded, needles, whole, alike=alike)
    answers = [answers_of(loaded, needles, quarter, alike=alike) for _ in range(2)]
    assert alike == {whole: True, quarter: False}
    monkeypatch.undo()
    assert answers == [answers_of(loaded, needles, quarter)] * 2


@pytest.mark.parametrize("policy", ["streaming-llm", "snapkv:window=4", "h2o:when=step", "pyramidkv:window=4"])
def test_a_budget_of_all_keys_is_the_full_cache(loaded, settings, policy):
    result = judge(loaded, config_of(settings, policy, budgets=(1.0,), tasks=("needle", "loss")))
    for task in ("needle", "loss"):
        full, whole = (row for row in result["rows"] if row["task"] == task)
        assert full["bytes_ratio"] == 1
        # A cache may hold some bytes to know where its keys lie.
        assert 1 <= whole["bytes_ratio"] < 1.1
        assert whole["unseen"]["over_full"]["value"] == pytest.approx(0, abs=1e-5)


def test_every_column_and_cost_is_measured(loaded, settings):
    policies = ("h2o", "kvzip", "keydiff:heads=shared", "compact:queries=prompt")
    result = judge(loaded, config_of(settings, *policies, budgets=(0.25,)))
    assert len(result["rows"]) == 3 * (1 + len(policies))
    for row in result["rows"]:
        assert (row["seen"] is None) == (row["task"] == "loss")
        assert row["unseen"]["n"] == 3
        assert row["prefill_ratio"] >= 1
        assert (row["decode_ratio"] is not None) == (row["task"] == "needle")
    assert all(0.24 < row["bytes_ratio"] < 0.28 for row in result["rows"] if row["policy"] == "h2o")
    assert {"config", "seed", "versions", "device", "commit", "command", "tables"} <= set(result)
    # Nothing that a random model writes contains a magic number.
    needle = next(row for row in result["rows"] if row["task"] == "needle")
    assert needle["unseen"]["full_cannot"]
    assert CANNOT_EITHER in judge_page(result)
    assert not any(row["unseen"]["full_cannot"] for row in result["rows"] if row["task"] == "loss")


def test_a_refusal_is_a_row_and_the_others_are_measured(loaded, settings):
    long = replace(settings, lengths=(1300,), cases=1)
    result = judge(loaded, config_of(long, "kvzip", "h2o", tasks=("needle",)))
    refused = [row for row in result["rows"] if row["policy"] == "kvzip"]
    assert all("twice" in row["unseen"]["refused"] for row in refused)
    assert all("score" in row["unseen"] for row in result["rows"] if row["policy"] == "h2o")
    assert "twice" in judge_page(result)


def command(folder: Path, out: Path, *more: str) -> list[str]:
    grid = ["--policies", "h2o", "keydiff", "tova", "--budgets", "0.5", "0.25", "--lengths", "500", "--cases", "4"]
    files = ["--tasks", "needle", "loss", "--batch", "1", "--out", str(out)]
    return ["judge", str(folder), *grid, *files, *more]


def test_killed_at_any_moment_it_goes_on(folder, tmp_path, capsys):
    whole, out = tmp_path / "whole.json", tmp_path / "killed.json"
    assert main(command(folder, whole)) == 0
    answers = tmp_path / "killed.answers.jsonl"
    started = subprocess.Popen(
        [sys.executable, "-m", "attnlab", *command(folder, out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path(al.__file__).parent.parent)},
    )  # fmt: skip
    while started.poll() is None and (not answers.exists() or len(answers.read_bytes().splitlines()) < 20):
        time.sleep(0.005)
    started.send_signal(signal.SIGKILL)
    started.wait()
    kept = answers.read_bytes()
    assert 20 <= len(kept.splitlines()) < len((tmp_path / "whole.answers.jsonl").read_bytes().splitlines())
    answers.write_bytes(kept + b'{"key": "torn')
    assert main(command(folder, out)) == 0
    lines = [line for line in answers.read_text().splitlines() if "torn" not in line]
    keys = [json.loads(line)["key"] for line in lines]
    assert len(keys) == len(set(keys)), "no case twice"
    expected = [json.loads(line) for line in (tmp_path / "whole.answers.jsonl").read_text().splitlines()]
    assert {entry["key"] for entry in expected} == set(keys), "no case lost"
    resumed, uninterrupted = (scores_of(json.loads(path.read_text())) for path in (out, whole))
    for key, (unseen, _) in uninterrupted.items():
        assert resumed[key][0]["score"] == pytest.approx(unseen["score"], abs=1e-5)


@pytest.mark.slow
def test_many_processes_give_the_same_result(folder, settings):
    one, many = (scores_of(judge(folder, config_of(settings), jobs=jobs)) for jobs in (1, 2))
    assert one.keys() == many.keys()
    for key, columns in one.items():
        for a, b in zip(columns, many[key], strict=True):
            assert (a is None) == (b is None)
            assert a is None or a["score"] == pytest.approx(b["score"], abs=1e-5)


def test_ratios_after_a_stop_are_those_of_one_process(loaded, settings, tmp_path):
    """A record of a slower process, as one that was killed leaves it, is no measure for the times of this one."""
    config, file = config_of(settings, "tova", tasks=("needle",), budgets=(0.25,)), tmp_path / "a.jsonl"
    judge(loaded, config, answers=file)
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [entry for entry in entries if entry["answer"].get("bytes") == entry["answer"].get("full_bytes", 0)]
    assert 0 < len(kept) < len(entries), "the costs of the full cache"
    for entry in kept:
        entry["answer"] |= dict.fromkeys(("prefill", "full_prefill", "decode", "full_decode"), 1000000000.0)
    file.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    (row,) = (row for row in judge(loaded, config, answers=file)["rows"] if row["policy"] == "tova")
    # Reading and compressing cannot take less than reading.
    assert row["prefill_ratio"] > 1
    assert row["decode_ratio"] > 1e-3


def test_a_file_whose_name_is_no_text_can_be_judged_with(loaded, settings, tmp_path):
    text = tmp_path / os.fsdecode(b"n\xffme.txt")
    text.write_text("The cat sat on the mat. " * 40)
    result = judge(loaded, config_of(replace(settings, text=text, cases=1), "tova", tasks=("loss",)))
    assert r"n\udcffme.txt" in result["config"]["text"]
    assert judge_page(result).encode()


def test_everything_known_is_not_measured_again(loaded, settings, tmp_path, monkeypatch):
    config = config_of(settings, tasks=("needle",))
    first = judge(loaded, config, answers=tmp_path / "a.jsonl")
    assert first["took"] | {"seconds": 0} == {"seconds": 0, "jobs": 1, "answers": 20, "known_before": 0}
    assert first["took"]["seconds"] > 0
    monkeypatch.setattr("attnlab.evaluation.judge.measure", lambda *_: pytest.fail("measured again"))
    results = []
    again = judge(loaded, config, answers=tmp_path / "a.jsonl", on_result=results.append)
    assert again["rows"] == first["rows"]
    assert again["took"] == {"seconds": 0, "jobs": 1, "answers": 20, "known_before": 20}
    assert "20 of 20 batches and policies were known before" in judge_page(again)
    assert results, "what is written by on_result is written for known answers, too"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policies", "snapvk"], "no cache policy named 'snapvk'"),
        (["--policies", "h2o:budget=8"], "leave budget= out of a policy"),
        (["--policies", "h2o", "h2o"], "'h2o' is there twice"),
        (["--budgets", "0"], "above 0 and at most 1, got 0"),
        (["--budgets", "1.5"], "above 0 and at most 1, got 1.5"),
        (["--budgets", "nan"], "above 0 and at most 1, got nan"),
        (["--lengths", "9000"], "9000 tokens are longer than the model's 2048; ask for shorter lengths"),
        (["--lengths", "80"], "needle at 80 tokens: a case needs"),
        (["--tasks", "chess"], "there is no task named 'chess' here; there are needle"),
        (["--tasks", "lambada"], "give it with --lambada"),
        (["--lambada", "absent.jsonl"], "which --tasks leaves out"),
        (["--tasks", "loss", "--lengths", "2048", "--text", "{short}"], "give a longer one with --text"),
        (["--cases", "0"], "--cases must be at least 1, got 0"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--text", "absent.txt"], "absent.txt"),
        (["--device", "cuda:99"], "cuda:99"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_writes_nothing(folder, tmp_path, capsys, words, said):
    short = tmp_path / "short.txt"
    short.write_text("A few words.")
    out = tmp_path / "out"
    out.mkdir()
    words = [word.replace("{short}", str(short)) for word in words]
    assert main([*command(folder, out / "page.html"), *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert error[0].startswith("attnlab:")
    assert said in error[0]
    assert list(out.iterdir()) == []


def test_the_command_writes_a_page_and_json(folder, tmp_path, capsys):
    words = [*command(folder, tmp_path / "p.html"), "--cases", "1", "--tasks", "needle"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert CANNOT_EITHER in shown
    assert "keydiff" in shown
    assert "needle, 500 tokens, question unseen" in (tmp_path / "p.html").read_text()
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 7
