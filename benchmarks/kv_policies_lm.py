"""Train the small causal LM that benchmarks/kv_policies.py is run on beside stories15M: a Llama, by the one loop.

    python benchmarks/kv_policies_lm.py STORES OUT --seconds 180

STORES holds token stores (train, valid) and their tokenizer; OUT gets the model in half precision, its tokenizer and
the run's files. The number of steps is planned from the speed of the first ones, so that training takes ``--seconds``.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.data import Blocks, CausalSource, load_store, load_tokeniser
from attnlab.provenance import provenance, write_json
from attnlab.training import Callback, CrossEntropy, Evaluation, Moment, Recipe, Schedule, Settings, every, train


@dataclass(frozen=True)
class Config:
    layers: int = 6
    width: int = 256
    heads: int = 8
    hidden: int = 688
    length: int = 512
    batch: int = 64
    lr: float = 1.5e-3
    warmup: int = 200
    dropout: float = 0.0
    seed: int = 0


TINY = Config(layers=2, width=32, heads=2, hidden=48, length=32, batch=4, warmup=2)


class EnoughError(Exception):
    """Time is up."""


class Clock(Callback):
    """Stops the probe after ``steps`` (``rate`` is then known), and any training at ``deadline``."""

    def __init__(self, deadline: float, skip: int = 20, steps: int | None = None) -> None:
        self.deadline, self.skip, self.steps, self.rate, self.start, self.done = deadline, skip, steps, 0.0, 0.0, 0

    def on_step(self, moment: Moment) -> None:
        now = time.monotonic()
        self.done = moment.step
        if moment.step == self.skip:
            self.start = now
        if self.steps is not None and moment.step == self.steps:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.rate = (self.steps - self.skip) / max(1e-9, time.monotonic() - self.start)
            raise EnoughError
        if now > self.deadline:
            raise EnoughError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stores", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--tiny", action="store_true", help="a dry run")
    args = parser.parse_args()
    began = time.monotonic()
    config = TINY if args.tiny else Config()
    tokeniser = load_tokeniser(args.stores / "tokenizer")
    sources = {name: source(config, args.stores / name, tokeniser) for name in ("train", "valid")}
    work = Path(tempfile.mkdtemp(prefix="kv-lm-"))

    def fit(steps: int, clock: Clock, name: str) -> Any:
        model = make_model(config, tokeniser)
        settings = Settings(
            steps=steps,
            recipe=Recipe(lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1, clip=1.0),
            schedule=Schedule("cosine", warmup=min(config.warmup, max(1, steps // 10))),
            seed=config.seed,
            evaluate_at=every(max(1, steps // 4), steps=steps) if name == "run" else (),
        )
        try:
            train(
                model,
                sources["train"],
                terms=[CrossEntropy("causal-lm", shift=True)],
                settings=settings,
                run_dir=work / name,
                config={"model": asdict(config)},
                evaluations={"valid": Evaluation(sources["valid"], min(8, sources["valid"].steps_per_epoch))},
                callbacks=[clock],
            )
        except EnoughError:
            print(f"{name}: stopped after {clock.done} of {steps} steps", flush=True)
        return model

    probe = Clock(float("inf"), skip=2 if args.tiny else 30, steps=5 if args.tiny else 100)
    fit(10**6, probe, "probe")
    left = args.seconds - (time.monotonic() - began)
    steps = max(5, int(0.92 * left * probe.rate))
    print(f"{probe.rate:.1f} steps/s, {steps} steps planned in {left:.0f} s", flush=True)
    clock = Clock(time.monotonic() + left)
    model = fit(steps, clock, "run").eval()
    args.out.mkdir(parents=True, exist_ok=True)
    save(model, args.stores / "tokenizer", args.out)
    for name in ("run.json", "metrics.jsonl", "result.json"):
        if (work / "run" / name).exists():
            shutil.copy(work / "run" / name, args.out / name)
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": clock.done,
        "planned_steps": steps,
        "tokens": clock.done * config.batch * config.length,
        "tokens_in_corpus": len(sources["train"].blocks.store.tokens),
        "steps_per_second": probe.rate,
    }
    write_json(args.out / "training.json", {"config": asdict(config), **facts, **provenance()})
    print(facts, flush=True)


def source(config: Config, store: Path, tokeniser: Any) -> CausalSource:
    shuffle = store.name == "train"
    order = config.seed if shuffle else None
    blocks = Blocks(load_store(store), tokeniser.specials, length=config.length, form="stream", seed=order)
    return CausalSource(blocks, min(config.batch, len(blocks)), seed=config.seed, shuffle=shuffle)


def make_model(config: Config, tokeniser: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(config.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=-(-tokeniser.vocab_size // 64) * 64,
            hidden_size=config.width,
            intermediate_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            max_position_embeddings=config.length,
            attention_dropout=config.dropout,
            tie_word_embeddings=True,
            # Every document ends with </s>, so a new one begins after it.
            bos_token_id=tokeniser.specials.eos,
            eos_token_id=tokeniser.specials.eos,
            pad_token_id=tokeniser.specials.pad,
        )
    )


def save(model: Any, tokenizer: Path, out: Path) -> None:
    model.to("cpu").half().save_pretrained(out)
    for file in tokenizer.iterdir():
        shutil.copy(file, out / file.name)


if __name__ == "__main__":
    main()
