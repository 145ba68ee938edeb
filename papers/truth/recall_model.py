"""The small causal LM of associative recall, trained here: two layers find out whose value a value is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from attnlab.models import Transformer, TransformerConfig
from attnlab.training import CrossEntropy, Recipe, Schedule, Settings, load_weights, train
from papers.truth.cases import recall_task
from papers.truth.config import TruthConfig

__all__ = ["recall_model"]


def recall_model(config: TruthConfig, seed: int, folder: Path) -> Transformer:
    """Train a model on ever larger tasks, or go on with it.

    On the whole task at once no attention finds out which value belongs to a key.
    """
    torch.manual_seed(seed)
    model = Transformer(
        TransformerConfig(
            kind="decoder", vocab=recall_task(config, seed).vocab, width=config.width, heads=config.heads, layers=2,
            hidden=2 * config.width, positions="rotary", bias=False, tied=False, init="xavier", embed_scale=True,
        )
    )  # fmt: skip
    pairs = 4
    while True:
        last = pairs >= config.pairs
        settings = Settings(
            steps=config.steps,
            recipe=Recipe(lr=config.lr, weight_decay=0.01),
            schedule=Schedule("cosine" if last else "constant", warmup=min(20, config.steps // 2)),
            seed=seed,
            checkpoint_seconds=60,
            # Scores of recall are sharp, and half precision would round them.
            precision="no",
        )
        run = folder / f"{min(pairs, config.pairs)}-pairs"
        source = recall_task(config, seed, pairs=pairs)
        train(
            model, source, terms=[CrossEntropy()], settings=settings, run_dir=run, config=asdict(config), resume=True
        )  # fmt: skip
        # A run that was finished before has trained no model here.
        load_weights(model, run)
        if last:
            return model
        pairs *= 2
