"""What the paper's tables and figures say of one model and task: patterns, token types, [CLS] and [SEP], similarity."""

from __future__ import annotations

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
# Within a segment twice what lies across: a block, by what a block is.
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
    found = [effective_attention(layer) for layer in layers]
    maps["effective"] = [e.weights.float() for e in found]
    facts = {
        "residual": torch.stack([e.residual for e in found], 1),
        "removed": torch.stack([e.removed for e in found], 1),
        "trivial": torch.stack([e.trivial[..., 0] for e in found], 1).float(),
    }
    if authors:
        maps["authors"], errors = [], []
        real = batch["attention_mask"].bool()
        for w, layer in zip(maps["standard"], layers, strict=True):
            v = repeat_groups(layer.call.v, layer.call.groups).float()
            theirs = authors_way(w, v) * real[:, None, None]
            maps["authors"].append(theirs)
            rows = real[:, None, :, None]
            errors.append(_length(((theirs - w) @ v) * rows) / _length((w @ v) * rows))
        facts["authors_residual"] = torch.stack(errors, 1)
    return maps, facts, layers


class Tally:
    """Sums over the dev set, from which the rows of the paper's tables are made."""

    def __init__(self, net: PatternNet | None) -> None:
        self.net = net
        self.patterns: dict[str, Tensor] = {}
        self.types: dict[str, list[Tensor]] = {}
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
            # [CLS] and [SEP] are of no segment: what they get is a column.
            special = torch.stack(list(marked.values())).any(0)
            words = segments.masked_fill(~real | special, -1)
            for reading, layers in maps.items():
                found = torch.stack([segment_contrast(w, words) for w in layers], 1)
                self.contrasts.setdefault(reading, []).append(found.double().cpu())
        for reading, layers in maps.items():
            self._add_tokens(reading, layers, real, marked, types)
        if self.net is not None:
            self._add_patterns(maps, real)

    def _add_tokens(
        self,
        reading: str,
        layers: Sequence[Tensor],
        real: Tensor,
        marked: Mapping[str, Tensor],
        types: Tensor | None,
    ) -> None:
        for token, keys in marked.items():
            # (l, h) weighted by the queries that were asked.
            asked = int((real & ~keys).sum())
            found = torch.stack([attention_to(w, keys, queries=real) for w in layers]).double().cpu() * asked
            _sum_into(self.to, (reading, token), found, torch.tensor(float(asked)))
        if types is not None:
            known = torch.stack([(types == t).any(-1).sum() for t in range(len(TOKEN_TYPES))]).double().cpu()
            given = torch.stack([token_type_weights(w, types) for w in layers]).double().cpu().nan_to_num()
            _sum_into(self.types, reading, given * known, known)

    def _add_patterns(self, maps: Mapping[str, Sequence[Tensor]], real: Tensor) -> None:
        assert self.net is not None
        readings, n_layers = list(maps), len(next(iter(maps.values())))
        for i, length in enumerate(real.sum(-1).tolist()):
            together = torch.cat([w[i, :, :length, :length] for r in readings for w in maps[r]])
            with torch.no_grad():
                classes = self.net(picture(together)).argmax(-1).view(len(readings), n_layers, -1)
            hits = torch.nn.functional.one_hot(classes, len(CLASSES)).sum(2).cpu()
            for reading, counts in zip(readings, hits, strict=True):
                self.patterns[reading] = self.patterns.get(reading, torch.zeros_like(counts)) + counts

    def tables(self, task: str) -> dict[str, list[dict[str, Any]]]:
        """Rows by table."""
        found: dict[str, list[dict[str, Any]]] = {"table_2": [], "figure_4": []}
        for reading, counts in self.patterns.items():
            found["table_2"].append({"task": task, "attention": reading, **_shares(counts.sum(0))})
            for layer, one in enumerate(counts):
                found["figure_4"].append({"task": task, "attention": reading, "layer": layer, **_shares(one)})
        found["segments"] = []
        for reading, parts in self.contrasts.items():
            contrasts = torch.cat(parts)
            known = contrasts[~contrasts.isnan()]
            if len(known):
                blocks = 100 * (known > BLOCK).double().mean().item()
                found["segments"].append(
                    {"task": task, "attention": reading, "contrast": known.mean().item(), "blocks": blocks}
                )
        found |= {"token_types": [], "token_types_layers": []}
        for reading, (total, count) in self.types.items():
            weights = (total / count).mean(1)
            for t, name in enumerate(TOKEN_TYPES):
                token = TOKENS.get(name, name)
                if not count[t]:
                    continue
                labels = {"task": task, "attention": reading, "token": token}
                found["token_types"].append(labels | {"weight": weights[-1, t].item()})
                found["token_types_layers"] += [
                    labels | {"layer": layer, "weight": w} for layer, w in enumerate(weights[:, t].tolist())
                ]
        found |= {"to_token": [], "to_token_layers": []}
        for (reading, token), (total, count) in self.to.items():
            heads = total / count
            labels = {"task": task, "attention": reading, "token": token}
            found["to_token"].append(labels | {"weight": heads.mean().item()})
            found["to_token_layers"] += [
                labels | {"layer": layer, "weight": row.mean().item(), "largest_head": row.max().item()}
                for layer, row in enumerate(heads)
            ]
        return {name: rows for name, rows in found.items() if rows}

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
        self.found: dict[str, list[Tensor]] = {}

    def add(
        self, before: Mapping[str, Sequence[Tensor]], after: Mapping[str, Sequence[Tensor]], real: Bool[Tensor, "b n"]
    ) -> None:
        """Count one batch."""
        for reading in ("standard", "effective"):
            cosines = head_similarity(before[reading], after[reading], key_visible=real).double().cpu()
            _sum_into(self.found, reading, cosines.nan_to_num() * len(real), (~cosines.isnan()).double() * len(real))

    def tables(self, task: str) -> dict[str, list[dict[str, Any]]]:
        """Rows per layer, and per layer and head."""
        rows, heads = [], []
        for reading, (total, count) in self.found.items():
            for layer, values in enumerate((total / count).tolist()):
                labels = {"task": task, "attention": reading, "layer": layer}
                rows.append(labels | {"similarity": sum(values) / len(values)})
                heads += [labels | {"head": head, "similarity": value} for head, value in enumerate(values)]
        return {"finetuning": rows, "finetuning_heads": heads}


def artefact_rows(table_2: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How far each class moves from standard attention: exactly computed, and as the authors' code computes it."""
    by = {(row["task"], row["attention"]): row for row in table_2}
    found = []
    for task in dict.fromkeys(task for task, _ in by):
        if any((task, reading) not in by for reading in READINGS):
            continue
        whole, exact, theirs = (by[task, reading] for reading in READINGS)
        for name in PATTERNS:
            found.append(
                {"task": task, "pattern": name, "standard": whole[name], "effective": exact[name]}
                | {"authors": theirs[name], "change": exact[name] - whole[name]}
                | {"authors_change": theirs[name] - whole[name], "artefact": theirs[name] - exact[name]}
            )
    return found


def summary_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per task and truth: the mean rank correlation of every reading with it, over all layers."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if row["layer"] == "all":
            one = found.setdefault((row["task"], row["against"]), {"task": row["task"], "against": row["against"]})
            one[row["reading"].replace(" ", "_")] = row["spearman"]
    return list(found.values())


def paired_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What one reading has over another on the same texts, over all layers."""
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
