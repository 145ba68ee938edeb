"""What a decoding step of a converted model launches beside the model's own operators, by Triton's interpreter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import attnlab as al
from tests.adapters import zoo as hf_zoo

pytest.importorskip("triton")

from attnlab.kernels import ragged
from attnlab.kernels.launching import launch
from attnlab.kernels.select import step
from attnlab.mechanisms import abc_select, per_group

SELECT = "abc-select:slots=4,window=8,sinks=1,block=4"
LAYERS = 3


class Operators(TorchDispatchMode):
    """Counts operators that compute something: not views, nor what only reserves memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, returned = func.overloadpacket.__name__, func._schema.returns
        is_view = bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
        if isinstance(out, torch.Tensor) and out.numel() and not is_view and "empty" not in name and "view" not in name:
            self.seen[name] += 1
        return out


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are launched; they count as one operator each, whatever the interpreter does for them."""
    launched = list[str]()

    def counted(kernel: Any, *args: Any, **kwargs: Any) -> None:
        launched.append(kernel.__name__)
        with torch._C._DisableTorchDispatch():
            launch(kernel, *args, **kwargs)

    for of_kernels in (ragged, step):
        monkeypatch.setattr(of_kernels, "launch", counted)
    for caller in (abc_select, per_group):
        monkeypatch.setattr(caller, "kernels_take", lambda t: True)
    return launched


def step_of(spec: str, kernels: list[str]) -> tuple[Counter[str], Counter[str]]:
    """(operators, kernels) of one step after a prompt, with room in every cache."""
    torch.manual_seed(0)
    model = al.convert(hf_zoo.build("llama", implementation="sdpa").eval(), spec)
    cache = DynamicCache()
    with torch.no_grad():
        for lo, hi in ((0, 40), (40, 41)):
            model(torch.arange(lo, hi).view(1, -1) % 50 + 3, past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            for keys in getattr(layer.past, "caches", []):
                keys.capacity = 64
        # Makes the room.
        for _ in range(3):
            model(torch.tensor([[5]]), past_key_values=cache, use_cache=True)
        kernels.clear()
        with Operators() as operators:
            model(torch.tensor([[5]]), past_key_values=cache, use_cache=True)
    return operators.seen, Counter(kernels)


def test_a_step_of_one_memory_is_one_launch_in_a_layer(kernels: list[str]) -> None:
    operators, launched = step_of(SELECT, kernels)
    assert launched == {"take_and_read": LAYERS}
    # The model itself numbers the new token and casts that number.
    assert operators["arange"] == operators["_to_copy"] == 1
    assert not {"index_copy_", "clone", "copy_"} & operators.keys()


def test_heads_that_keep_softmax_add_three_launches_and_their_memory_one(kernels: list[str]) -> None:
    alone, _ = step_of(SELECT, kernels)
    mixed, launched = step_of(f"per-group:groups=softmax/{SELECT.replace(',', ';')}", kernels)
    assert launched == {"append_token": LAYERS, "read_part": LAYERS, "take_and_read": LAYERS}
    # Beside kernels, the outputs are joined.
    assert mixed - alone == {"cat": LAYERS}
    assert not alone - mixed
