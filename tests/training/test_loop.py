import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from attnlab.training import (
    Callback,
    CrossEntropy,
    Loss,
    Recipe,
    Schedule,
    average_checkpoints,
    best_checkpoint,
    list_checkpoints,
    load_weights,
    read_metrics,
)
from attnlab.training.terms import Objective
from tests.tolerance import assert_close
from tests.training.jobs import Model, PowerCut, Size, Tokens, assert_same_parameters, job, without_seconds


def test_cross_entropy_by_hand():
    logits = torch.zeros(1, 3, 4)
    logits[0, 1, 2] = math.log(5)
    batch = {"labels": torch.tensor([[0, 2, -100]])}
    loss = CrossEntropy()(None, logits, batch, 0)
    assert loss.count == CrossEntropy().count(batch, 0) == 2
    assert float(loss.total) == pytest.approx(math.log(4) + math.log(8 / 5))
    shifted = CrossEntropy(shift=True)(None, SimpleNamespace(logits=logits), batch, 0)
    assert (float(shifted.total), int(shifted.count)) == (pytest.approx(math.log(4)), 1)


def test_terms_are_refused_where_their_names_or_inputs_are_unclear():
    with pytest.raises(ValueError, match="distinct names other than 'loss'"):
        Objective(nn.Linear(2, 2), [CrossEntropy(), CrossEntropy()])
    with pytest.raises(ValueError, match="other than 'loss'"):
        Objective(nn.Linear(2, 2), [CrossEntropy(name="loss")])
    with pytest.raises(ValueError, match="needs batch\\['labels'\\], the batch has input_ids"):
        CrossEntropy()(None, torch.zeros(1, 2, 3), {"input_ids": 0}, 0)
    with pytest.raises(ValueError, match="must be a tensor or have logits, got SimpleNamespace"):
        CrossEntropy()(None, SimpleNamespace(hidden=1), {"labels": 0}, 0)


def test_the_loop_is_plain_adamw_on_the_weighted_sum_of_means(tmp_path):
    trained, _ = job(tmp_path / "run", dropout=0.0, steps=5, evaluate_at=(), watch=None)
    model, source = Model(dropout=0.0), Tokens()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.03)
    for step in range(5):
        batch = source.batch(step)
        logits = model(batch["input_ids"])["logits"]
        nll = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        loss = nll + 0.01 * (step + 1) * logits[:, 0].square().sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 0.03 * [1 / 3, 2 / 3, 1, 1, 0.5][step]
        optimizer.step()
    for name, p in model.named_parameters():
        assert_close(trained.state_dict()[name], p, what=name)


def test_nesterov_with_a_cosine_is_sgd_and_resumes_bit_for_bit(tmp_path):
    changes = {
        "recipe": Recipe(kind="nesterov", lr=0.5, betas=(0.99, 0.0), weight_decay=0.0, clip=0.1),
        "schedule": Schedule("cosine", warmup=2),
        "steps": 6, "evaluate_at": (), "watch": None, "checkpoint_every": 2, "dropout": 0.0, "terms": [CrossEntropy()],
    }  # fmt: skip
    trained, _ = job(tmp_path / "whole", **changes)
    model, source = Model(dropout=0.0), Tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.99, nesterov=True)
    for step in range(6):
        batch = source.batch(step)
        logits = model(batch["input_ids"])["logits"]
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        # The cosine falls over the four updates after the warm-up: (1 + cos(pi p)) / 2 at p = 0, 1/4, 1/2, 3/4.
        factor = [0.5, 1, 1, 0.85355339, 0.5, 0.14644661][step]
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * factor
        optimizer.step()
    for name, p in model.named_parameters():
        assert_close(trained.state_dict()[name], p, what=name)
    with pytest.raises(RuntimeError, match="power cut"):
        job(tmp_path / "cut", callbacks=[PowerCut(at=5)], **changes)
    resumed, _ = job(tmp_path / "cut", resume=True, callbacks=[PowerCut(at=None)], **changes)
    assert_same_parameters(resumed.state_dict(), trained.state_dict())


@pytest.mark.parametrize("terms", [[CrossEntropy()], [CrossEntropy(), Size()]], ids=["counts known", "counts computed"])
def test_accumulated_parts_give_the_gradient_of_the_whole_batch(tmp_path, terms):
    runs = [job(tmp_path / f"{n}", accumulate=n, dropout=0.0, terms=terms)[0] for n in (1, 3)]
    for a, b in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        assert_close(a, b)
    one, three = (read_metrics(tmp_path / f"{n}") for n in (1, 3))
    for a, b in zip(one, three, strict=True):
        assert a["values"] == pytest.approx(b["values"], rel=1e-4)


def test_training_does_not_depend_on_when_it_is_evaluated(tmp_path):
    class Noisy(Callback):
        def on_evaluation(self, moment):
            torch.rand(7)
            assert not moment.model.training
            moment.model(torch.tensor([[1]]))["logits"].sum().backward()

    watched, _ = job(tmp_path / "watched", callbacks=[Noisy()], evaluate_at=range(21), log_every=1)
    alone, _ = job(tmp_path / "alone", evaluate_at=(), watch=None, checkpoint_every=None)
    assert_same_parameters(watched.state_dict(), alone.state_dict())


def test_metrics_have_a_line_for_each_log_and_each_evaluation(tmp_path):
    job(tmp_path / "run", steps=10, evaluate_at=(0, 1, 10), log_every=4)
    lines = read_metrics(tmp_path / "run")
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("eval", 0),
        ("eval", 1),
        ("train", 4),
        ("train", 8),
        ("train", 10),
        ("eval", 10),
    ]
    assert list(lines[1]["values"]) == ["valid/loss", "valid/cross_entropy", "valid/size"]
    assert list(lines[2]["values"]) == ["loss", "cross_entropy", "size", "lr", "grad_norm"]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    environment = {"versions", "python", "device", "commit", "processes"}
    assert set(described) == {"name", "config", "seed", "checksum", *environment}
    assert described["config"]["training"]["recipe"]["lr"] == 0.03


class Scripted(Callback):
    """Returns the evaluations' values from a list."""

    def __init__(self, values):
        self.values, self.seen = values, 0

    def on_evaluation(self, moment):
        self.seen += 1
        return {"score": self.values[moment.step]}

    def state(self):
        return {"seen": self.seen}

    def load_state(self, state):
        self.seen = state["seen"]


def test_early_stop_and_the_best_checkpoint(tmp_path):
    scores = [5.0, 3.0, 4.0, 3.0, 9.0, 9.0]
    scripted = Scripted(scores)
    model, outcome = job(
        tmp_path / "run",
        callbacks=[scripted],
        evaluate_at=range(6),
        watch="score",
        patience=3,
        checkpoint_every=1,
        steps=9,
    )
    assert (outcome.step, outcome.stopped_early, outcome.best_step, outcome.best_value) == (4, True, 1, 3.0)
    assert best_checkpoint(tmp_path / "run").name == "step-00000001"
    assert [p.name for p in list_checkpoints(tmp_path / "run")] == [f"step-{s:08d}" for s in (1, 3, 4)]
    other = Model()
    assert load_weights(other, tmp_path / "run") == 4
    assert_same_parameters(other.state_dict(), model.state_dict())
    assert load_weights(other, tmp_path / "run", which="best") == 1
    assert not torch.equal(other.embed.weight, model.embed.weight)
    assert other.embed.weight is other.head.weight

    model, outcome = job(
        tmp_path / "max", callbacks=[Scripted(scores)], evaluate_at=range(6), watch="score", maximise=True, steps=5
    )
    assert (outcome.best_step, outcome.best_value, outcome.stopped_early) == (4, 9.0, False)


def test_a_watched_value_that_is_not_evaluated_is_refused(tmp_path):
    with pytest.raises(ValueError, match="watch='bleu' is not among the evaluation's values: valid/loss, valid/cross"):
        job(tmp_path / "run", watch="bleu")


def test_averaging_the_last_checkpoints(tmp_path):
    job(tmp_path / "run", keep=3, checkpoint_every=2, watch=None)
    paths = list_checkpoints(tmp_path / "run")
    assert [p.name[-2:] for p in paths] == ["16", "18", "20"]
    models = [Model() for _ in paths]
    for model, step in zip(models, (16, 18, 20), strict=True):
        load_weights(model, tmp_path / "run", which=step)
    mean = average_checkpoints(paths)
    expected = sum(m.mix[0].weight.double() for m in models) / 3
    assert_close(mean["mix.0.weight"], expected)
    models[0].load_state_dict(mean)
    with pytest.raises(ValueError, match="no checkpoints to average"):
        average_checkpoints([])


def test_bf16_trains_and_keeps_parameters_in_float32(tmp_path):
    kinds = set()

    class Look(CrossEntropy):
        def __call__(self, model, output, batch, step):
            kinds.add(output["logits"].dtype)
            return super().__call__(model, output, batch, step)

    model, _ = job(tmp_path / "run", terms=[Look()], precision="bf16", steps=40, evaluate_at=(0, 40))
    assert kinds == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    first, last = (line["values"]["valid/loss"] for line in read_metrics(tmp_path / "run") if line["kind"] == "eval")
    assert last < 0.8 * first


def test_fp16_from_a_launcher_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match="precision must be bf16 or no, got fp16"):
        job(tmp_path / "run")


def test_a_model_may_be_called_in_its_own_way(tmp_path):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Model()

        def forward(self, tokens):
            return self.inner(tokens)

    from attnlab.training import Settings, train

    train(
        Own(),
        Tokens(),
        terms=[CrossEntropy()],
        settings=Settings(steps=2, device="cpu"),
        run_dir=tmp_path / "run",
        forward=lambda model, batch: model(batch["input_ids"]),
    )
    assert [p.name for p in list_checkpoints(tmp_path / "run")] == ["step-00000002"]


def test_a_term_with_nothing_to_average_over_is_zero(tmp_path):
    class Nothing:
        name = "nothing"

        def __call__(self, model, output, batch, step):
            return Loss(output["logits"].sum() * 0, 0)

    job(tmp_path / "run", terms=[CrossEntropy(), Nothing()], steps=3, evaluate_at=(3,))
    assert read_metrics(tmp_path / "run")[-1]["values"]["valid/nothing"] == 0.0


def test_a_hugging_face_model_trains_and_its_checkpoint_loads(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    def fresh():
        torch.manual_seed(0)
        tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=6, n_head=2, vocab_size=13, n_positions=7, **tokens))

    model, _ = job(tmp_path / "run", model=fresh(), terms=[CrossEntropy()], steps=3, evaluate_at=(3,))
    other = fresh()
    load_weights(other, tmp_path / "run")
    assert_same_parameters(other.state_dict(), model.state_dict())


def test_frozen_parameters_stay_and_resume(tmp_path):
    def frozen():
        model = Model()
        model.mix[0].weight.requires_grad_(False)
        return model

    before = frozen().mix[0].weight
    whole, _ = job(tmp_path / "whole", model=frozen())
    with pytest.raises(RuntimeError, match="power cut"):
        job(tmp_path / "cut", model=frozen(), callbacks=[PowerCut(at=10)])
    cut, _ = job(tmp_path / "cut", model=frozen(), resume=True, callbacks=[PowerCut(at=None)])
    assert torch.equal(whole.mix[0].weight, before)
    assert_same_parameters(cut.state_dict(), whole.state_dict())


def test_the_first_log_after_a_resume_covers_all_its_steps(tmp_path):
    job(tmp_path / "whole", log_every=7)
    with pytest.raises(RuntimeError, match="power cut"):
        job(tmp_path / "cut", log_every=7, callbacks=[PowerCut(at=10)])
    job(tmp_path / "cut", log_every=7, resume=True, callbacks=[PowerCut(at=None)])
    assert without_seconds(read_metrics(tmp_path / "cut")) == without_seconds(read_metrics(tmp_path / "whole"))


def test_callbacks_remember_across_a_resume(tmp_path):
    scores = [0.0] * 21
    whole, cut = Scripted(scores), Scripted(scores)
    job(tmp_path / "whole", callbacks=[whole, PowerCut(at=None)])
    with pytest.raises(RuntimeError, match="power cut"):
        job(tmp_path / "cut", callbacks=[cut, PowerCut(at=14)])
    fresh = Scripted(scores)
    job(tmp_path / "cut", callbacks=[fresh, PowerCut(at=None)], resume=True)
    assert fresh.seen == whole.seen == 5


def test_a_tracker_receives_the_metrics(tmp_path):
    pytest.importorskip("tensorboard")
    job(tmp_path / "run", track="tensorboard")
    assert list((tmp_path / "run").glob("**/events.out.tfevents.*"))


@pytest.mark.slow
# torch's own: what it imports to compile still uses torch.jit.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_training_follows_eager_training(tmp_path):
    runs = [job(tmp_path / f"{c}", compile=c, dropout=0.0)[0] for c in (False, True)]
    for a, b in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        assert_close(a, b, dtype=torch.bfloat16)
    assert list(runs[1].state_dict()) == list(runs[0].state_dict())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_training_is_bf16_learns_and_resumes(tmp_path, compiled):
    changes = {"device": "auto", "compile": compiled, "steps": 40, "evaluate_at": (0, 40)}
    with pytest.raises(RuntimeError, match="power cut"):
        job(tmp_path / "cut", callbacks=[PowerCut(at=30)], **changes)
    model, outcome = job(tmp_path / "cut", callbacks=[PowerCut(at=None)], resume=True, **changes)
    job(tmp_path / "whole", **changes)
    assert model.embed.weight.device.type == "cuda"
    cut, whole = (read_metrics(tmp_path / name) for name in ("cut", "whole"))
    assert [(x["kind"], x["step"]) for x in cut] == [(x["kind"], x["step"]) for x in whole]
    assert outcome.metrics["valid/loss"] == pytest.approx(whole[-1]["values"]["valid/loss"], rel=0.05)
    assert outcome.metrics["valid/loss"] < 0.8 * whole[0]["values"]["valid/loss"]


def test_adam_and_schedules_run(tmp_path):
    job(
        tmp_path / "a",
        recipe=Recipe(kind="adam", clip=None),
        schedule=Schedule("inverse_sqrt", warmup=4),
        steps=6,
        evaluate_at=(),
    )
    job(tmp_path / "b", schedule=Schedule("cosine", final=0.1), steps=6, evaluate_at=())
    assert read_metrics(tmp_path / "a")[0]["values"]["lr"] == pytest.approx(0.00075)
