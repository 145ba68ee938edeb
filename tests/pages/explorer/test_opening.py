"""The head that a page opens on."""

from __future__ import annotations

import numpy as np
import pytest

from attnlab.pages.explorer import Item, LayerMaps
from attnlab.pages.explorer.opening import telling_share

from .examples import shown, softmax, text

N = 12
BACK = np.eye(N)[[0, *range(N - 1)]]


def looking_up(strength: float, *, causal: bool = False) -> np.ndarray:
    """A head whose queries each look at one key that neither a place nor a distance explains."""
    keys = np.random.default_rng(3).permutation(N)
    if causal:
        keys = np.random.default_rng(3).integers(0, np.arange(1, N + 1))
    uniform = np.tril(np.ones((N, N))) if causal else np.ones((N, N))
    return strength * np.eye(N)[keys] + (1 - strength) * uniform / uniform.sum(1, keepdims=True)


@pytest.mark.parametrize("dull", [np.eye(N), BACK, np.eye(N)[[0] * N], np.eye(N)[[5] * N], np.full((N, N), 1 / N)])
def test_places_and_distances_tell_nothing(dull: np.ndarray) -> None:
    assert telling_share(dull[None])[0] < 0.1
    assert telling_share(np.stack([dull, looking_up(0.5)])).argmax() == 1


def test_causal_heads_are_judged_by_the_keys_they_can_see() -> None:
    uniform = looking_up(0.0, causal=True)
    assert telling_share(uniform[None])[0] == 0
    assert telling_share(np.stack([uniform, BACK, looking_up(0.6, causal=True)])).argmax() == 2


def test_broken_and_tiny_maps_have_a_share_too() -> None:
    assert telling_share(np.full((2, 3, 3), np.nan)).tolist() == [0, 0]
    assert telling_share(np.ones((1, 1, 1))).tolist() == [0]
    assert telling_share(softmax(0, 2, 5, 3)).shape == (2,)


def page_of(*steps: int | None, best: int = 1) -> dict[str, object]:
    """The opening of items with two layers of two heads, in which (``best``, 1) looks up in the last item only."""
    tokens = {"source": text([f"t{i}" for i in range(N)])}
    items = []
    for i, step in enumerate(steps):
        heads = [[BACK, looking_up(0.4)], [BACK, np.eye(N)]]
        if i == len(steps) - 1:
            heads[best][1] = looking_up(0.9)
        layers = [LayerMaps("encoder", layer, {"standard": np.stack(maps)}) for layer, maps in enumerate(heads)]
        items.append(Item(f"{i}", tokens, layers, step=step))
    return shown(items).packed.meta["opens"]


def test_a_page_opens_on_the_head_with_the_largest_share() -> None:
    opens = page_of(None)
    assert (opens["kind"], opens["layer"], opens["head"]) == ("encoder", 1, 1)
    assert opens["share"] == pytest.approx(telling_share(looking_up(0.9)[None])[0], rel=1e-2)


def test_of_several_texts_the_first_decides_and_of_a_run_the_last_step() -> None:
    assert page_of(None, None)["layer"] == 0
    assert page_of(0, 100)["layer"] == 1
