"""Train the small causal LM that benchmarks/kv_policies.py is run on beside stories15M: a Llama, by the one loop.

    python benchmarks/kv_policies_lm.py STORES OUT --steps 1000

STORES holds token stores (train, valid) and their tokenizer; OUT gets the model in half precision, its tokenizer and
the run's files.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from attnlab.data import load_store, load_tokeniser
from attnlab.pretraining import PretrainConfig, pretrain

CONFIG = PretrainConfig(
    model="llama-6x256",
    task="causal",
    lengths=(512,),
    tokens=32_768,
    lr=1.5e-3,
    warmup=200,
    decay="cosine",
    betas=(0.9, 0.95),
    weight_decay=0.1,
    evaluations=4,
)
TINY = replace(CONFIG, model="llama-2x32", lengths=(32,), tokens=128, warmup=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stores", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tiny", action="store_true", help="a dry run")
    args = parser.parse_args()
    config = replace(TINY if args.tiny else CONFIG, steps=args.steps)
    work = Path(tempfile.mkdtemp(prefix="kv-lm-"))
    model, outcome = pretrain(
        config,
        tokeniser=load_tokeniser(args.stores / "tokenizer"),
        stores={name: load_store(args.stores / name) for name in ("train", "valid")},
        run_dir=work,
    )
    model.to("cpu").half().save_pretrained(args.out)  # type: ignore[operator]
    for file in (*(args.stores / "tokenizer").iterdir(), *work.glob("*.json*")):
        shutil.copy(file, args.out / file.name)
    print(outcome.metrics)


if __name__ == "__main__":
    main()
