"""The demo's page: what its sentences say, which mechanisms keep the quality, and acts that are missing."""

from __future__ import annotations

from typing import Any

import pytest

from attnlab.pages.demo import WAITING, demo_page, demo_sentences, verdict
from attnlab.pages.numbers import TIMES

from .examples import NASTY, a_demo
from .parsing import parse


def row(low: float | None, high: float | None, **others: Any) -> dict[str, Any]:
    quality = {"loss_above": 0.1, "loss_above_low": low, "loss_above_high": high}
    return {"mechanism": "top-r:r=8", "quality": quality, **others}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (row(-0.01, 0.03), "kept"),
        (row(0.01, 0.03), "lost"),
        (row(-0.05, -0.01), "kept"),
        (row(None, None), "unknown"),
        (row(0.0, 0.0, exact=True), "exact"),
        ({"mechanism": "softmax"}, "exact"),
        ({"mechanism": "top-r:r=8", "quality": None}, "unknown"),
    ],
)
def test_the_interval_says_whether_the_quality_is_kept(given: dict[str, Any], expected: str) -> None:
    assert verdict(given) == expected


def test_the_sentences_are_computed_from_the_numbers() -> None:
    first, second, third = demo_sentences(a_demo())
    assert "“[SEP]” gets 31 % of the weight of head 5 in layer 3, on average" in first
    assert first.endswith("4 % is left, and a diagonal remains.")
    assert "value-aware:r=d+1 keeps the model's quality" not in second
    assert third.startswith("With 64 keys a head instead of all, the cache of 8,192 tokens takes 0.8 % of the bytes")
    assert "+0.09 [+0.08, +0.10] nats a token" in third


def test_a_token_that_gains_is_not_said_to_be_cancelled() -> None:
    result = a_demo()
    result["head"]["most_changed"] = {"token": "▁the", "place": 2, "standard": 0.03, "effective": 0.07}
    result["head"]["patterns"] = {"standard": "diagonal", "effective": "diagonal"}
    first = demo_sentences(result)[0]
    assert first.endswith("“the” gets 3 % of the weight of head 5 in layer 3, on average; of effective attention, 7 %.")


def test_exact_mechanisms_are_marked_and_not_praised() -> None:
    result = a_demo()
    for one in result["comparison"]["rows"]:
        if one["mechanism"].startswith("value-aware"):
            one["exact"] = True
    rows = parse(demo_page(result)).figure("mechanisms").data()["table"]["rows"]
    verdicts = {name: words for name, words, *_ in rows}
    assert verdicts["softmax"] == "exact, by construction"
    exact = [name for name, words in verdicts.items() if words.startswith("exact")]
    kept = [name for name, words in verdicts.items() if words == "kept"]
    assert len(exact) > 1
    for name in exact:
        assert f"{name} keep" not in demo_sentences(result)[1]
    names = [name for name, *_ in parse(demo_page(result)).figure("loss-added").data()["table"]["rows"]]
    assert set(names).isdisjoint(exact)
    assert set(kept) <= set(names)


def test_where_none_keeps_the_quality_the_closest_and_the_fastest_are_named() -> None:
    result = a_demo()
    sides = [("softmax", 0.0, 1.0), ("top-r:r=8", 0.2, 2.0), ("kernel:elu", 1.5, 0.75)]
    result["comparison"]["rows"] = [
        {
            "mechanism": name,
            "quality": {"loss_above": above, "loss_above_low": above - 0.1, "loss_above_high": above + 0.1},
            "time_ratio": seconds,
            "memory_ratio": 3.0,
        }
        for name, above, seconds in sides
    ]
    assert demo_sentences(result)[1] == (
        "Of 2 approximations of attention none keeps the model's quality without training. top-r:r=8 comes closest: "
        f"+0.2 [+0.1, +0.3] nats a token, in 2 {TIMES} the time; kernel:elu is the fastest: +1.5 [+1.4, +1.6], in "
        f"0.75 {TIMES} the time."
    )
    result["comparison"]["rows"][1]["quality"]["loss_above_low"] = -0.1
    assert "top-r:r=8 keeps the model's quality without training" in demo_sentences(result)[1]
    assert (
        f"top-r:r=8 takes 2 {TIMES} the time and 3 {TIMES} the memory of exact attention." in demo_sentences(result)[1]
    )
    result["comparison"]["rows"][1]["quality"]["loss_above_low"] = None
    assert "too short for intervals" in demo_sentences(result)[1]


def test_a_demo_that_was_stopped_has_a_page() -> None:
    whole = a_demo()
    for acts in ((), ("head",), ("head", "comparison")):
        part = {
            name: value for name, value in whole.items() if name not in {"head", "comparison", "memory"} - set(acts)
        }
        assert demo_sentences(part).count(WAITING) == 3 - len(acts)
        assert demo_page(part).count(WAITING) == 2 * (3 - len(acts))


def test_a_model_without_a_cache_says_why_there_is_no_third_act() -> None:
    page = demo_page(a_demo() | {"memory": {"why_not": "it reads both sides"}})
    assert page.count("it reads both sides.") == 2


def test_a_twin_that_was_not_trained_says_so() -> None:
    result = a_demo()
    assert "nothing was trained" not in demo_page(result)
    result["memory"]["learned"] = "started"
    assert "nothing was trained" in demo_page(result)


def test_the_two_maps_share_one_scale() -> None:
    result = a_demo()
    (packed,) = parse(demo_page(result)).one("div", "maps").data()["maps"]
    n = len(result["head"]["tokens"])
    assert (packed["layers"], packed["heads"], packed["queries"], packed["signed"]) == (2, 1, n, True)


def test_text_is_escaped() -> None:
    result = a_demo()
    result["head"]["tokens"][3] = result["models"]["3"] = result["memory"]["continuation"]["full"] = NASTY
    result["head"]["most_changed"]["token"] = result["memory"]["mechanism"] = NASTY
    result["comparison"]["warnings"] = [NASTY]
    result["comparison"]["rows"][1]["mechanism"] = NASTY
    html = demo_page(result)
    assert not parse(html).all("img")
    assert "<script>alert" not in html
