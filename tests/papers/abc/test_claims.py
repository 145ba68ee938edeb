"""ABC's claims on made-up results: which of them noise, short or unequal trainings leave open."""

from __future__ import annotations

from typing import Any

import pytest

from papers.abc.mt import PRIMARY
from papers.common.claims import HELD, NOT_HELD, NOT_TESTABLE, Verdict, judge
from papers.common.ledger_page import claims_in

CLAIMS = {claim.name.removeprefix("abc-"): claim for claim in claims_in("abc")}


def judged(name: str, **tables: list[dict[str, Any]]) -> Verdict:
    claim = CLAIMS[name]
    return judge(claim, {claim.results: {"tables": tables}})


def deep(**perplexities: tuple[float, ...]) -> list[dict[str, Any]]:
    """Table 2b of these models, a perplexity for each seed."""
    return [
        {"model": model, "n": {"BASE": None, "ELU": 128}.get(model, 64), "seed": seed, "perplexity": value}
        for model, values in perplexities.items()
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("learned", "state"),
    [((10.0, 10.1, 10.0), HELD), ((40.0, 40.1, 40.0), NOT_HELD), ((30.0, 30.1, 30.2), NOT_TESTABLE)],
)
def test_differences_within_the_spread_of_seeds_decide_no_claim(learned: tuple[float, ...], state: str) -> None:
    others = {"ELU": (50.0, 50.1, 50.1), "RFA": (30.0, 30.1, 30.2), "T2R": (30.0, 30.2, 30.1)}
    verdict = judged("beats-kernels", table_2b=deep(ABC_MLP=learned, **others))
    assert verdict.state == state
    assert all(part.seeds == 3 and part.interval is not None for part in verdict.parts)


QUARTER = [
    {"model": "BASE", "cross": None, "causal": None, "seed": 0, "bleu": 30.0},
    *({"model": "ABC_MLP", "cross": 8, "causal": n, "seed": 0, "bleu": 29.9} for n in (8, 2)),
]
GAPS = [
    {"data": PRIMARY, "claim": "abc-mt-on-par-quarter", "first": f"ABC_MLP-8-{n}", "second": "BASE", "low": -0.2,
     "high": 0.0, "seeds": 1} for n in (8, 2)
]  # fmt: skip


def test_trainings_of_unequal_length_decide_nothing() -> None:
    updates = [("BASE", 300), ("ABC_MLP-8-8", 200)]
    validation = [{"data": PRIMARY, "variant": v, "seed": 0, "step": s, "nll": 2.0} for v, s in updates]
    assert judged("mt-on-par-quarter", table_3a_quarter=QUARTER, differences=GAPS).state == HELD
    verdict = judged("mt-on-par-quarter", table_3a_quarter=QUARTER, differences=GAPS, validation=validation)
    assert verdict.state == NOT_TESTABLE
    assert verdict.reason == "29.9 against 30: ABC_MLP-8-8 had 200 updates and BASE 300"


def test_the_same_comparison_on_another_corpus_has_its_own_interval() -> None:
    elsewhere = [{**gap, "data": "tatoeba-es-en", "low": -0.9} for gap in GAPS]
    rows = [{**row, "data": "tatoeba-es-en"} for row in QUARTER]
    verdict = judged("mt-tatoeba-on-par", table_3a_other=rows, differences=[*GAPS, *elsewhere])
    assert verdict.state == NOT_TESTABLE
    # Within 0.5 of each other, where they may differ by 0.9.
    assert [part.interval for part in verdict.parts] == [pytest.approx((-0.4, 0.5))] * 2
    assert judged("mt-on-par-quarter", table_3a_quarter=QUARTER, differences=[*elsewhere, *GAPS]).state == HELD


@pytest.mark.parametrize(
    ("losses", "state"),
    [
        ({"Linformer": (2.67, 2.53)}, NOT_TESTABLE),
        ({"Linformer": (2.67, 2.53), "ABC_MLP": (2.0, 1.99)}, NOT_TESTABLE),
        # Flat, or falling more slowly than the model that it is behind.
        ({"Linformer": (2.67, 2.66)}, HELD),
        ({"Linformer": (2.67, 2.53), "ABC_MLP": (2.0, 1.8)}, HELD),
    ],
)
def test_a_model_that_still_learns_has_not_failed(losses: dict[str, tuple[float, float]], state: str) -> None:
    validation = [
        {"data": PRIMARY, "variant": f"{name}-128-64", "seed": 0, "step": 100 * i, "nll": nll}
        for name, some in losses.items()
        for i, nll in zip((5, 6), some, strict=True)
    ]
    rows = [
        {"model": m, "cross": 128, "causal": 64, "seed": 0, "bleu": b}
        for m, b in (("Linformer", 5.0), ("ABC_MLP", 30.0))
    ]
    verdict = judged("doc-mt-linformer-fails", table_3b=rows, validation=validation)
    assert verdict.state == state
    if state == NOT_TESTABLE:
        assert verdict.reason == "its loss still fell when training ended, from 2.67 to 2.53"


@pytest.mark.parametrize(("accuracy", "state"), [(66.0, NOT_TESTABLE), (50.0, HELD)])
def test_accuracies_that_conversion_hardly_lowers_decide_no_claim(accuracy: float, state: str) -> None:
    rows = [
        {"model": m, "n": n, "continued": on, "task": "RTE", "accuracy": a, "seed": 0}
        for m, n, on, a in (
            ("RoBERTa-Ours", None, True, 70.0), ("ABC_MLP", 128, True, 69.5), ("ABC_MLP", 128, False, accuracy)
        )
    ]  # fmt: skip
    assert judged("mlm-on-par", table_4=rows).state == state


@pytest.mark.parametrize(("speed", "state"), [(1.5, HELD), (1.31, NOT_TESTABLE), (1.2, NOT_HELD)])
def test_times_that_differ_by_noise_decide_no_claim(speed: float, state: str) -> None:
    rows = [
        {"model": model, "n": 128, "speed_over_unfused": value}
        for model, value in (("Linformer", speed), ("ABC_MLP", 1.3))
    ]
    assert judged("mlm-linformer-faster", speed=rows).state == state


@pytest.mark.parametrize(("seeds", "state"), [(1, HELD), (3, HELD)])
def test_the_smallest_memory_is_compared_seed_by_seed(seeds: int, state: str) -> None:
    rows = [
        {"cross": n, "causal": n, "seed": seed, "bleu": 30.0 + seed - (1.0 if n == 8 else 0.0)}
        for n in (8, 64)
        for seed in range(seeds)
    ]
    verdict = judged("mt-smallest-memory", table_5=rows)
    assert (verdict.state, verdict.seeds, verdict.ours) == (state, seeds, "1 BLEU")


def test_memories_of_different_runs_are_not_compared() -> None:
    sizes = ((8, 28.0), (64, 30.0))
    rows = [{"cross": n, "causal": n, "seed": 0, "bleu": bleu} for n, bleu in sizes]
    validation = [
        {"data": PRIMARY, "variant": f"ABC_MLP-{n}-{n}", "seed": 0, "step": 100, "nll": 2.0, "set": "5"}
        for n in (8, 64)
    ]
    assert judged("mt-smallest-memory", table_5=rows, validation=validation).state == NOT_HELD
    validation[0]["set"] = "quarter"
    verdict = judged("mt-smallest-memory", table_5=rows, validation=validation)
    assert verdict.reason == "ABC_MLP-8-8 and ABC_MLP-64-64 were trained in different runs"
    assert verdict.state == NOT_TESTABLE


def test_the_scale_of_a_corpus_is_that_of_its_own_trainings() -> None:
    from papers.common.scale import scale_of

    training = [
        {"data": data, "pairs": pairs, "steps": steps, "tokens_a_step": tokens}
        for data, pairs, steps, tokens in (
            (PRIMARY, 700, 50, 64),
            ("tatoeba-es-en", 900, 60, 128),
            ("wmt10k", 30, 9, 32),
        )
    ]
    tables = {"training": training, "table_3a_other": [], "table_3a_quarter": []}
    result = {"config": {"layers": 2, "width": 16, "tokens": 64}, "tables": tables}
    assert scale_of(CLAIMS["mt-on-par-quarter"], result) == "2 + 2 layers x 16, 700 pairs, 50 updates of 64 tokens"
    assert scale_of(CLAIMS["mt-tatoeba-on-par"], result) == "2 + 2 layers x 16, 900 pairs, 60 updates of 128 tokens"


def test_other_tables_of_a_file_may_be_of_other_trainings() -> None:
    """Trained together for the table that is shown, apart for another one; seeds of a set are trained as one."""
    from papers.abc.mt import derived
    from papers.common.scale import cost_of, scale_of

    names = ("MLP-exp", "MLP-exp-all")
    variants = ("ABC_MLP-32-32", "MLP-exp-all-32-32")
    rows = [
        {"model": name, "variant": variant, "cross": 32, "causal": 32, "seed": seed, "bleu": bleu}
        for name, variant, bleu in zip(names, variants, (22.0, 20.0), strict=True)
        for seed in (40, 41)
    ]
    training = [
        {"data": PRIMARY, "seed": seed, "set": of, "pairs": 7, "steps": steps, "tokens_a_step": 8, "seconds": 90.0}
        for of, seeds, steps in (("3a", (30, 31), 50), ("7", (40, 41), 20))
        for seed in seeds
    ]
    validation = [
        {"data": PRIMARY, "variant": variant, "seed": seed, "set": of, "step": 20, "nll": 1.0}
        for variant, earlier in zip(variants, ("3a", "5"), strict=True)
        for seed, of in ((30, earlier), (31, earlier), (40, "7"), (41, "7"))
    ]
    difference = {"data": PRIMARY, "first": variants[0], "second": variants[1], "low": 1.0, "high": 3.0}
    tables = {"table_7": rows, "training": training, "validation": validation, "differences": [difference]}
    result = {"config": {"layers": 2, "width": 16}, "tables": tables}
    claim = CLAIMS["mt-all-abc"]
    assert judge(claim, {"abc-mt": result}).state == HELD
    assert scale_of(claim, result) == "2 + 2 layers x 16, 7 pairs, 20 updates of 8 tokens"
    assert cost_of("abc-mt", result) == "3 min"
    # Of a model that is not trained any more the rows stay, without a loss beside the others'.
    retired = {**validation[0], "variant": "ABC_RD-means-8-8"}
    assert {row["variant"] for row in derived({"validation": [*validation, retired]})["losses"]} <= set(variants)
