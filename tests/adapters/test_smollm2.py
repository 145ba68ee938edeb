"""SmolLM2-135M attends by our softmax as by its own attention: logits, tokens, caches, padding and work."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnlab.adapters import LoadedModel, load_model, swap
from attnlab.adapters.named_models import named_model_file
from attnlab.evaluation.explore import explore

TEXT = (
    "The lighthouse stood at the end of a long pier, and every evening its keeper climbed the stairs to light the "
    "lamp. Ships that came home late saw it from far away."
)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    pytest.importorskip("gguf", reason="SmolLM2 is a GGUF file: pip install gguf")
    try:
        named_model_file("smollm2")
    except ValueError:
        pytest.skip("SmolLM2 is not here: run `make models`")
    # One model for all tests of this file: it takes about ten seconds to load.
    return load_model("smollm2")


def left_padded(loaded: LoadedModel) -> dict[str, Tensor]:
    """Two texts of different length, the shorter one padded on the left."""
    loaded.tokenizer.padding_side = "left"
    return dict(loaded.tokenizer([TEXT[:60], TEXT], return_tensors="pt", padding=True))


def one_text(loaded: LoadedModel) -> dict[str, Tensor]:
    return dict(loaded.tokenizer(TEXT, return_tensors="pt"))


@pytest.mark.parametrize("inputs", [one_text, left_padded])
@torch.no_grad()
def test_logits_are_the_models_own(loaded: LoadedModel, inputs: Any) -> None:
    batch = inputs(loaded)
    real = batch["attention_mask"].bool()
    expected = loaded.model(**batch).logits[real]
    with swap(loaded.model, "softmax"):
        actual = loaded.model(**batch).logits[real]
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("beams", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("inputs", [pytest.param(one_text, marks=pytest.mark.slow), left_padded])
def test_generate_gives_the_same_tokens(loaded: LoadedModel, inputs: Any, beams: int, cache: str) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "num_beams": beams}
    settings |= {"cache_implementation": cache, "disable_compile": True}
    batch = inputs(loaded)
    expected = loaded.model.generate(**batch, **settings)
    with swap(loaded.model, "softmax"):
        actual = loaded.model.generate(**batch, **settings)
    assert actual.tolist() == expected.tolist()


class Work(TorchDispatchMode):
    """Counts products of matrices and calls of attention, and the elements that all operators write."""

    def __init__(self) -> None:
        super().__init__()
        self.heavy: Counter[str] = Counter()
        self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, returned = func.overloadpacket.__name__, func._schema.returns
        if name in ("mm", "addmm", "bmm", "baddbmm") or "scaled_dot_product" in name:
            self.heavy[name] += 1
        if not (returned and returned[0].alias_info is not None and not returned[0].alias_info.is_write):
            self.written += sum(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))
        return out


@torch.no_grad()
def test_a_forward_pass_does_the_work_of_sdpa(loaded: LoadedModel) -> None:
    """In operators, which do not depend on the machine; benchmarks/hf_overhead.py has the times."""
    ids = torch.randint(1000, 40_000, (1, 512))
    with Work() as own:
        loaded.model(input_ids=ids, use_cache=False)
    with swap(loaded.model, "softmax"), Work() as swapped:
        loaded.model(input_ids=ids, use_cache=False)
    layers = loaded.model.config.num_hidden_layers
    assert [count for name, count in own.heavy.items() if "scaled_dot_product" in name] == [layers]
    assert swapped.heavy == own.heavy
    assert swapped.written < 1.05 * own.written


@pytest.mark.slow
def test_the_page_of_all_heads_is_small(loaded: LoadedModel) -> None:
    """30 x 9 heads over 256 tokens, with the two readings of the default."""
    ids = loaded.tokenizer(TEXT * 10)["input_ids"][:256]
    page = explore(loaded, text=loaded.tokenizer.decode(ids))
    assert len(page.html()) < 8_000_000
