"""Table 3: what effective attention costs an evaluation, ours against the full SVD."""

from __future__ import annotations

from typing import Any

import torch

from attnlab.devices import best_device
from papers.common.row_store import Part
from papers.effective.config import EffectiveConfig, encoder_folder
from papers.effective.study import timing_rows

__all__ = ["run_timing"]


def run_timing(config: EffectiveConfig, part: Part) -> None:
    """The rows of ``timing`` (the paper's size, random weights) and ``timing_models`` (that and the encoder itself)."""
    import transformers

    device = best_device()
    base = transformers.BertConfig() if config.timing_base else transformers.BertConfig(num_hidden_layers=1)
    torch.manual_seed(config.seed)
    encoder = transformers.AutoModel.from_pretrained(str(encoder_folder(config)), dtype=torch.float32)
    models: dict[str, Any] = {"BERT-base, random": transformers.BertModel(base), encoder_folder(config).name: encoder}
    for what, model in models.items():
        model.to(device).eval()
        ids = torch.randint(5, model.config.vocab_size, (config.batch_size, config.length))
        # Half of a padded batch is padding in these tasks.
        mask = (
            torch.arange(config.length) < torch.linspace(config.length // 4, config.length, config.batch_size)[:, None]
        )
        batch = {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}
        if part.has("timing_models", model=what, way="full-svd"):
            continue
        for row in timing_rows(model, batch, what=what, repeats=config.timing_repeats):
            if not part.has("timing_models", model=what, way=row["way"]):
                part.row("timing_models", **row)
            if what.startswith("BERT-base") and not part.has("timing", way=row["way"]):
                part.row("timing", **row)
