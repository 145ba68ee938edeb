"""What plans cost a model: its loss on two texts, the bytes that attention reads, and time; each measured once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from attnlab.adapters import LoadedModel, swap
from attnlab.adapters.plan import Plan, swap_plan
from attnlab.evaluation.quality import Predictions, Windows, batches, model_inputs, predict, quality_summary
from attnlab.measure import median_seconds
from attnlab.mechanisms.softmax import Softmax
from attnlab.progress import Progress
from attnlab.registry import mechanism
from attnlab.trace import Trace

__all__ = ["PlanMeter"]


@dataclass(eq=False)
class PlanMeter:
    """Measures plans in one model on one text, each plan once."""

    loaded: LoadedModel
    windows: Windows
    held_out: Windows | None
    trace: Trace
    batch: int
    repeats: int
    progress: Progress
    chosen_on: dict[Any, Predictions | None] = field(default_factory=dict)
    unseen: dict[Any, Predictions | None] = field(default_factory=dict)

    def quality(self, plan: Plan) -> dict[str, Any] | None:
        predictions = self._predictions(plan, self.windows, self.chosen_on)
        return None if predictions is None else quality_summary(predictions)

    def held_out_increase(self, plan: Plan) -> float | None:
        """The increase of the loss, as a share of it, on text that plans were not chosen on."""
        if self.held_out is None:
            return None
        exact, planned = (self._predictions(p, self.held_out, self.unseen) for p in (Plan({}), plan))
        return None if exact is None or planned is None else planned.mean_loss / exact.mean_loss - 1

    def loss_above(self, plan: Plan) -> dict[str, float | None]:
        """The loss above exact attention's with its interval, on the held-out text where there is any."""
        texts = [(self.windows, self.chosen_on), *([(self.held_out, self.unseen)] if self.held_out else [])]
        above: tuple[float | None, ...] = (None, None, None)
        for windows, known in texts:
            exact, planned = (self._predictions(p, windows, known) for p in (Plan({}), plan))
            # A short text may have no token to predict.
            above = above if exact is None or planned is None else planned.loss_above(exact)
        return dict(zip(("loss_above", "loss_above_low", "loss_above_high"), above, strict=True))

    def attention_bytes(self, plan: Plan) -> float:
        """Bytes of keys, values or memory that a query reads in all layers, as a share of softmax attention's."""
        shares = [
            mechanism(plan.layers.get((layer.kind, layer.layer), "softmax")).bytes_read(layer.call)
            for layer in self.trace
        ]
        return sum(shares) / len(shares)

    def add_times(self, rows: list[dict[str, Any]]) -> None:
        """``time_ratio`` of each row: a forward pass relative to softmax everywhere, all plans taking turns."""
        batch = next(batches(self.windows, size=max(1, min(self.batch, 512 // self.windows.input_ids.shape[1]))))
        plans = {str(row["plan"]): Plan.from_json(row["plan"]) for row in rows}

        def forward(plan: Plan) -> None:
            with torch.no_grad(), self._attending(plan):
                self.loaded.model(**model_inputs(self.loaded, batch))

        jobs = {key: partial(forward, plan) for key, plan in plans.items()}
        seconds = median_seconds(jobs, repeats=self.repeats, device=batch["input_ids"].device)
        for row in rows:
            exact, own = str(rows[0]["plan"]), str(row["plan"])
            row["time_ratio"] = seconds[own] / seconds[exact]

    def _predictions(self, plan: Plan, windows: Windows, known: dict[Any, Predictions | None]) -> Predictions | None:
        key = tuple(plan.layers.items())
        if key not in known:
            with self._attending(plan):
                known[key] = predict(self.loaded, windows, batch=self.batch)
            self.progress.step()
        return known[key]

    @contextmanager
    def _attending(self, plan: Plan) -> Iterator[None]:
        with swap(self.loaded.model, Softmax()), swap_plan(self.loaded.model, plan):
            yield
