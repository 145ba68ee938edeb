"""A masked or causal language model, trained on token stores by the one training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnlab.data import Blocks, CausalSource, MlmSource, TokenStore
from attnlab.data.tokenisers import Tokeniser
from attnlab.devices import best_device
from attnlab.errors import placed
from attnlab.guidance import Guidance
from attnlab.measure import parameter_count
from attnlab.models import Transformer, named_config
from attnlab.models.losses import CausalLM, MaskedLM
from attnlab.pretraining.guided import guided
from attnlab.pretraining.hugging_face import BertMaskedLM, bert_states, family_and_size, hugging_face_model
from attnlab.pretraining.recorded import attention_recorder
from attnlab.sizes import check_bytes
from attnlab.training import (
    Callback,
    CrossEntropy,
    Evaluation,
    Moment,
    Outcome,
    Recipe,
    Schedule,
    Settings,
    Source,
    every,
    train,
)
from attnlab.training.launch import join_processes
from attnlab.training.runs import RunFolder, say

__all__ = ["SHIPPED_MLM", "PretrainConfig", "build_model", "check_training_size", "pretrain", "task_of"]

# How names of Hugging Face's models begin.
HUGGING_FACE = ("bert-", "llama-")
# What a model of each kind, or of each family of Hugging Face's, learns from a plain text.
TASKS = {"encoder": "mlm", "decoder": "causal", "bert": "mlm", "llama": "causal"}
LARGEST_FLOAT32 = 3e38
# The name of each task's loss term.
TERM_NAMES = {"mlm": "masked-lm", "causal": "causal-lm"}


@dataclass(frozen=True)
class PretrainConfig:
    """One language-model training: the model, the length of its rows, and how long it learns."""

    # A name of attnlab.models, or bert-LAYERSxWIDTH or llama-LAYERSxWIDTH: Hugging Face's, with heads of 32.
    model: str = "attnlab-mlm"
    task: str = "mlm"
    # The mechanism of every layer, as a spec.
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
    # A batch is computed in this many parts, one after another, to save memory.
    accumulate: int = 1
    # Heads pulled to patterns; None: none.
    guidance: Guidance | None = None
    # A checkpoint after every so many steps, beside those by time and at improvements; None: only these.
    checkpoint_every: int | None = None
    # A text whose attention is recorded at every evaluation, for the explorer; "": the held-out text's first tokens.
    record: str | None = None

    def __post_init__(self) -> None:
        if self.task not in ("mlm", "causal"):
            raise ValueError(f"task must be 'mlm' or 'causal', got {self.task!r}")
        if not self.lengths or min(self.lengths) < 3:
            raise ValueError(f"lengths must name rows of at least 3 tokens, got {self.lengths}")
        if self.lr >= LARGEST_FLOAT32:
            raise ValueError(f"lr must be a number that float32 holds, got {self.lr}")
        if max(self.lengths) > self.tokens:
            raise ValueError(f"a batch of {self.tokens} tokens holds no row of {max(self.lengths)}")
        if self.task == "causal" and self.guidance is not None and "next" in self.guidance.names:
            raise ValueError("a causal model does not see the next token: guide it to patterns other than 'next'")

    def settings(self) -> Settings:
        """The training loop's settings."""
        return Settings(
            steps=self.steps,
            recipe=Recipe(lr=self.lr, betas=self.betas, weight_decay=self.weight_decay, clip=self.clip),
            schedule=Schedule(self.decay, warmup=self.warmup),
            seed=self.seed,
            accumulate=self.accumulate,
            compile=self.compile,
            checkpoint_every=self.checkpoint_every,
            evaluate_at=every(max(1, self.steps // self.evaluations), steps=self.steps),
            # With guidance the loss contains L_AG, whose weight changes, so that the task's term is watched.
            watch="valid/loss" if self.guidance is None else f"valid/{TERM_NAMES[self.task]}",
        )

    def as_dict(self) -> dict[str, Any]:
        """The settings as run.json holds them; what earlier versions did not have is left out where it is not used."""
        later = {"guidance", "checkpoint_every", "record"}
        return {name: value for name, value in asdict(self).items() if name not in later or value is not None}

    @property
    def label(self) -> str:
        """The model, the task, its attention and the patterns that heads are guided to."""
        plain = f"{self.model} {self.task}, {self.attention}"
        return plain if self.guidance is None else f"{plain}, guided to {self.guidance.label}"


# The checkpoint in attnlab/shipped; docs/model-card.md says how it came out.
SHIPPED_MLM = PretrainConfig(
    model="bert-6x256", lengths=(512, 128), tokens=32_768, lr=1e-3, warmup=1000, steps=15_800, evaluations=16
)


def task_of(model: str) -> str:
    """What a model of this name learns: "mlm" or "causal".

    >>> task_of("attnlab-lm"), task_of("bert-6x256")
    ('causal', 'mlm')
    """
    kind = model.partition("-")[0] if model.startswith(HUGGING_FACE) else named_config(model).kind
    if kind not in TASKS:
        raise ValueError(f"{model!r} is of kind {kind}, which learns from pairs of texts; name an encoder or a decoder")
    return TASKS[kind]


# Vectors of the width, in float32, that a layer keeps of a token at least, compiled or in half precision too.
VECTORS = 6


def check_training_size(config: PretrainConfig, *, vocab: int) -> None:
    """Refuse a model or a batch that does not fit, before the text is read and before a weight is made."""
    if config.model.startswith(HUGGING_FACE):
        _, layers, width = family_and_size(config.model)
    else:
        named = named_config(config.model)
        layers, width = named.layers, named.width
    device = best_device()
    # Four products of the attention and eight of the feed-forward layers, and the embeddings of tokens and positions.
    parameters = 12 * layers * width**2 + (vocab + max(config.lengths)) * width
    # The weights, their gradients and Adam's two means.
    instead = "take a smaller model, vocabulary or length"
    check_bytes(f"training {config.model}", 4 * 4 * parameters, instead=instead, device=device)
    # Of each token and layer the backward pass reads the inputs of norms and products: at least as many vectors.
    states = 4 * VECTORS * layers * width * config.tokens // config.accumulate
    check_bytes(
        f"a batch of {config.tokens} tokens", states, instead="make the batch or its rows smaller", device=device
    )


def build_model(config: PretrainConfig, tokeniser: Tokeniser) -> nn.Module:
    """The untrained model; its vocabulary is the tokeniser's, rounded up to a multiple of 64."""
    torch.manual_seed(config.seed)
    vocab = -(-tokeniser.vocab_size // 64) * 64
    check_training_size(config, vocab=vocab)
    if config.model.startswith(HUGGING_FACE):
        return hugging_face_model(
            config.model,
            task=config.task,
            attention=config.attention,
            length=max(config.lengths),
            specials=tokeniser.specials,
            vocab=vocab,
        )
    named = named_config(config.model)
    kind = {"mlm": "encoder", "causal": "decoder"}[config.task]
    if named.kind != kind:
        raise ValueError(
            f"task {config.task!r} needs a model of kind {kind}, but {config.model!r} is of kind {named.kind}"
        )
    return Transformer(
        replace(
            named,
            vocab=vocab,
            max_length=max(named.max_length, *config.lengths),
            self_attention=config.attention,
            causal_attention=config.attention,
        )
    )


def pretrain(
    config: PretrainConfig,
    *,
    tokeniser: Tokeniser,
    stores: Mapping[str, TokenStore],
    run_dir: Path | str | RunFolder,
    model: nn.Module | None = None,
    resume: bool = False,
    track: str | None = None,
    callbacks: tuple[Callback, ...] = (),
    config_extra: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, Outcome]:
    """Train on ``stores["train"]``; the others (``valid``, ...) are evaluated along the way.

    ``model`` is an untrained model in place of the one that the config names.
    """
    model = build_model(config, tokeniser) if model is None else model
    evaluations = {
        name: Evaluation(source, source.steps_per_epoch)
        for name, source in _evaluation_sources(config, tokeniser, stores).items()
    }
    is_transformer = isinstance(model, Transformer)
    terms: dict[str, tuple[Any, Any]] = {
        "mlm": (MaskedLM(), BertMaskedLM()),
        "causal": (CausalLM(), CrossEntropy(TERM_NAMES["causal"], shift=True)),
    }
    if config.task == "mlm":
        callbacks = (*callbacks, _MaskedError(evaluations))
    if config.record is not None:
        callbacks = (*callbacks, attention_recorder(config.record, config.lengths, config.task, tokeniser, stores))
    sources = [
        _source(config, tokeniser, stores["train"], length, part="the text to train on") for length in config.lengths
    ]
    if join_processes(config.settings()).is_main_process:
        say(_size(config, model, stores["train"], sources))
    with guided(model, config.guidance, steps=config.steps, tokeniser=tokeniser) as guidance:
        outcome = train(
            model,
            _Alternating([*sources]),
            terms=[terms[config.task][0 if is_transformer else 1], *guidance],
            settings=config.settings(),
            run_dir=run_dir,
            # Not the folder's name: seeds of one configuration are one line in a report.
            name=config.label,
            config={"pretrain": config.as_dict(), **(config_extra or {})},
            data={
                "tokeniser": tokeniser.fingerprint(),
                "tokens": {name: store.checksum() for name, store in stores.items()},
            },
            evaluations=evaluations,
            callbacks=callbacks,
            forward=None if is_transformer or config.task == "causal" else bert_states,
            resume=resume,
            track=track,
        )
    return model, outcome


def _size(config: PretrainConfig, model: nn.Module, store: TokenStore, sources: Sequence[Any]) -> str:
    """One line: how large the model and the text are, and how often the text is read."""
    epochs = sum(config.steps / len(sources) / source.steps_per_epoch for source in sources)
    return (
        f"{parameter_count(model):,} parameters; {len(store.tokens):,} tokens to train on; {config.steps:,} steps of "
        f"up to {config.tokens:,} tokens are {epochs:.3g} epochs"
    )


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
        rounds, turn = divmod(step, len(self.sources))
        return self.sources[turn].batch(rounds)


def _source(
    config: PretrainConfig, tokeniser: Tokeniser, store: TokenStore, length: int, *, part: str, shuffle: bool = True
) -> MlmSource | CausalSource:
    order = config.seed if shuffle else None
    form: Literal["enclosed", "stream"] = "enclosed" if config.task == "mlm" else "stream"
    try:
        blocks = Blocks(store, tokeniser.specials, length=length, form=form, seed=order)
    except ValueError as error:
        raise placed(part, error) from None
    # A store to evaluate on may have fewer rows than a batch of training.
    rows = config.tokens // length if shuffle else min(config.tokens // length, len(blocks))
    if config.task == "mlm":
        return MlmSource(blocks, rows, vocab_size=tokeniser.vocab_size, seed=config.seed, shuffle=shuffle)
    return CausalSource(blocks, rows, seed=config.seed, shuffle=shuffle)


def _evaluation_sources(
    config: PretrainConfig, tokeniser: Tokeniser, stores: Mapping[str, TokenStore]
) -> dict[str, MlmSource | CausalSource]:
    longest = max(config.lengths)
    return {
        name: _source(config, tokeniser, store, longest, part=f"the held-out text ({name})", shuffle=False)
        for name, store in stores.items()
        if name != "train"
    }
