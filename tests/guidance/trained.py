"""A small guided run of the Hugging Face Trainer, in this process or as one of several (``python -m``)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from attnlab.guidance import Guidance, guide, guide_trainer
from attnlab.patterns import SpecialTokens

TOKENS = SpecialTokens(period=(9,), delimiters=(1, 2))
# Plain steps: Adam divides by the root of tiny squares, and rounding shows.
PLAIN = {"optim": "sgd", "lr": 0.1, "padded": False}
STILL = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
HEADS = {"first": 1, "delim": 1, "prev": 1}


def bert(seed: int = 0, **settings: Any) -> tf.BertForMaskedLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
    return tf.BertForMaskedLM(tf.BertConfig(vocab_size=31, max_position_embeddings=16, **{**sizes, **settings}))


def texts(count: int, *, padded: bool = True) -> list[dict[str, torch.Tensor]]:
    """Texts of eleven tokens between delimiters; with ``padded`` the second of each four is shorter."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for i in range(count):
        ids = torch.randint(3, 31, (11,), generator=generator)
        mask = torch.ones_like(ids)
        ids[0], ids[-1] = 1, 2
        if padded and i % 4 == 1:
            ids[7:], mask[7:] = 0, 0
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return rows


def trainer_of(
    model: Any, folder: Path, *, steps: int = 4, batch: int = 4, lr: float = 5e-3, padded: bool = True, **how: Any
) -> tf.Trainer:
    arguments = tf.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        max_steps=steps,
        learning_rate=lr,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **how,
    )
    trainer = tf.Trainer(model=model, args=arguments, train_dataset=texts(32, padded=padded))
    # BERT's loss is a mean whatever the trainer counts, so that its sum over parts and ranks would be too large.
    trainer.model_accepts_loss_kwargs = False
    return trainer


def guided_run(folder: Path, *, guidance: Guidance | None = None, **how: Any) -> tuple[Any, list[dict[str, float]]]:
    """(the model, the logs) of a guided run."""
    model = bert(**how.pop("model", {}))
    trainer = trainer_of(model, folder, **how)
    guidance = guidance or Guidance(heads=HEADS, alpha0=1, hold=0.7, reduction="row")
    with guide_trainer(trainer, guidance, tokens=TOKENS):
        trainer.train()
    return model, [line for line in trainer.state.log_history if "guidance" in line]


class Texts:
    """The same eight texts at every step."""

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        rows = texts(8)
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def own_run(folder: Path, *, compiled: bool) -> list[dict[str, float]]:
    """The train lines of a guided run of our own loop and model."""
    from attnlab.models import MaskedLM, Transformer, TransformerConfig
    from attnlab.training import Recipe, Settings, read_metrics, train

    torch.manual_seed(3)
    model = Transformer(TransformerConfig(kind="encoder", vocab=31, width=24, heads=4, layers=2, head="mlm"))
    settings = Settings(steps=4, recipe=Recipe(lr=1e-2), log_every=1, device="cpu", precision="no", compile=compiled)
    with guide(model, Guidance(heads=HEADS, alpha0=1, schedule="constant", reduction="row"), tokens=TOKENS) as term:
        train(model, Texts(), terms=[MaskedLM(), term], settings=settings, run_dir=folder)
    return [line["values"] for line in read_metrics(folder) if line["kind"] == "train"]


if __name__ == "__main__" and sys.argv[1] == "own":
    print(json.dumps([own_run(Path(sys.argv[2]) / str(compiled), compiled=compiled) for compiled in (False, True)]))
elif __name__ == "__main__":
    out, batch, backend = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    how: dict[str, Any] = {} if backend == "none" else {"torch_compile": True, "torch_compile_backend": backend}
    model, logs = guided_run(out, batch=batch, model=STILL, **PLAIN, **how)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        weights = {name: p.detach().flatten()[:3].tolist() for name, p in model.named_parameters()}
        (out / "ended.json").write_text(json.dumps({"logs": logs, "weights": weights}))
