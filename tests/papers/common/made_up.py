"""Results for every claim: the papers' own tables, and made-up ones where a paper only has a figure; and ways to spoil them."""

from __future__ import annotations

import copy
from typing import Any

from papers.common.folders import paper_table
from papers.common.ledger_page import tables_wanted

Results = dict[str, dict[str, Any]]


def _rows(columns: str, *lines: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [dict(zip(columns.split(), line, strict=True)) for line in lines]


# fmt: off
FIGURE_6: dict[str, list[dict[str, Any]]] = {
    "figure_6": _rows(
        "heads contexts seed learned",
        *((h, "sum", s, s < limit) for h, limit in (("all bad", 3), ("one good", 20), ("random", 20)) for s in range(20)),
    ),
    "figure_6_area": _rows(
        "heads contexts seed area",
        *((h, "sum", s, area + 0.001 * s) for h, area in (("all bad", 0.4), ("one good", 0.8), ("random", 0.8)) for s in range(20)),
    ),
}
FIGURES: dict[str, dict[str, list[dict[str, Any]]]] = {
    "guidance": {
        "convergence": _rows(
            "layers guided loss steps",
            *((n, g, 2.0 - 0.2 * g, 20_000 - 8_000 * g) for n in (8, 12, 16) for g in (False, True)),
        ),
        "ag_loss": _rows("ag_converged_share mlm_drop_share", (0.0018, 0.003)),
        "electra": _rows("of_steps guided steps loss", (9_000, False, 9_000, 3.0), (9_000, True, 500, 2.5)),
        "translation": _rows("model loss bleu", ("BASE", 4.00, 28.0), ("AG", 4.01, 28.1), ("Gaussian", 4.10, 27.5)),
        "low_resource": _rows(
            "language guided loss", *((k, g, 3.0 - 0.1 * g) for k in ("Oromo", "Filipino") for g in (False, True))
        ),
    },
    "guidance-electra": {
        "arms": _rows("guided seed steps left_at", *((g, s, 9_000, 5_000 - 4_000 * g + 10 * s) for g in (False, True) for s in range(3))),
    },
    "guidance-arm": {
        "convergence": _rows(
            "language norm guided seed loss steps fell_at_end",
            *((k, "post", g, s, 3.0 - 0.2 * g + 0.01 * s, 900 - 300 * g, 0.01) for k in ("oromo", "tagalog") for g in (False, True) for s in range(3)),
            *(("english", n, g, s, 2.0 - 0.2 * g + 0.01 * s, 20_000 - 8_000 * g - 10 * s, 0.01) for n in ("post", "pre") for g in (False, True) for s in range(3)),
        ),
        "finetuned": _rows(
            "language norm guided task seed accuracy",
            *(("english", n, g, t, s, 80.0 + 3 * g + 0.1 * s) for n in ("post", "pre") for g in (False, True) for t in ("RTE", "MRPC") for s in range(3)),
        ),
    },
    "ktiw-table2": {
        "curve": _rows("dataset step a_alpha_uf", ("Multi30k", 0, 7.0), ("Multi30k", 500, 31.0), ("Multi30k", 9000, 20.0))
    },
    "ktiw-permutations": {
        "figure_3": _rows(
            "panel data seed learned",
            *((p, d, s, d == "control" or s < 12) for p in ("permutations", "mixture") for d in ("hard", "control") for s in range(20)),
        )
    },
    "ktiw-multihead": FIGURE_6,
    "ktiw-multihead-projected": FIGURE_6,
    "ktiw-local": {
        "figure_7": _rows(
            "step keyword after mean last", (0, 0, 0, 0, 0), (50, 5, 3, 1, 0.9), (99, 4, 4, 3, 4), (999, 2, 5, 3, 9)
        )
    },
    "ktiw-permute-function": {
        "section_6_2": _rows(
            "task seed learned steps", *(("copy", s, True, 200 + s) for s in range(5)), *(("permute", s, False, None) for s in range(5))
        )
    },
    "effective": {
        "identity": _rows("text residual authors_residual", ("a", 1e-7, 1e-7), ("b", 3e-6, 1e-7)),
        "alternative": _rows("text residual distance", ("a", 1e-7, 0.3)),
        "short_inputs": _rows("length difference", (7, 1e-6), (31, 2e-6)),
        "token_types": _rows(
            "task attention token weight",
            *(
                (task, kind, token, weight * (shrink if kind == "effective" else 1))
                for task in ("RTE", "MRPC")
                for kind in ("standard", "effective")
                for token, weight, shrink in (
                    ("sep", 0.4, 0.3), ("cls", 0.2, 0.97), ("punctuation", 0.2, 0.4), ("noun", 0.1, 1.8), ("pronoun", 0.1, 1.2), ("verb", 0.1, 1.1),
                )
            ),
        ),
        "to_token": _rows(
            "task attention token weight",
            ("RTE", "standard", "cls", 0.2), ("RTE", "effective", "cls", 0.19),
            ("RTE", "standard", "sep", 0.4), ("RTE", "effective", "sep", 0.1),
        ),
        "finetuning": _rows(
            "task attention layer similarity",
            *(("RTE", k, layer, 0.99 - 0.02 * layer) for k in ("standard", "effective") for layer in range(12)),
        ),
    },
    "abc-mt": {
        "table_3a_quarter": _rows(
            "model cross causal bleu",
            ("BASE", None, None, 27.2), ("ABC_RD", 8, 8, 25.7), ("ABC_RD", 16, 16, 26.2), ("Linformer", 8, 8, 26.6),
            ("Linformer", 16, 16, 26.7), ("ABC_MLP", 8, 2, 27.1), ("ABC_MLP", 8, 8, 27.3), ("Window", 8, 8, 26.3),
            ("Cluster", 8, 8, 26.8),
        ),
        "table_3a_other": _rows(
            "data model cross causal bleu",
            *(("tatoeba-es-en", *row) for row in (
                ("BASE", None, None, 27.2), ("ABC_RD", 8, 8, 25.7), ("Linformer", 8, 8, 26.6), ("ABC_MLP", 8, 2, 27.1),
                ("ABC_MLP", 8, 8, 27.3),
            )),
        ),
        "losses": _rows(
            "data model cross causal nll",
            *(("multi30k-en-de", *row) for row in (
                ("ABC_MLP", 8, 2, 1.6), ("ABC_MLP", 8, 8, 1.6), ("ABC_MLP", 32, 8, 1.5), ("ABC_MLP", 32, 32, 1.5),
                ("Window", 8, 8, 1.8), ("Cluster", 8, 8, 1.7), ("MLP-ReLU", 32, 32, 1.7), ("MLP-sigmoid", 32, 32, 1.6),
                ("MLP-exp-all", 32, 32, 1.6), *((m, n, n, 1.9) for m in ("Linformer", "ABC_RD") for n in (8, 16, 32, 64)),
            )),
            *(("wmt10k-en-de", m, 8, 8, nll) for m, nll in (("ABC_MLP", 4.0), ("Linformer", 4.2), ("ABC_RD", 4.3))),
        ),
    },
    "abc-doc-mt": {
        "table_3b": _rows(
            "model cross causal bleu", ("Linformer", 32, 16, 38.0), ("ABC_RD", 32, 16, 38.6), ("ABC_MLP", 32, 16, 39.7)
        )
    },
    "abc-mlm": {
        "table_4": _rows(
            "model n continued task accuracy",
            *(("ABC_MLP", 128, False, task, 60.0) for task in ("MNLI", "QNLI", "QQP", "SST-2")),
            *(("ABC_RD", 128, True, task, 55.0) for task in ("MNLI", "QNLI", "QQP", "SST-2")),
        ),
        "pretraining": _rows(
            "model n continued loss", ("RoBERTa-Ours", None, False, 2.0),
            *((m, n, on, loss + 4 * (not on)) for m, n, loss in (
                ("ABC_MLP", 64, 2.4), ("ABC_MLP", 128, 2.2), ("Linformer", 64, 2.8), ("Linformer", 128, 2.6), ("ABC_RD", 128, 3.0)
            ) for on in (True, False)),
        ),
        "parameters": _rows("model n extra_share", ("ABC_MLP", 128, 0.0105)),
    },
    "abc-decoding": {
        "figure_1": _rows(
            "model length tokens_per_second",
            ("softmax", 512, 900.0), ("softmax", 4096, 200.0), ("ABC_MLP", 512, 1000.0), ("ABC_MLP", 4096, 980.0),
            ("RFA", 4096, 784.0), ("T2R", 4096, 1176.0),
        ),
        "figure_2": _rows("model length memory", ("softmax", 4096, 800.0), ("ABC_MLP", 4096, 90.0)),
        "exponents": _rows("model quantity exponent", ("ABC_MLP", "time", 1.02), ("softmax", "time", 1.85)),
    },
    "value-aware-lm": {
        "against_top_r": _rows(
            "length family r loss loss_top_r saved low high",
            *((64, f, r, 3.0 - s, 3.0, s, s - 0.1, s + 0.1) for f, s in (("value-aware", 0.5), ("window", -0.4), ("window+sinks", -0.2)) for r in (1, 8)),
        ),
    },
    "value-aware": {
        "figure_1": _rows(
            "family r mlm_error", *((f, r, base - r / 4) for f, base in (("top-r", 60.0), ("window", 70.0)) for r in (33, 65))
        ),
        "figure_2": _rows(
            "kernel r loss", *((k, r, 3.0 + far * (512 - r) / 512) for k, far in (("exp", 0.5), ("elu", 1.0), ("poly", 3.0)) for r in (65, 256, 512))
        ),
    },
}

# What makes a claim fail: results file, table, the rows, and what is written into them.
SPOILED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "ag-ag-loss-converges-at-once": ("guidance", "ag_loss", {}, {"ag_converged_share": 0.01}),
    "ag-mlm-drops-then": ("guidance", "ag_loss", {}, {"mlm_drop_share": 0.2}),
    "ag-converges-sooner": ("guidance", "convergence", {"layers": 12, "guided": True}, {"steps": 21_000}),
    "ag-8-layers": ("guidance", "convergence", {"layers": 8, "guided": True}, {"loss": 2.1}),
    "ag-12-layers": ("guidance", "convergence", {"layers": 12, "guided": True}, {"loss": 2.0}),
    "ag-16-layers": ("guidance", "convergence", {"layers": 16, "guided": True}, {"loss": 2.1}),
    "ag-finetuned-short": ("guidance", "finetuned", {"task": "QQP", "training": "short", "guided": True}, {"accuracy": 60.0}),
    "ag-finetuned-long": ("guidance", "finetuned", {"task": "QNLI", "training": "long", "guided": True}, {"accuracy": 60.0}),
    "ag-electra-plateau": ("guidance", "electra", {"guided": True}, {"steps": 9_000}),
    "ag-translation-same-loss": ("guidance", "translation", {"model": "AG"}, {"loss": 4.2}),
    "ag-gaussian-higher-loss": ("guidance", "translation", {"model": "Gaussian"}, {"loss": 3.9}),
    "ag-low-resource": ("guidance", "low_resource", {"language": "Oromo", "guided": True}, {"loss": 3.1}),
    "ag-electra-sooner": ("guidance-electra", "arms", {"guided": True}, {"left_at": 8_000}),
    **{f"ag-arm-sooner-{n}": ("guidance-arm", "convergence", {"norm": n, "guided": True}, {"steps": 21_000}) for n in ("post", "pre")},
    **{f"ag-arm-lower-{n}": ("guidance-arm", "convergence", {"norm": n, "guided": True}, {"loss": 2.5}) for n in ("post", "pre")},
    **{f"ag-arm-finetuned-{n}": ("guidance-arm", "finetuned", {"norm": n, "guided": True, "task": "RTE"}, {"accuracy": 60.0}) for n in ("post", "pre")},
    **{f"ag-arm-lower-{k}": ("guidance-arm", "convergence", {"language": k, "guided": True}, {"loss": 3.5}) for k in ("oromo", "tagalog")},
    "ktiw-learned-under-uniform": ("ktiw-table2", "table_2", {"dataset": "SST"}, {"a_alpha_uf": 8.0}),
    "ktiw-proxy-approximates": ("ktiw-table2", "table_2", {"dataset": "SST"}, {"a_uf_px": 8.0}),
    "ktiw-attention-agrees-with-probe": ("ktiw-table2", "table_2", {"dataset": "SST"}, {"a_alpha_beta": 8.0}),
    "ktiw-saliency-explained": ("ktiw-table2", "table_2", {"dataset": "SST"}, {"a_delta_uf": 8.0}),
    "ktiw-agreement-nontrivial": ("ktiw-table2", "table_2", {"dataset": "SST"}, {"xi_alpha_uf": 20.0}),
    "ktiw-rise-then-fall": ("ktiw-table2", "curve", {"step": 9000}, {"a_alpha_uf": 40.0}),
    "ktiw-kendall-tau": ("ktiw-tau", "table_3", {"dataset": "IMDB"}, {"a_delta_uf": -0.5}),
    "ktiw-training-set": ("ktiw-train", "table_7", {"dataset": "IMDB"}, {"a_alpha_beta": 5.0}),
    "ktiw-attention-fails-when-frozen": ("ktiw-frozen", "table_10", {"dataset": "SST"}, {"a_alpha_frozen": 30}),
    "ktiw-proxy-is-logistic-regression": ("ktiw-logreg", "table_11", {"dataset": "SST"}, {"a_uf_log": 60}),
    "ktiw-permutations-fail": ("ktiw-permutations", "figure_3", {"panel": "permutations", "data": "hard"}, {"learned": True}),
    "ktiw-mixture-fails": ("ktiw-permutations", "figure_3", {"panel": "mixture", "data": "control"}, {"learned": False}),
    "ktiw-bad-heads-fail": ("ktiw-multihead", "figure_6", {"heads": "all bad"}, {"learned": True}),
    "ktiw-one-good-head": ("ktiw-multihead", "figure_6", {"heads": "one good"}, {"learned": False}),
    "ktiw-random-heads": ("ktiw-multihead", "figure_6_area", {"heads": "random"}, {"area": 0.2}),
    "ktiw-projected-bad-heads-fail": ("ktiw-multihead-projected", "figure_6_area", {"heads": "all bad"}, {"area": 0.9}),
    "ktiw-projected-one-good-head": ("ktiw-multihead-projected", "figure_6", {"heads": "one good"}, {"learned": False}),
    "ktiw-projected-random-heads": ("ktiw-multihead-projected", "figure_6", {"heads": "random"}, {"learned": False}),
    "ktiw-local-early": ("ktiw-local", "figure_7", {"step": 50}, {"after": 6}),
    "ktiw-not-local-late": ("ktiw-local", "figure_7", {"step": 999}, {"keyword": 10}),
    "ktiw-copy-not-permute": ("ktiw-permute-function", "section_6_2", {"task": "copy", "seed": 3}, {"steps": 900}),
    "ktiw-optimal-attention": ("ktiw-optimal", "appendix_a1", {"model": "linear"}, {"a_opt_beta": 20}),
    "ktiw-linear-output-comparable": ("ktiw-optimal", "appendix_a1", {"model": "linear"}, {"bleu": 30.0}),
    "effective-identity": ("effective", "identity", {"text": "b"}, {"residual": 0.47}),
    "effective-other-distributions": ("effective", "alternative", {}, {"distance": 0.0}),
    "effective-short-inputs": ("effective", "short_inputs", {"length": 31}, {"difference": 0.1}),
    "effective-vertical-drops": ("effective", "table_2", {"task": "RTE", "attention": "effective"}, {"vertical": 30.0}),
    "effective-vertical-diagonal-drops": ("effective", "table_2", {"attention": "effective"}, {"vertical_diagonal": 16.0}),
    "effective-block-rises": ("effective", "table_2", {"attention": "effective"}, {"block": 3.0}),
    "effective-diagonal-rises": ("effective", "table_2", {"task": "RTE", "attention": "effective"}, {"diagonal": 7.0}),
    "effective-heterogeneous-stays": ("effective", "table_2", {"attention": "effective"}, {"heterogeneous": 60.0}),
    "effective-sep-loses": ("effective", "token_types", {"token": "sep", "attention": "effective"}, {"weight": 0.5}),
    "effective-punctuation-loses": ("effective", "token_types", {"token": "punctuation", "attention": "effective"}, {"weight": 0.5}),
    "effective-cls-stays": ("effective", "token_types", {"token": "cls", "attention": "effective"}, {"weight": 0.01}),
    "effective-words-gain": ("effective", "token_types", {"token": "cls", "attention": "effective"}, {"weight": 2.0}),
    "effective-cls-stays-everywhere": ("effective", "to_token", {"token": "sep", "attention": "effective"}, {"weight": 0.5}),
    "effective-last-layers-change": ("effective", "finetuning", {"attention": "effective", "layer": 3}, {"similarity": 0.1}),
    "effective-costs-twice": ("effective", "timing", {"way": "full-svd"}, {"ratio": 1.1}),
    "abc-learned-beats-agnostic": ("abc-lm", "table_2a", {"model": "ABC_MLP", "n": 64, "context": 480}, {"perplexity": 24.0}),
    "abc-gap-grows-with-context": ("abc-lm", "table_2a", {"model": "ABC_MLP", "n": 64, "context": 480}, {"perplexity": 22.0}),
    "abc-half-the-memory": ("abc-lm", "table_2a", {"model": "ABC_MLP", "n": 32, "context": 0}, {"perplexity": 25.0}),
    "abc-linformer-trails-random": ("abc-lm", "table_2a", {"model": "Linformer", "context": 0}, {"perplexity": 23.0}),
    "abc-linformer-worsens-with-context": ("abc-lm", "table_2a", {"model": "Linformer", "context": 480}, {"perplexity": 26.0}),
    "abc-close-to-base": ("abc-lm", "table_2a", {"model": "BASE", "context": 480}, {"perplexity": 15.0}),
    "abc-beats-kernels": ("abc-lm", "table_2b", {"model": "T2R"}, {"perplexity": 19.0}),
    "abc-mt-on-par": ("abc-mt", "table_3a", {"model": "BASE"}, {"bleu": 29.0}),
    "abc-mt-beats-agnostic": ("abc-mt", "table_3a", {"model": "Linformer", "cross": 32}, {"bleu": 27.4}),
    "abc-mt-beats-larger": ("abc-mt", "table_3a", {"model": "Linformer", "cross": 64}, {"bleu": 27.2}),
    "abc-mt-linformer-leads-random": ("abc-mt", "table_3a", {"model": "ABC_RD", "cross": 32}, {"bleu": 27.0}),
    "abc-mt-on-par-quarter": ("abc-mt", "table_3a_quarter", {"model": "BASE"}, {"bleu": 29.0}),
    "abc-mt-beats-agnostic-quarter": ("abc-mt", "table_3a_quarter", {"model": "ABC_RD", "cross": 8}, {"bleu": 27.4}),
    "abc-mt-beats-larger-quarter": ("abc-mt", "table_3a_quarter", {"model": "ABC_RD", "cross": 16}, {"bleu": 27.2}),
    "abc-mt-linformer-leads-random-quarter": ("abc-mt", "table_3a_quarter", {"model": "ABC_RD", "cross": 8}, {"bleu": 27.0}),
    "abc-mt-beats-window-and-cluster-quarter": ("abc-mt", "table_3a_quarter", {"model": "Cluster"}, {"bleu": 28.0}),
    "abc-mt-tatoeba-on-par": ("abc-mt", "table_3a_other", {"model": "BASE"}, {"bleu": 29.0}),
    "abc-mt-tatoeba-beats-agnostic": ("abc-mt", "table_3a_other", {"model": "Linformer"}, {"bleu": 27.4}),
    "abc-mt-tatoeba-linformer-leads-random": ("abc-mt", "table_3a_other", {"model": "ABC_RD"}, {"bleu": 27.0}),
    "abc-mt-causal-memory-small": ("abc-mt", "table_5", {"cross": 64, "causal": 8}, {"bleu": 24.0}),
    "abc-mt-smallest-memory": ("abc-mt", "table_5", {"cross": 8, "causal": 8}, {"bleu": 23.0}),
    "abc-mt-beats-window-and-cluster": ("abc-mt", "table_7", {"model": "Window"}, {"bleu": 28.0}),
    "abc-mt-exp-beats-relu-and-sigmoid": ("abc-mt", "table_7", {"model": "MLP-sigmoid", "causal": 32}, {"bleu": 28.0}),
    "abc-mt-relu-fails": ("abc-mt", "table_7", {"model": "MLP-ReLU", "causal": 8}, {"bleu": 26.0, "converged": True}),
    "abc-mt-all-abc": ("abc-mt", "table_7", {"model": "MLP-exp-all"}, {"bleu": 28.0}),
    "abc-mt-loss-beats-agnostic": ("abc-mt", "losses", {"model": "Linformer", "cross": 32}, {"nll": 1.4}),
    "abc-mt-loss-beats-larger": ("abc-mt", "losses", {"model": "ABC_RD", "cross": 64}, {"nll": 1.4}),
    "abc-mt-loss-beats-agnostic-quarter": ("abc-mt", "losses", {"model": "ABC_RD", "cross": 8}, {"nll": 1.4}),
    "abc-mt-loss-beats-larger-quarter": ("abc-mt", "losses", {"model": "Linformer", "cross": 16}, {"nll": 1.4}),
    "abc-mt-loss-beats-window-and-cluster-quarter": ("abc-mt", "losses", {"model": "Cluster"}, {"nll": 1.5}),
    "abc-mt-loss-news-beats-agnostic": ("abc-mt", "losses", {"data": "wmt10k-en-de", "model": "Linformer"}, {"nll": 3.9}),
    "abc-mt-loss-exp-beats-relu-and-sigmoid": ("abc-mt", "losses", {"model": "MLP-sigmoid"}, {"nll": 1.4}),
    "abc-mt-loss-all-abc": ("abc-mt", "losses", {"model": "MLP-exp-all"}, {"nll": 1.4}),
    "abc-doc-mt-beats-random": ("abc-doc-mt", "table_3b", {"model": "ABC_RD", "cross": 128}, {"bleu": 40.0}),
    "abc-doc-mt-close-to-base": ("abc-doc-mt", "table_3b", {"model": "BASE"}, {"bleu": 42.0}),
    "abc-doc-mt-linformer-fails": ("abc-doc-mt", "table_3b", {"model": "Linformer", "cross": 128}, {"bleu": 38.0, "converged": True}),
    "abc-doc-mt-beats-agnostic-quarter": ("abc-doc-mt", "table_3b", {"model": "Linformer", "cross": 32}, {"bleu": 40.0}),
    "abc-doc-mt-close-to-base-quarter": ("abc-doc-mt", "table_3b", {"model": "ABC_MLP", "cross": 32}, {"bleu": 39.0}),
    "abc-mlm-on-par": ("abc-mlm", "table_4", {"model": "ABC_MLP", "n": 128, "continued": True, "task": "QNLI"}, {"accuracy": 90.0}),
    "abc-mlm-beats-linformer": ("abc-mlm", "table_4", {"model": "Linformer", "n": 128}, {"accuracy": 95.0}),
    "abc-mlm-fails-without-continuing": ("abc-mlm", "table_4", {"model": "ABC_MLP", "continued": False}, {"accuracy": 90.0}),
    "abc-mlm-random-fails": ("abc-mlm", "table_4", {"model": "ABC_RD"}, {"accuracy": 90.0}),
    "abc-mlm-loss-beats-linformer": ("abc-mlm", "pretraining", {"model": "Linformer", "n": 64, "continued": True}, {"loss": 2.3}),
    "abc-mlm-loss-beats-random": ("abc-mlm", "pretraining", {"model": "ABC_RD", "continued": True}, {"loss": 2.1}),
    "abc-mlm-loss-without-continuing": ("abc-mlm", "pretraining", {"model": "ABC_RD", "continued": False}, {"loss": 2.9}),
    "abc-mlm-faster-and-smaller": ("abc-mlm", "speed", {"model": "ABC_MLP", "n": 128}, {"memory_over_unfused": 1.2}),
    "abc-mlm-linformer-faster": ("abc-mlm", "speed", {"model": "Linformer", "n": 128}, {"speed_over_unfused": 1.1}),
    "abc-few-parameters": ("abc-mlm", "parameters", {}, {"extra_share": 0.05}),
    "abc-decoding-flat": ("abc-decoding", "figure_1", {"model": "ABC_MLP", "length": 512}, {"tokens_per_second": 3000.0}),
    "abc-decoding-faster": ("abc-decoding", "figure_1", {"model": "softmax", "length": 4096}, {"tokens_per_second": 3000.0}),
    "abc-decoding-beats-rfa": ("abc-decoding", "figure_1", {"model": "RFA"}, {"tokens_per_second": 990.0}),
    "abc-decoding-t2r-faster": ("abc-decoding", "figure_1", {"model": "T2R"}, {"tokens_per_second": 900.0}),
    "abc-decoding-memory": ("abc-decoding", "figure_2", {"model": "ABC_MLP"}, {"memory": 801.0}),
    "abc-linear-time": ("abc-decoding", "exponents", {"model": "ABC_MLP"}, {"exponent": 1.6}),
    "ova-aware-is-exact": ("value-aware", "table_1", {"mechanism": "value-aware:r=d+1"}, {"mlm_error": 24.5}),
    "ova-oblivious-is-worse": ("value-aware", "table_1", {"mechanism": "top-r:r=d+1"}, {"mlm_error": 24.2}),
    "ova-gap-8-points": ("value-aware", "table_1", {"mechanism": "top-r:r=d+1"}, {"mlm_error": 30.0}),
    "ova-one-key": ("value-aware", "table_1", {"mechanism": "value-aware:r=1"}, {"mlm_error": 97.0}),
    "ova-window-trails": ("value-aware", "figure_1", {"family": "window", "r": 65}, {"mlm_error": 10.0}),
    "ova-lsh-few-rounds": ("value-aware", "table_1", {"mechanism": "lsh:r=64,rounds=4"}, {"mlm_error": 40.0}),
    "ova-lsh-many-rounds": ("value-aware", "table_1", {"mechanism": "lsh:r=512,rounds=16"}, {"mlm_error": 60.0}),
    "ova-orf-is-poor": ("value-aware", "table_1", {"mechanism": "orf:features=256"}, {"mlm_error": 30.0}),
    "ova-kernels-exact": ("value-aware", "table_2", {"kernel": "elu", "mechanism": "value-aware:r=d+1"}, {"perplexity": 36.0}),
    "ova-kernels-oblivious": ("value-aware", "table_2", {"kernel": "elu", "mechanism": "top-r:r=d+1"}, {"perplexity": 35.0}),
    "ova-kernels-one-key": ("value-aware", "table_2", {"kernel": "elu", "mechanism": "top-r:r=1"}, {"perplexity": 500.0}),
    "ova-skewed-kernels-lose-less": ("value-aware", "table_2", {"kernel": "exp", "mechanism": "top-r:r=d+1"}, {"perplexity": 90.0}),
    "ova-kernels-converge-slower": ("value-aware", "figure_2", {"kernel": "exp", "r": 65}, {"loss": 9.0}),
    "ova-kernels-alike-in-full": ("value-aware", "table_2", {"kernel": "poly", "mechanism": "softmax"}, {"perplexity": 60.0}),
    "ova-lm-aware": ("value-aware-lm", "against_top_r", {"family": "value-aware", "r": 8}, {"saved": -0.3, "low": -0.4, "high": -0.2}),
    "ova-lm-window": ("value-aware-lm", "against_top_r", {"family": "window", "r": 8}, {"saved": 0.3, "low": 0.2, "high": 0.4}),
    "ova-lm-window-sinks": ("value-aware-lm", "against_top_r", {"family": "window+sinks", "r": 1}, {"saved": 0.3, "low": 0.2, "high": 0.4}),
    "ova-longer-is-better": ("value-aware", "figure_3", {"model": "long"}, {"mlm_error": 27.0}),
}


# The claims of Effective on other maps: {the end of their names: (results file, end of the tables' names, attention)}.
EFFECTIVE_MAPS = {
    "padded": ("effective", "", "authors"),
    "heads-64": ("effective-pretrained", "_pretrained", "effective"),
    "heads-64-padded": ("effective-pretrained", "_pretrained", "authors"),
}
BY_READING = ("table_2", "token_types", "to_token")
FIGURES["effective"]["table_2"] = []
for _table in BY_READING:
    _known = [*paper_table("effective", _table), *FIGURES["effective"][_table]]
    FIGURES["effective"][_table] += [{**row, "attention": "authors"} for row in _known if row["attention"] == "effective"]
FIGURES["effective-pretrained"] = {"identity": FIGURES["effective"]["identity"]} | {
    f"{_table}_pretrained": [*paper_table("effective", _table), *FIGURES["effective"][_table]] for _table in BY_READING
}
SPOILED |= {
    f"{name}-{end}": (
        results,
        table if table == "identity" else f"{table}{suffix}",
        {key: attention if key == "attention" else value for key, value in where.items()},
        {"authors_residual" if (key, attention) == ("residual", "authors") else key: v for key, v in change.items()},
    )
    for end, (results, suffix, attention) in EFFECTIVE_MAPS.items()
    for name, (_, table, where, change) in list(SPOILED.items())
    if name.startswith("effective-") and table in ("identity", *BY_READING)
}
# fmt: on


def as_the_papers_say() -> Results:
    """A results file for every experiment, in which every claim holds."""
    results: Results = {}
    for name, tables in tables_wanted().items():
        made = FIGURES.get(name, {})
        rows = {table: paper_table(name, table) + copy.deepcopy(made.get(table, [])) for table in tables}
        results[name] = {"name": name, "tables": {table: some for table, some in rows.items() if some}}
    return results


def spoiled(claim: str) -> Results:
    """The same, with the rows changed that make this claim fail."""
    name, table, where, change = SPOILED[claim]
    results = as_the_papers_say()
    hit = [row for row in results[name]["tables"][table] if all(row.get(key) == value for key, value in where.items())]
    assert hit, f"{claim}: no row {where} in {name}#{table}"
    for row in hit:
        row.update(change)
    return results
