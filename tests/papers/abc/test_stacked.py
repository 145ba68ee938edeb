"""Seeds of a translator as one model compute what each computes alone; their batches and their clipping."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import embedding

from attnlab.data import Specials
from attnlab.models import Transformer, Translation, named_config
from attnlab.training import Recipe
from attnlab.training.side_by_side import Learner
from papers.abc import doc_mt, mt
from papers.abc.dense_attention import short_attention
from papers.abc.stacked import Stacked, StackedLearner, StackedSource, StackedTranslation, few_launches
from papers.abc.translators import CONFIGS, AbcMtConfig, build
from papers.common.translation import ShapedSource

SMALL = AbcMtConfig(width=24, heads=3, layers=2, hidden=20, dropout=0.0)
VOCAB = 29
SPECIALS = Specials(pad=1, bos=0, eos=2)
# Of each kind of attention one; tied controls are shared modules, the embedding is a shared parameter.
KEYS = ["BASE", "ABC_MLP-8-2", "ABC_RD-8-8", "Linformer-8-8", "Window-8-8", "Cluster-8-8", "MLP-ReLU-32-8"]


def batch(*lead: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    x, y = (torch.randint(5, VOCAB, (*lead, 7, 11), generator=draw) for _ in range(2))
    seen = torch.arange(11) < torch.randint(3, 12, (*lead, 7, 1), generator=draw)
    labels = torch.where(torch.arange(11) < torch.randint(2, 12, (*lead, 7, 1), generator=draw), y, -100)
    return {"input_ids": x, "attention_mask": seen, "decoder_input_ids": y.roll(1, -1), "labels": labels}


def alone(key: str, seeds: tuple[int, ...], stack: ExitStack, config: AbcMtConfig = SMALL) -> list[Transformer]:
    models = [build(config, mt.BY_KEY[key], vocab=VOCAB, seed=seed) for seed in seeds]
    for model in models:
        stack.enter_context(short_attention(model))
    return models


# As the paper's: post-norm, ReLU, biases and gains.
AS_THE_PAPERS = replace(SMALL, norm="post", activation="relu", affine=True, weight_decay=0.0)


@pytest.mark.parametrize("config", [SMALL, AS_THE_PAPERS], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("key", KEYS)
def test_a_stack_has_the_losses_and_gradients_of_its_models(key: str, config: AbcMtConfig) -> None:
    together = batch(3)
    with ExitStack() as stack:
        models = alone(key, (0, 1, 2), stack, config)
        stacked = Stacked(models)
        inputs = {name: t for name, t in together.items() if name != "labels"}
        total, count = StackedTranslation()(stacked, stacked(**inputs), together, 0)
        total.sum().backward()
        gradients = stacked.named(stacked.weights.grad)
        for i, model in enumerate(models):
            mine = {name: t[i] for name, t in together.items()}
            output = model(**{name: t for name, t in mine.items() if name != "labels"})
            one = Translation()(model, output, mine, 0)
            one.total.backward()
            torch.testing.assert_close(total[i], one.total)
            assert count[i] == one.count
            # Gradients through the log of a ReLU near zero magnify what rounding leaves.
            atol = 1e-4 if "ReLU" in key else 2e-5
            for name, p in model.named_parameters():
                torch.testing.assert_close(gradients[name][i], p.grad, atol=atol, rtol=1e-4)


def test_updates_of_a_stack_are_those_of_its_models() -> None:
    """Gradients are clipped for each model by itself."""
    recipe = Recipe(lr=1.0, weight_decay=0.5, clip=0.01, eps=1.0)
    together = batch(2)
    with ExitStack() as stack:
        models = alone("ABC_MLP-8-2", (3, 4), stack)
        learner = StackedLearner(Stacked(models), StackedTranslation(), recipe)
        singles = [Learner(model, Translation(), recipe) for model in models]
        for _ in range(2):
            learner.update(together, 0.1)
            for i, one in enumerate(singles):
                one.update({name: t[i] for name, t in together.items()}, 0.1)
        for i, (one, model) in enumerate(zip(singles, models, strict=True)):
            torch.testing.assert_close(learner.loss[i], one.loss)
            for name, p in model.named_parameters():
                torch.testing.assert_close(learner.model.snapshot()[name][i], p.detach(), atol=1e-6, rtol=1e-5)


def test_vectors_of_a_stack_are_refused_where_weights_decay() -> None:
    """A stack is one matrix, of which all or nothing decays."""
    with ExitStack() as stack:
        stacked = Stacked(alone("BASE", (0,), stack, AS_THE_PAPERS))
        with pytest.raises(ValueError, match="train without weight decay, or without biases and gains"):
            StackedLearner(stacked, StackedTranslation(), Recipe(weight_decay=0.1))
        learner = StackedLearner(stacked, StackedTranslation(), Recipe(weight_decay=0.0))
        learner.update(batch(1), 1e-3)
        assert learner.loss.isfinite().all()


def test_the_papers_translator_is_the_base_transformer() -> None:
    """Post-norm with ReLU and Table 10's sizes, as the library's own config of that model has them."""
    small = replace(CONFIGS["paper"], width=16, heads=2, layers=2, hidden=32)
    model = build(small, mt.BASE, vocab=VOCAB, seed=0)
    sizes = {"vocab": model.config.vocab, "width": 16, "heads": 2, "layers": 2, "hidden": 32}
    assert model.config == replace(named_config("translation-wmt14"), **sizes)
    paper, table_10 = CONFIGS["paper"], named_config("translation-wmt14")
    for name in ("width", "heads", "layers", "hidden", "dropout"):
        assert getattr(paper, name) == getattr(table_10, name)
    assert paper.warmup == 6000
    documents, right_column = doc_mt.CONFIGS["paper"].translation, named_config("translation-iwslt14")
    assert (documents.hidden, documents.dropout, documents.warmup) == (right_column.hidden, right_column.dropout, 4000)


def test_dropout_differs_between_models_and_is_unbiased() -> None:
    ones = torch.ones(2, 31, 37, requires_grad=True)
    for training in (True, False):
        with few_launches():
            layer = torch.nn.Dropout(0.25).train(training)
            dropped = torch.func.vmap(layer, randomness="different")(ones)
        if not training:
            assert torch.equal(dropped, ones)
            continue
        assert dropped.unique().tolist() == [0.0, pytest.approx(4 / 3)]
        assert not torch.equal(dropped[0], dropped[1])
        assert float(dropped.detach().mean()) == pytest.approx(1, abs=0.05)
        dropped.sum().backward()
        torch.testing.assert_close(ones.grad, dropped.detach())


def test_rows_have_the_gradients_of_an_embedding() -> None:
    """A token twice, of two models and of a table that they share."""
    ids = torch.tensor([[[1, 2], [1, 0]], [[0, 0], [4, 2]]])
    for shape in ((2, 5, 3), (5, 3)):
        table = torch.arange(15.0 * (2 if len(shape) == 3 else 1)).view(shape).requires_grad_()
        with few_launches():
            rows = torch.func.vmap(embedding, in_dims=(0, 0 if len(shape) == 3 else None))(ids, table)
        right = torch.stack([embedding(i, t) for i, t in zip(ids, table.expand(2, 5, 3), strict=True)])
        assert torch.equal(rows, right)
        weights = torch.arange(24.0).view(rows.shape)
        (mine,), (theirs,) = (torch.autograd.grad((t * weights).sum(), [table]) for t in (rows, right))
        assert torch.equal(mine, theirs)


def test_sources_of_one_order_agree_in_width_and_not_in_pairs() -> None:
    rows = [np.arange(5, 5 + n % 9) for n in range(60)]
    sources = [ShapedSource(rows, rows, specials=SPECIALS, tokens=20, widths=(5, 10), seed=s, order=7) for s in (0, 1)]
    both = StackedSource(sources)
    seen = []
    for step in range(2 * sources[0].steps_per_epoch):
        one = both.batch(step)["input_ids"]
        assert one.shape in ((2, 4, 5), (2, 2, 10))
        assert torch.equal(one[1], sources[1].batch(step)["input_ids"])
        seen.append(torch.equal(one[0], one[1]))
    assert not all(seen)
    widths = [both.batch(step)["input_ids"].shape[-1] for step in range(2 * sources[0].steps_per_epoch)]
    assert widths[: len(widths) // 2] != widths[len(widths) // 2 :]
