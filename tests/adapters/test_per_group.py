"""Models with a memory for every key/value head: they generate, save, load and start as clusters, in the bytes planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import attnlab as al
from attnlab.adapters import adapter_of
from tests.adapters.converted import converted
from tests.adapters.test_initialise import TEXTS, Words
from tests.adapters.test_load import write_tokenizer
from tests.adapters.test_memory_cache import WAYS, written

HYBRID = "abc-hybrid:slots=3;window=4;sinks=1;block=2"
# Of the tiny Llama: three layers of two key/value heads.
PLAN = al.Plan(
    {0: f"per-group:groups=softmax/{HYBRID}", 2: f"per-group:groups={HYBRID};control=x/abc-mlp:slots=3;tied=false"},
    al.PlannedFor(layers=3, key_value_heads=2, head_size=6),
)
STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories15M"


@pytest.mark.parametrize("way", ["greedy", "beam", "sampled beams"])
def test_the_tokens_of_recomputing(way: str) -> None:
    model = converted("llama", PLAN)
    assert torch.equal(written(model, **WAYS[way]), written(model, **WAYS[way], use_cache=False))


def test_it_is_saved_and_comes_back(tmp_path: Path) -> None:
    model = converted("llama", PLAN).eval()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    again = al.load_model(tmp_path).model
    ids = torch.randint(3, 61, (2, 13))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    specs = {c.layer: al.spec_of(c.mechanism) for c in adapter_of(again).conversions()}
    assert specs == PLAN.layers


def test_controls_inside_start_as_clusters_of_their_own_heads() -> None:
    plan = al.Plan({1: f"per-group:groups=softmax/{HYBRID}", 2: HYBRID.replace(";", ",")})
    model = converted("llama", plan)
    al.initialise_control(model, TEXTS, tokenizer=Words(), tokens=120, length=40)
    part, whole = (model.attnlab[f"decoder_{i}"] for i in (1, 2))
    with torch.no_grad(), al.swap(model, "softmax"), al.record(model) as trace:
        for text in TEXTS[:1]:
            model(torch.tensor([Words()(text)["input_ids"][:40]]))
    assert whole.key_weight.shape == (2, 3, 6)
    assert part.learned["1"].key_weight.shape == (1, 3, 6)
    # Centres over their variance point where the keys of head 1 do, not where those of head 0 do.
    k = trace[1].call.k[0]
    share = part.learned["1"].log_alpha(al.AttentionCall(k[None, 1:, :0], k[None, 1:], k[None, 1:])).exp()
    assert torch.allclose(share.sum(-1), torch.ones(()), atol=1e-5)
    assert share.amax(-1).mean() > 0.6


def llama(read_by: int) -> Any:
    config = tf.LlamaConfig(vocab_size=61, hidden_size=12 * read_by, intermediate_size=16, num_hidden_layers=3,
                            num_attention_heads=3 * read_by, num_key_value_heads=3)  # fmt: skip
    return tf.LlamaForCausalLM(config).eval()


def stories() -> Any:
    if not STORIES.is_dir():
        pytest.skip("../shared has no stories15M")
    return al.load_model(STORIES).model


@pytest.mark.parametrize("make", [lambda: llama(2), lambda: llama(3), stories], ids=["2", "3", "stories15M"])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_cache_of_generate_is_as_small_as_it_says(make: Any, rows: int) -> None:
    """Softmax in one of three heads, hybrids in others, a layer of one mechanism and one that stays as it is."""
    model = make()
    plan = al.Plan(
        {
            0: f"per-group:groups=softmax/{HYBRID}/{HYBRID}",
            1: "abc-hybrid:slots=16,window=32,sinks=4",
        }
    )
    model = al.convert(model, plan)
    length = 150
    generated = model.generate(
        torch.randint(3, 60, (rows, length - 9)), max_new_tokens=10, min_new_tokens=10, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    held, said = al.held_bytes(generated.past_key_values), rows * al.cache_bytes(model, length)
    assert abs(held - said) <= 0.05 * said
    assert held < 0.8 * rows * al.cache_bytes(make(), length)


def test_a_plan_for_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    plan = al.Plan.load(PLAN.save(tmp_path / "plan.json"))
    assert plan == PLAN
    message = (
        r"^this plan is for 3 layers with 2 key/value heads of 6; the model has 3 layers with 3 key/value heads of 4; "
        r"make a plan for this model$"
    )
    model = llama(2)
    before = model.config.to_dict()
    for attempt in (lambda: al.convert(model, plan), lambda: al.swap(model, plan).__enter__()):
        with pytest.raises(ValueError, match=message):
            attempt()
    assert model.config.to_dict() == before
    assert not al.is_converted(model)


@pytest.mark.parametrize("wrong", [{"layers": 3}, {"layers": 3, "key_value_heads": 0, "head_size": 4}, [3], "x"])
def test_a_plan_file_with_another_planned_for_is_refused(tmp_path: Path, wrong: Any) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN.to_json() | {"planned_for": wrong}))
    with pytest.raises(ValueError, match=r"plan.json: not a plan \("):
        al.Plan.load(tmp_path / "plan.json")
