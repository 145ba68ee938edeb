"""``attnlab evaluate``: lm-eval's numbers, every kind of subject, resuming, bad input."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

import attnlab as al
from attnlab.cli import main
from attnlab.evaluation.answers import AnswerFile, fingerprint
from attnlab.evaluation.evaluate import EvaluateConfig, evaluate, subjects_of
from attnlab.evaluation.intervals import mean_interval, paired_interval, wilson
from attnlab.evaluation.tasks import TaskSettings
from attnlab.pages.evaluate import evaluate_page
from tests.evaluation.conftest import WORDS

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")


@pytest.fixture
def settings(folder):
    return TaskSettings(
        text=folder / "text.txt", window=64, windows=5, lambada=folder / "lambada.jsonl", lengths=(500,), cases=2
    )


def config_of(settings, *tasks):
    return EvaluateConfig(tasks=tasks or ("loss", "lambada", "needle"), settings=settings, batch=2)


def test_the_loss_is_that_of_lm_evals_own_model(folder, settings):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    result = evaluate(folder, config=config_of(settings, "loss"))
    loss = result["rows"][0]["tasks"]["loss"]
    loaded = al.load_model(folder)
    own = HFLM(loaded.model, tokenizer=loaded.tokenizer, max_length=64, batch_size=3)
    text = (folder / "text.txt").read_text()[: 5 * 64]
    likelihood = own.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)[0]
    assert loss["tokens"] == 5 * 64
    assert loss["loss"] == pytest.approx(-likelihood / (5 * 64), abs=1e-6)
    assert loss["perplexity"] == pytest.approx(math.exp(loss["loss"]))


def test_losses_in_half_precision_are_summed_in_float32(folder):
    from attnlab.evaluation.harness import AttnlabLM

    loaded = al.load_model(folder, dtype=torch.bfloat16)
    lm = AttnlabLM(loaded.model, tokenizer=loaded.tokenizer, batch_size=1)
    ids = torch.tensor(loaded.tokenizer(" ".join(WORDS * 9), add_special_tokens=False)["input_ids"])
    asked = [(("", ""), [1], ids.tolist())]
    (likelihood, _), = lm._loglikelihood_tokens(asked, disable_tqdm=True)  # fmt: skip
    with torch.no_grad():
        logits = loaded.model(torch.cat([torch.tensor([1]), ids[:-1]])[None]).logits[0].float()
    expected = logits.log_softmax(-1).gather(1, ids[:, None]).sum()
    # A sum in bfloat16 is off by up to a part in 512.
    assert likelihood == pytest.approx(float(expected), rel=1e-5)


def test_lambada_is_that_of_lm_evals_own_model(folder, settings):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    result = evaluate(folder, config=config_of(settings, "lambada"))
    scores = result["rows"][0]["tasks"]["lambada"]
    loaded = al.load_model(folder)
    own = HFLM(loaded.model, tokenizer=loaded.tokenizer, batch_size=1)
    passages = [json.loads(line)["text"].rsplit(" ", 1) for line in (folder / "lambada.jsonl").read_text().splitlines()]
    asked = [Instance("loglikelihood", {}, (before, f" {last}"), 0) for before, last in passages]
    answers = own.loglikelihood(asked, disable_tqdm=True)
    assert scores["acc"] == sum(right for _, right in answers) / 6
    assert scores["perplexity"] == pytest.approx(math.exp(-sum(value for value, _ in answers) / 6), rel=1e-6)


def adding(folder, to, single):
    """The folder with a tokenizer that puts special tokens around every text."""
    from tokenizers.processors import TemplateProcessing

    shutil.copytree(folder, to)
    tokenizer = al.load_model(folder).tokenizer
    specials = [("[BOS]", 1), ("[EOS]", 2)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=specials)
    tokenizer.save_pretrained(to)
    assert ([1] if "BOS" in single else []) == al.load_model(to).tokenizer("a").input_ids[:1][: single.count("BOS")]
    return to


def measured(folder, settings):
    tasks = evaluate(folder, config=config_of(settings))["rows"][0]["tasks"]
    answers = [case["text"] for case in tasks["needle 500"]["cases"]]
    return tasks["loss"]["weights"], tasks["loss"]["loss"], tasks["lambada"]["perplexity"], answers


def test_what_a_tokenizer_puts_around_a_text_is_no_part_of_it(folder, settings, tmp_path):
    """What comes before is not scored, and what comes after is not read where the text goes on."""
    plain = measured(folder, settings)
    assert measured(adding(folder, tmp_path / "ended", "$A [EOS]"), settings) == plain
    begun = measured(adding(folder, tmp_path / "begun", "[BOS] $A"), settings)
    assert begun[:2] == plain[:2]
    assert measured(adding(folder, tmp_path / "both", "[BOS] $A [EOS]"), settings) == begun


def test_generated_text_is_that_of_the_model(folder, settings):
    result = evaluate(folder, config=config_of(settings, "needle"))
    case = result["rows"][0]["tasks"]["needle 500"]["cases"][1]
    from attnlab.evaluation.tasks import task_data

    loaded = al.load_model(folder)
    task = task_data(["needle"], settings, loaded.tokenizer, limit=2048)["needle 500"]
    ids = loaded.tokenizer(task.documents[1]["prompt"], return_tensors="pt").input_ids
    written = loaded.model.generate(ids, max_new_tokens=28, do_sample=False)[0, ids.shape[1] :]
    assert case["text"] == loaded.tokenizer.decode(written, skip_special_tokens=True)[:200]
    assert ids.shape[1] <= 500 - 28


def test_every_subject_is_measured_on_the_same_cases(folder, settings, tmp_path):
    al.Plan({0: "top-r:r=8"}).save(tmp_path / "mine.json")
    result = evaluate(
        folder, mechanisms=["softmax", "top-r:r=10000", "uniform"], plans=[tmp_path / "mine.json"],
        policies=["budget=5000", "budget=8,by=recency"], config=config_of(settings),
    )  # fmt: skip
    rows = {row["subject"]: row for row in result["rows"]}
    assert list(rows) == ["softmax", "top-r:r=10000", "uniform", "plan mine", "cache budget=5000,by=leave-one-out",
                          "cache budget=8,by=recency"]  # fmt: skip
    own = rows["softmax"]["tasks"]
    for exact in ("top-r:r=10000", "cache budget=5000,by=leave-one-out"):
        for task in own:
            for key in ("loss", "acc", "recall"):
                if key in own[task]:
                    assert rows[exact]["tasks"][task][key] == pytest.approx(own[task][key], abs=1e-5)
        texts = [case["text"] for case in rows[exact]["tasks"]["needle 500"]["cases"]]
        assert texts == [case["text"] for case in own["needle 500"]["cases"]]
    assert rows["uniform"]["tasks"]["loss"]["over_own"]["value"] == pytest.approx(
        rows["uniform"]["tasks"]["loss"]["loss"] - own["loss"]["loss"]
    )
    for other in ("uniform", "plan mine", "cache budget=8,by=recency"):
        assert rows[other]["tasks"]["loss"]["loss"] != pytest.approx(own["loss"]["loss"], abs=1e-7)
    page = evaluate_page(result)
    assert all(name in page for name in rows)


@pytest.mark.parametrize("policy", ["h2o:budget=40", "snapkv:window=8,budget=0.25", "kvzip:budget=0.25"])
def test_a_policys_texts_do_not_depend_on_the_batch(folder, settings, policy, monkeypatch):
    from attnlab.evaluation.harness import AttnlabLM

    rows, generated = [], AttnlabLM._model_generate

    def counting(self, context, **options):
        rows.append(len(context))
        return generated(self, context, **options)

    monkeypatch.setattr(AttnlabLM, "_model_generate", counting)
    texts = []
    for batch in (1, 3):
        config = EvaluateConfig(("needle",), replace(settings, cases=3), batch=batch)
        result = evaluate(folder, policies=[policy], config=config)
        texts.append([case["text"] for case in result["rows"][1]["tasks"]["needle 500"]["cases"]])
    assert texts[0] == texts[1]
    # The model itself and the policy, one by one and together; kvzip takes no padding.
    assert rows == [1] * 6 + ([3, 1, 1, 1] if policy.startswith("kvzip") else [3, 3])


def test_a_swapped_loss_is_that_of_swap(folder, settings):
    result = evaluate(folder, mechanisms=["window:r=6,sinks=2"], config=config_of(settings, "loss"))
    loaded = al.load_model(folder)
    ids = torch.tensor([[1, *loaded.tokenizer((folder / "text.txt").read_text()).input_ids[:64]]])
    with torch.no_grad(), al.swap(loaded.model, "window:r=6,sinks=2"):
        logits = loaded.model(ids[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]).item()
    assert result["rows"][1]["tasks"]["loss"]["values"][0] == pytest.approx(expected, abs=1e-5)


def test_a_stride_gives_each_token_a_longer_past(folder, settings):
    strided = replace(settings, stride=16, windows=9)
    loss = evaluate(folder, config=config_of(strided, "loss"))["rows"][0]["tasks"]["loss"]
    loaded = al.load_model(folder)
    ids = loaded.tokenizer((folder / "text.txt").read_text()).input_ids[: 64 + 8 * 16]
    assert loss["tokens"] == len(ids)
    assert loss["windows"] == 9
    with torch.no_grad():
        logits = loaded.model(torch.tensor([ids[15:79]])).logits[0, -16:]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[64:80])).item()
    assert loss["values"][1] == pytest.approx(expected, abs=1e-5)


def test_a_stopped_evaluation_goes_on(folder, settings, tmp_path, monkeypatch):
    from attnlab.evaluation.harness import AttnlabLM

    answers = tmp_path / "answers.jsonl"
    whole = evaluate(folder, mechanisms=["top-r:r=4"], config=config_of(settings))
    calls = []
    asked = AttnlabLM._model_call

    def stops(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return asked(self, *args, **kwargs)

    monkeypatch.setattr(AttnlabLM, "_model_call", stops)
    with pytest.raises(KeyboardInterrupt):
        evaluate(folder, mechanisms=["top-r:r=4"], config=config_of(settings), answers=answers)
    kept = answers.read_bytes()
    answers.write_bytes(kept + b'{"key": "torn')
    resumed = evaluate(folder, mechanisms=["top-r:r=4"], config=config_of(settings), answers=answers)
    before = len(calls)
    again = evaluate(folder, mechanisms=["top-r:r=4"], config=config_of(settings), answers=answers)
    assert len(calls) == before, "every answer was in the file"
    assert answers.read_bytes().startswith(kept)
    for result in (resumed, again):
        assert [row["tasks"] for row in result["rows"]] == [row["tasks"] for row in whole["rows"]]


def test_answers_of_another_model_or_subject_are_not_taken(tmp_path):
    file = AnswerFile(tmp_path / "a.jsonl")
    file.of("one").add_partial("loglikelihood", ("a", " b"), (-1.5, True))
    for same in (file, AnswerFile(tmp_path / "a.jsonl")):
        assert same.of("one").get("loglikelihood", ("a", " b")) == (-1.5, True)
        assert same.of("two").get("loglikelihood", ("a", " b")) is None
    model = torch.nn.Linear(3, 3)
    before = fingerprint(model)
    with torch.no_grad():
        model.weight[1, 1] += 1
    assert fingerprint(model) != before


def test_the_file_of_answers_is_read_once(folder, settings, tmp_path, monkeypatch):
    from attnlab.evaluation import answers

    reads = []
    monkeypatch.setattr(answers, "_read", lambda path: reads.append(path) or {})
    evaluate(folder, mechanisms=["top-r:r=4"], config=config_of(settings, "loss"), answers=tmp_path / "a.jsonl")
    assert len(reads) == 1


def test_policies_that_differ_in_the_seed_alone_have_names_of_their_own():
    subjects = subjects_of(policies=["8,by=random", "budget=8,by=random,seed=3"])
    assert [subject.name for subject in subjects[1:]] == ["cache budget=8,by=random", "cache budget=8,by=random,seed=3"]


def test_the_models_own_refusals_are_rows(folder, settings):
    result = evaluate(folder, mechanisms=["abc-luna:slots=4"], config=config_of(settings, "loss"))
    assert "causal" in result["rows"][1]["refused"]
    assert result["rows"][0]["refused"] is None


def test_lm_eval_finds_the_model_by_name(folder):
    from lm_eval.api.registry import get_model

    lm = get_model("attnlab").create_from_arg_string(f"pretrained={folder},mechanism=top-r:r=4;kernel=exp")
    assert al.spec_of(lm.mechanism) == al.spec_of(al.mechanism("top-r:r=4"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # lm-eval reads the files of all its tasks first.
        pytest.param(
            ["--tasks", "no-such-task"],
            "there is no task named 'no-such-task'",
            marks=pytest.mark.slow,
            id="no-such-task",
        ),
        (["--window", "4096"], "longer than the model's 2048"),
        (["--window", "1024"], "fewer than one window of 1024"),
        (["--tasks", "needle", "--lengths", "9000"], "longer than the model's 2048"),
        (["--tasks", "needle", "--lengths", "40"], "ask for a greater length"),
        (["--tasks", "lambada"], "--lambada"),
        (["--tasks", "needle", "--passages", "3"], "--passages is for the task lambada, which --tasks leaves out"),
        (["--tasks", "needle", "--window", "64"], "--window is for the task loss, which --tasks leaves out"),
        (
            ["--tasks", "loss", "--cases", "3"],
            "--cases is for generated tasks such as needle, which --tasks leaves out",
        ),
        (["--passages", "3"], "--passages is for the task lambada"),
        (["--plan", "absent.json"], "absent.json"),
        (["--policy", "by=mass"], "a cache policy needs its budget, such as budget=64 or budget=0.25; got 'by=mass'"),
        (["--policy", "budget=many"], "setting budget='many' must be float | int"),
        (["--policy", "budget=8,size=3"], "a cache policy has no setting 'size'"),
        (["--policy", "budget=8,budget=9"], "given twice"),
        (["-m", "top-r:r=4", "-m", "top-r:r=4"], "twice"),
        (["--batch", "0"], "--batch"),
    ],
)
def test_bad_input_is_one_line(folder, tmp_path, capsys, words, said):
    short = tmp_path / "short.txt"
    short.write_text("a few words.")
    text = ["--window", "64", "--text", str(short if "1024" in words else folder / "text.txt")]
    text = [] if "--tasks" in words else text
    assert main(["evaluate", str(folder), "--out", str(tmp_path / "p.html"), *text, *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert said in error[-1]
    assert error[-1].startswith("attnlab:")


def test_the_command_writes_a_page_and_json(folder, tmp_path, capsys):
    page = tmp_path / "p.html"
    words = ["evaluate", str(folder), "-m", "top-r:r=4", "--text", str(folder / "text.txt"), "--window", "64"]
    words += ["--windows", "3", "--lengths", "500", "--cases", "2", "-o", str(page)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "top-r:r=4" in shown
    assert "needle 500" in shown
    assert page.stat().st_size > 5000
    assert (tmp_path / "p.answers.jsonl").exists()
    assert main([*words, "--json"]) == 0
    assert [row["subject"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["softmax", "top-r:r=4"]


def test_intervals():
    assert wilson(0, 10)[:2] == (0.0, 0.0)
    assert wilson(0, 10).high == pytest.approx(0.2775, abs=1e-3)
    value, low, high, n = mean_interval([1.0, 3.0], [3.0, 1.0])
    assert (value, n) == (1.5, 2)
    assert low < value < high
    assert mean_interval([2.0])[1:3] == (None, None)
    assert paired_interval([1.0, 2.0, 4.0], [0.0, 1.0, 3.0])[:3] == (1.0, 1.0, 1.0)
    # Student's quantiles, from tables.
    for n, quantile in ((6, 2.5706), (11, 2.2281), (31, 2.0423), (121, 1.9799)):
        interval = mean_interval([float(i % 2) for i in range(n)])
        spread = torch.tensor([float(i % 2) for i in range(n)]).double().std().item() / n**0.5
        assert (interval.high - interval.value) / spread == pytest.approx(quantile, rel=2e-3)
