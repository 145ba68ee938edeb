"""``attnlab train``: a masked or causal language model on the user's text, by the one training loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attnlab.data import IGNORED, Blocks, CausalSource, MlmSource, TokenStore
from attnlab.data.tokenisers import Tokeniser
from attnlab.models import Transformer, named_config
from attnlab.models.losses import CausalLM, MaskedLM
from attnlab.training import (
    Callback,
    CrossEntropy,
    Evaluation,
    Loss,
    Moment,
    Outcome,
    Recipe,
    Schedule,
    Settings,
    Source,
    every,
    train,
)

__all__ = ["SHIPPED_MLM", "BertMaskedLM", "PretrainConfig", "bert_states", "build_model", "pretrain"]


@dataclass(frozen=True)
class PretrainConfig:
    """One language-model training: the model, the length of its rows, and how long it learns."""

    # A name of attnlab.models, or bert-LAYERSxWIDTH or llama-LAYERSxWIDTH: Hugging Face's, with heads of 32.
    model: str = "attnlab-mlm"
    task: str = "mlm"
    # For models of attnlab: the mechanism of every layer.
    attention: str = "softmax"
    # Steps alternate between these lengths; each has ``tokens`` tokens in a batch.
    lengths: tuple[int, ...] = (512,)
    tokens: int = 65_536
    steps: int = 1000
    lr: float = 1e-3
    warmup: int = 100
    decay: str = "linear"
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0
    evaluations: int = 10
    seed: int = 0
    compile: bool = False
    # How many of a batch's parts are taken one after another, for a smaller memory.
    accumulate: int = 1

    def __post_init__(self) -> None:
        if self.task not in ("mlm", "causal"):
            raise ValueError(f"task must be 'mlm' or 'causal', got {self.task!r}")
        if not self.lengths or min(self.lengths) < 3:
            raise ValueError(f"lengths must name rows of at least 3 tokens, got {self.lengths}")
        if max(self.lengths) > self.tokens:
            raise ValueError(f"a batch of {self.tokens} tokens holds no row of {max(self.lengths)}")

    def settings(self) -> Settings:
        """The training loop's settings."""
        return Settings(
            steps=self.steps,
            recipe=Recipe(lr=self.lr, betas=self.betas, weight_decay=self.weight_decay, clip=self.clip),
            schedule=Schedule(self.decay, warmup=self.warmup),
            seed=self.seed,
            accumulate=self.accumulate,
            compile=self.compile,
            evaluate_at=every(max(1, self.steps // self.evaluations), steps=self.steps),
            watch="valid/loss",
        )


# The checkpoint in attnlab/shipped; docs/model-card.md says how it came out.
SHIPPED_MLM = PretrainConfig(
    model="bert-6x256", lengths=(512, 128), tokens=32_768, lr=1e-3, warmup=1000, steps=15_800, evaluations=16
)


def build_model(config: PretrainConfig, tokeniser: Tokeniser) -> nn.Module:
    """The untrained model; its vocabulary is the tokeniser's, rounded up to a multiple of 64."""
    torch.manual_seed(config.seed)
    vocab = -(-tokeniser.vocab_size // 64) * 64
    if config.model.startswith(("bert-", "llama-")):
        return _hugging_face(config, tokeniser, vocab)
    wanted = named_config(config.model)
    kind = {"mlm": "encoder", "causal": "decoder"}[config.task]
    if wanted.kind != kind:
        raise ValueError(
            f"task {config.task!r} needs a model of kind {kind}, but {config.model!r} is of kind {wanted.kind}"
        )
    return Transformer(
        replace(
            wanted,
            vocab=vocab,
            max_length=max(wanted.max_length, *config.lengths),
            self_attention=config.attention,
            causal_attention=config.attention,
        )
    )


def pretrain(
    config: PretrainConfig,
    *,
    tokeniser: Tokeniser,
    stores: Mapping[str, TokenStore],
    run_dir: Path | str,
    resume: bool = False,
    track: str | None = None,
    callbacks: tuple[Callback, ...] = (),
    config_extra: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, Outcome]:
    """Train on ``stores["train"]``; the others (``valid``, ...) are evaluated along the way."""
    model = build_model(config, tokeniser)
    evaluations = {
        name: Evaluation(source, source.steps_per_epoch)
        for name, source in _evaluation_sources(config, tokeniser, stores).items()
    }
    own = isinstance(model, Transformer)
    terms: dict[str, tuple[Any, Any]] = {
        "mlm": (MaskedLM(), BertMaskedLM()),
        "causal": (CausalLM(), CrossEntropy("causal-lm", shift=True)),
    }
    if config.task == "mlm":
        callbacks = (*callbacks, _MaskedError(evaluations))
    outcome = train(
        model,
        _Alternating([_source(config, tokeniser, stores["train"], length) for length in config.lengths]),
        terms=[terms[config.task][0 if own else 1]],
        settings=config.settings(),
        run_dir=run_dir,
        # Not the folder's name: seeds of one configuration are one line in a report.
        name=f"{config.model} {config.task}, {config.attention}",
        config={"pretrain": asdict(config), **(config_extra or {})},
        evaluations=evaluations,
        callbacks=callbacks,
        forward=None if own or config.task == "causal" else bert_states,
        resume=resume,
        track=track,
    )
    return model, outcome


@torch.no_grad()
def masked_error(model: nn.Module, evaluation: Evaluation) -> float:
    """The share of masked tokens predicted wrongly."""
    device = next(model.parameters()).device
    wrong = count = 0
    for step in range(evaluation.batches):
        batch = {name: t.to(device) for name, t in evaluation.source.batch(step).items()}
        labels = batch.pop("labels")
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            predicted = model(**batch).logits.argmax(-1)
        chosen = labels >= 0
        wrong += int((predicted[chosen] != labels[chosen]).sum())
        count += int(chosen.sum())
    return wrong / max(1, count)


def bert_states(model: Any, batch: Mapping[str, Any]) -> Any:
    """A BERT's last hidden states, without its head."""
    return model.bert(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).last_hidden_state


@dataclass(frozen=True)
class BertMaskedLM:
    """-log p(the label) at masked positions; the vocabulary is scored at a fixed number of places per row.

    That number is far above what a row masks at 15 % (seven standard deviations), and shapes stay fixed.
    """

    name: str = "masked-lm"

    def __call__(self, model: Any, output: Tensor, batch: Mapping[str, Any], step: int) -> Loss:
        labels = batch["labels"]
        length = labels.shape[1]
        at = (labels != IGNORED).int().topk(min(length, length // 4 + 16), dim=1).indices
        hidden = output.gather(1, at[..., None].expand(-1, -1, output.shape[-1]))
        logits, labels = model.cls(hidden).flatten(0, 1), labels.gather(1, at).flatten()
        total = cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
        return Loss(total, (labels != IGNORED).sum())

    def count(self, batch: Mapping[str, Any], step: int) -> Tensor:
        """The number of masked tokens."""
        return (batch["labels"] != IGNORED).sum()


class _MaskedError(Callback):
    """Beside each evaluation's loss, the share of masked tokens predicted wrongly."""

    def __init__(self, evaluations: Mapping[str, Evaluation]) -> None:
        self.evaluations = evaluations

    def on_evaluation(self, moment: Moment) -> Mapping[str, float]:
        return {f"{name}/error": masked_error(moment.model, e) for name, e in self.evaluations.items()}


@dataclass(frozen=True)
class _Alternating:
    """Sources that take turns."""

    sources: list[Source] = field(default_factory=list)

    def batch(self, step: int) -> dict[str, Tensor]:
        turn, own = step % len(self.sources), step // len(self.sources)
        return self.sources[turn].batch(own)


def _source(
    config: PretrainConfig, tokeniser: Tokeniser, store: TokenStore, length: int, *, shuffle: bool = True
) -> MlmSource | CausalSource:
    order = config.seed if shuffle else None
    form: Literal["enclosed", "stream"] = "enclosed" if config.task == "mlm" else "stream"
    blocks = Blocks(store, tokeniser.specials, length=length, form=form, seed=order)
    # An evaluation is small: it must not ask for more rows than there are.
    rows = config.tokens // length if shuffle else min(config.tokens // length, len(blocks))
    if config.task == "mlm":
        return MlmSource(blocks, rows, vocab_size=tokeniser.vocab_size, seed=config.seed, shuffle=shuffle)
    return CausalSource(blocks, rows, seed=config.seed, shuffle=shuffle)


def _evaluation_sources(
    config: PretrainConfig, tokeniser: Tokeniser, stores: Mapping[str, TokenStore]
) -> dict[str, MlmSource | CausalSource]:
    longest = max(config.lengths)
    return {
        name: _source(config, tokeniser, store, longest, shuffle=False)
        for name, store in stores.items()
        if name != "train"
    }


def _hugging_face(config: PretrainConfig, tokeniser: Tokeniser, vocab: int) -> Any:
    from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

    family, _, size = config.model.partition("-")
    try:
        layers, width = (int(n) for n in size.split("x"))
    except ValueError:
        raise ValueError(f"it is named {family}-LAYERSxWIDTH, such as {family}-6x256, got {config.model!r}") from None
    task, kind = {"bert": ("mlm", "masked"), "llama": ("causal", "causal")}[family]
    if config.task != task or config.attention != "softmax":
        raise ValueError(f"{config.model} is trained as a {kind} language model with softmax attention")
    if layers < 1 or width < 1 or width % 32:
        raise ValueError(f"{config.model} must have layers, and a width that is a multiple of 32, the width of a head")
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
    }
    specials = tokeniser.specials
    if family == "bert":
        return BertForMaskedLM(
            BertConfig(
                **shape,
                intermediate_size=4 * width,
                max_position_embeddings=max(512, *config.lengths),
                attention_probs_dropout_prob=0.0,
                pad_token_id=specials.pad,
                type_vocab_size=1,
            )
        )
    return LlamaForCausalLM(
        LlamaConfig(
            **shape,
            # Three matrices instead of two: as many parameters as with 4 x the width, in a multiple of 16.
            intermediate_size=-(-8 * width // 48) * 16,
            max_position_embeddings=max(config.lengths),
            tie_word_embeddings=True,
            # Every document ends with </s>, so a new one begins after it.
            bos_token_id=specials.eos,
            eos_token_id=specials.eos,
            pad_token_id=specials.pad,
        )
    )
