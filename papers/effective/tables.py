"""The paper's tables and figures of one model and task: patterns, token types, [CLS] and [SEP], similarity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters import record
from attnlab.attention import repeat_groups
from attnlab.reading.effective import effective_attention
from attnlab.reading.pattern_data import CLASSES, picture
from attnlab.reading.pattern_net import PatternNet
from attnlab.reading.segments import segment_contrast
from attnlab.reading.similarity import head_similarity
from attnlab.reading.token_types import TOKEN_TYPES, attention_to, token_type_weights
from attnlab.shapes import Bool, Float, Int
from attnlab.trace import LayerTrace
from papers.effective.padded_effective import padded_effective_attention

__all__ = [
    "READINGS",
    "Similarity",
    "Tally",
    "artefact_rows",
    "authors_way",
    "paired_rows",
    "read_maps",
    "summary_rows",
]

READINGS = ("standard", "effective", "authors")
TOKENS = {"[CLS]": "cls", "[SEP]": "sep"}
# The contrast of a map whose mean weight within segments is twice the weight across them; above it, a map is a block.
BLOCK = 1 / 3
PATTERNS = [name.replace("+", "_") for name in CLASSES]


def authors_way(weights: Float[Tensor, "b h q k"], values: Float[Tensor, "b h k e"]) -> Float[Tensor, "b h q k"]:
    """``padded_effective_attention`` before its mask, without the SVD where V has full rank.

    That is W V (V^T V)^-1 V^T over all positions, padding too: on a GPU tens of times faster.
    """
    v = values.double()
    gram = v.mT @ v
    s = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    if v.shape[2] < v.shape[3] or bool((s[..., 0] < 1e-6 * s[..., -1]).any()):
        return padded_effective_attention(weights, values).weights
    return (weights.double() @ v @ torch.linalg.solve(gram, v.mT)).to(weights.dtype)


@torch.no_grad()
def read_maps(
    model: nn.Module, batch: Mapping[str, Tensor], *, authors: bool = False
) -> tuple[dict[str, list[Tensor]], dict[str, Tensor], list[LayerTrace]]:
    """(maps by reading and layer, facts by name, the recorded layers) of one batch."""
    with record(model) as trace:
        model(**{name: t for name, t in batch.items() if name != "labels"})
    layers = list(trace)
    maps: dict[str, list[Tensor]] = {"standard": [layer.weights().float() for layer in layers]}
    effective = [effective_attention(layer) for layer in layers]
    maps["effective"] = [e.weights.float() for e in effective]
    facts = {
        "residual": torch.stack([e.residual for e in effective], 1),
        "removed": torch.stack([e.removed for e in effective], 1),
        "trivial": torch.stack([e.trivial[..., 0] for e in effective], 1).float(),
    }
    if authors:
        maps["authors"], errors = [], []
        real = batch["attention_mask"].bool()
        for w, layer in zip(maps["standard"], layers, strict=True):
            v = repeat_groups(layer.call.v, layer.call.groups).float()
            authors_map = authors_way(w, v) * real[:, None, None]
            maps["authors"].append(authors_map)
            rows = real[:, None, :, None]
            errors.append(_length(((authors_map - w) @ v) * rows) / _length((w @ v) * rows))
        facts["authors_residual"] = torch.stack(errors, 1)
    return maps, facts, layers


class Tally:
    """Sums over the dev set, from which the rows of the paper's tables are made."""

    def __init__(self, net: PatternNet | None) -> None:
        self.net = net
        # By reading: counts (layer, pattern); (sums, counts) of the weights of token types; (least, largest) weight.
        self.patterns: dict[str, Tensor] = {}
        self.types: dict[str, list[Tensor]] = {}
        self.ranges: dict[str, tuple[float, float]] = {}
        # (sums, counts) of the weights to [CLS] and [SEP], by reading and token.
        self.to: dict[tuple[str, str], list[Tensor]] = {}
        self.facts: dict[str, list[Tensor]] = {}
        self.contrasts: dict[str, list[Tensor]] = {}

    def add(
        self,
        maps: Mapping[str, Sequence[Tensor]],
        facts: Mapping[str, Tensor],
        *,
        real: Bool[Tensor, "b n"],
        marked: Mapping[str, Bool[Tensor, "b n"]],
        types: Tensor | None,
        segments: Int[Tensor, "b n"] | None = None,
    ) -> None:
        """Count one batch; ``marked`` says where [CLS] and [SEP] stand, ``types`` the type of each token.

        ``segments`` are those of the tokens where texts have two.
        """
        for name, value in facts.items():
            self.facts.setdefault(name, []).append(value.double().cpu())
        if segments is not None:
            # [CLS] and [SEP] belong to no segment: the weight that they get is a column.
            special = torch.stack(list(marked.values())).any(0)
            words = segments.masked_fill(~real | special, -1)
            for reading, layers in maps.items():
                contrasts = torch.stack([segment_contrast(w, words) for w in layers], 1)
                self.contrasts.setdefault(reading, []).append(contrasts.double().cpu())
        for reading, layers in maps.items():
            self._add_range(reading, layers, real)
            self._add_tokens(reading, layers, real, marked, types)
        if self.net is not None:
            self._add_patterns(maps, real)

    def _add_range(self, reading: str, layers: Sequence[Tensor], real: Tensor) -> None:
        """Widen the range of a reading to the weights of real queries and keys."""
        both = real[:, None, :, None] & real[:, None, None, :]
        low, high = self.ranges.get(reading, (math.inf, -math.inf))
        for w in layers:
            low = min(low, w.masked_fill(~both, math.inf).min().item())
            high = max(high, w.masked_fill(~both, -math.inf).max().item())
        self.ranges[reading] = low, high

    def _add_tokens(
        self,
        reading: str,
        layers: Sequence[Tensor],
        real: Tensor,
        marked: Mapping[str, Tensor],
        types: Tensor | None,
    ) -> None:
        for token, keys in marked.items():
            # (l, h) means over the queries, so they are weighted by the number of queries.
            queries = int((real & ~keys).sum())
            weights = torch.stack([attention_to(w, keys, queries=real) for w in layers]).double().cpu()
            _sum_into(self.to, (reading, token), weights * queries, torch.tensor(float(queries)))
        if types is not None:
            # (l, h, t) means over the inputs that have a token of the type.
            inputs = torch.stack([(types == t).any(-1).sum() for t in range(len(TOKEN_TYPES))]).double().cpu()
            weights = torch.stack([token_type_weights(w, types) for w in layers]).double().cpu().nan_to_num()
            _sum_into(self.types, reading, weights * inputs, inputs)

    def _add_patterns(self, maps: Mapping[str, Sequence[Tensor]], real: Tensor) -> None:
        assert self.net is not None
        readings, n_layers = list(maps), len(next(iter(maps.values())))
        for i, length in enumerate(real.sum(-1).tolist()):
            of_input = {r: torch.cat([w[i, :, :length, :length] for w in maps[r]]) for r in readings}
            # Where V has no nullspace two readings are one map, which is classified once.
            distinct: dict[str, str] = {}
            for r, own in of_input.items():
                distinct[r] = next((other for other in distinct.values() if torch.equal(of_input[other], own)), r)
            shown = list(dict.fromkeys(distinct.values()))
            with torch.no_grad():
                pictures = picture(torch.cat([of_input[r] for r in shown]))
                classes = self.net(pictures).argmax(-1).view(len(shown), n_layers, -1)
            hits = torch.nn.functional.one_hot(classes, len(CLASSES)).sum(2).cpu()
            for reading in readings:
                counts = hits[shown.index(distinct[reading])]
                self.patterns[reading] = self.patterns.get(reading, torch.zeros_like(counts)) + counts

    def tables(self, task: str) -> dict[str, list[dict[str, Any]]]:
        """Rows by table; tables without rows are left out."""
        ranges = [
            {"task": task, "attention": reading, "least": low, "largest": high}
            for reading, (low, high) in self.ranges.items()
        ]
        tables = {
            **self._pattern_tables(task),
            "segments": self._segment_rows(task),
            **self._type_tables(task),
            **self._to_token_tables(task),
            "weight_range": ranges,
        }
        return {name: rows for name, rows in tables.items() if rows}

    def _pattern_tables(self, task: str) -> dict[str, list[dict[str, Any]]]:
        """Table 2, and Figure 4 by layer."""
        whole, layers = [], []
        for reading, counts in self.patterns.items():
            labels = {"task": task, "attention": reading}
            whole.append({**labels, **_shares(counts.sum(0))})
            layers += [{**labels, "layer": layer, **_shares(row)} for layer, row in enumerate(counts)]
        return {"table_2": whole, "figure_4": layers}

    def _segment_rows(self, task: str) -> list[dict[str, Any]]:
        rows = []
        for reading, parts in self.contrasts.items():
            contrasts = torch.cat(parts)
            known = contrasts[~contrasts.isnan()]
            if len(known):
                blocks = 100 * (known > BLOCK).double().mean().item()
                rows.append({"task": task, "attention": reading, "contrast": known.mean().item(), "blocks": blocks})
        return rows

    def _type_tables(self, task: str) -> dict[str, list[dict[str, Any]]]:
        """Figure 1: the last layer's mean and each of its heads; and every layer's mean."""
        last: list[dict[str, Any]] = []
        heads: list[dict[str, Any]] = []
        layers: list[dict[str, Any]] = []
        for reading, (total, count) in self.types.items():
            for t, name in enumerate(TOKEN_TYPES):
                if not count[t]:
                    continue
                # (l, h)
                weights = total[:, :, t] / count[t]
                labels = {"task": task, "attention": reading, "token": TOKENS.get(name, name)}
                last.append(labels | {"weight": weights[-1].mean().item()})
                heads += [labels | {"head": head, "weight": w} for head, w in enumerate(weights[-1].tolist())]
                layers += [labels | {"layer": i, "weight": w} for i, w in enumerate(weights.mean(1).tolist())]
        return {"token_types": last, "token_types_heads": heads, "token_types_layers": layers}

    def _to_token_tables(self, task: str) -> dict[str, list[dict[str, Any]]]:
        """Figures 5 and 6: all heads' mean, each layer's, and each head."""
        whole: list[dict[str, Any]] = []
        heads: list[dict[str, Any]] = []
        layers: list[dict[str, Any]] = []
        for (reading, token), (total, count) in self.to.items():
            # (l, h)
            weights = total / count
            labels = {"task": task, "attention": reading, "token": token}
            whole.append(labels | {"weight": weights.mean().item()})
            for layer, row in enumerate(weights):
                of_layer = labels | {"layer": layer}
                layers.append(of_layer | {"weight": row.mean().item(), "largest_head": row.max().item()})
                heads += [of_layer | {"head": head, "weight": w} for head, w in enumerate(row.tolist())]
        return {"to_token": whole, "to_token_heads": heads, "to_token_layers": layers}

    def identity(self, task: str) -> dict[str, Any]:
        """The identity's residual, the share of W that never reaches the output, and where nothing can differ."""
        # (inputs, layers, heads)
        facts = {name: torch.cat(values) for name, values in self.facts.items()}
        row = {
            "text": task,
            "residual": facts["residual"].max().item(),
            "residual_median": facts["residual"].median().item(),
            "removed": facts["removed"].mean().item(),
            "trivial_share": facts["trivial"].mean().item(),
            "inputs": len(facts["residual"]),
        }
        if "authors_residual" in facts:
            row |= {"authors_residual": facts["authors_residual"].mean().item()}
        return row


class Similarity:
    """Figure 3: per layer and head, the cosine of maps before and after fine-tuning."""

    def __init__(self) -> None:
        # (sums, counts) of the cosines (layer, head), by reading.
        self.cosines: dict[str, list[Tensor]] = {}

    def add(
        self, before: Mapping[str, Sequence[Tensor]], after: Mapping[str, Sequence[Tensor]], real: Bool[Tensor, "b n"]
    ) -> None:
        """Count one batch."""
        for reading in ("standard", "effective"):
            cosines = head_similarity(before[reading], after[reading], key_visible=real).double().cpu()
            _sum_into(self.cosines, reading, cosines.nan_to_num() * len(real), (~cosines.isnan()).double() * len(real))

    def tables(self, task: str) -> dict[str, list[dict[str, Any]]]:
        """Rows per layer, and per layer and head."""
        rows, heads = [], []
        for reading, (total, count) in self.cosines.items():
            for layer, values in enumerate((total / count).tolist()):
                labels = {"task": task, "attention": reading, "layer": layer}
                rows.append(labels | {"similarity": sum(values) / len(values)})
                heads += [labels | {"head": head, "similarity": value} for head, value in enumerate(values)]
        return {"finetuning": rows, "finetuning_heads": heads}


def artefact_rows(table_2: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How far each class moves from standard attention: exactly computed, and as the authors' code computes it."""
    by_setting = {(row["task"], row["attention"]): row for row in table_2}
    rows = []
    for task in dict.fromkeys(task for task, _ in by_setting):
        if any((task, reading) not in by_setting for reading in READINGS):
            continue
        standard, exact, authors = (by_setting[task, reading] for reading in READINGS)
        for name in PATTERNS:
            rows.append(
                {"task": task, "pattern": name, "standard": standard[name], "effective": exact[name]}
                | {"authors": authors[name], "change": exact[name] - standard[name]}
                | {"authors_change": authors[name] - standard[name], "artefact": authors[name] - exact[name]}
            )
    return rows


def summary_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per task and truth: the mean rank correlation of every reading with it, over all layers."""
    summaries: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if row["layer"] == "all":
            task, against = row["task"], row["against"]
            summary = summaries.setdefault((task, against), {"task": task, "against": against})
            summary[row["reading"].replace(" ", "_")] = row["spearman"]
    return list(summaries.values())


def paired_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The difference of two readings on the same texts, over all layers."""
    kept = ("task", "against", "first", "second", "spearman", "spearman_low", "spearman_high")
    return [{name: row[name] for name in kept} for row in rows if row["layer"] == "all"]


def _sum_into(sums: dict[Any, list[Tensor]], key: Any, total: Tensor, count: Tensor) -> None:
    old = sums.get(key)
    sums[key] = [total, count] if old is None else [old[0] + total, old[1] + count]


def _shares(counts: Tensor) -> dict[str, float]:
    whole = max(1, int(counts.sum()))
    return {name: 100 * int(n) / whole for name, n in zip(PATTERNS, counts, strict=True)}


def _length(t: Tensor) -> Tensor:
    return torch.linalg.vector_norm(t, dim=(-1, -2)).clamp(min=1e-30)
