"""How many tokens a second a conversion learns from, beside softmax taught by the same recipe in the same run.

    python benchmarks/distillation_speed.py --model smollm2 --lengths 1024 2048 \\
        --write benchmarks/results/distillation_speed.json

The last stage of ``attnlab convert``, in which nearly all tokens are learned: the teacher runs once, all weights are
trained by the KL of every token, layers are compiled, products are bfloat16. Times are medians over intervals of some
steps after the first ones, in which layers are compiled; without evaluations and checkpoints, which a conversion has
besides. The peer is a copy of the model that keeps softmax: what is left between the two is the mechanism.
``--tiny`` runs a small random model on a CPU, to see that everything fits together.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from storing import make_results, write_results
from tiny_models import tiny_llama
from torch import nn

from attnlab.adapters import convert, load_model
from attnlab.adapters.distillation import Distillation, StageProgress, teach
from attnlab.devices import best_device

TABLE, SOFTMAX = "speed", "softmax"
# Steps of an interval, and the intervals in which layers are compiled.
EVERY, WARMING = 10, 2


class RandomRows:
    """Batches of random tokens, on the device from the start: what is read takes no time here."""

    def __init__(self, vocabulary: int, rows: int, length: int, device: torch.device) -> None:
        draw = torch.Generator().manual_seed(0)
        self.ids = torch.randint(vocabulary, (4, rows, length), generator=draw).to(device)

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """One of four batches."""
        return {"input_ids": self.ids[step % 4]}


def measured(teacher: nn.Module, spec: str, length: int, args: argparse.Namespace) -> dict[str, Any]:
    """One student for some steps."""
    student = copy.deepcopy(teacher) if spec == SOFTMAX else convert(teacher, spec, copy=True)
    device, rows = next(teacher.parameters()).device, max(1, args.batch // length)
    on_gpu = device.type == "cuda"
    settings = Distillation(
        heads_steps=0, logits_steps=args.steps, logits_lr=1e-6, batch=rows, length=length, every=EVERY,
        compile=on_gpu and args.compile,
    )  # fmt: skip
    ends: list[float] = []

    def reached(progress: StageProgress) -> None:
        ends.append(progress.seconds)

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    source = RandomRows(teacher.config.vocab_size, rows, length, device)
    teach(teacher, student, source, settings, on_progress=reached)
    each = [(b - a) / EVERY for a, b in zip(ends[WARMING - 1 :], ends[WARMING:], strict=False)]
    seconds = statistics.median(each)
    row = {"mechanism": spec, "length": length, "tokens a step": rows * length, "ms a step": 1e3 * seconds,
           "tokens/s": rows * length / seconds}  # fmt: skip
    return row | ({"GB": torch.cuda.max_memory_allocated() / 1e9} if on_gpu else {})


def measured_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Softmax first, then each mechanism, by length."""
    teacher = tiny_llama() if args.tiny else load_model(args.model).model.to(best_device())
    for length in args.lengths:
        softmax = measured(teacher, SOFTMAX, length, args)
        for row in (softmax, *(measured(teacher, spec, length, args) for spec in args.mechanisms)):
            yield row | {"of softmax": row["tokens/s"] / softmax["tokens/s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("-m", "--mechanisms", nargs="+", default=["abc-select:slots=56,window=64,sinks=4"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--batch", type=int, default=32768, help="tokens a step")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    if args.steps < EVERY * (WARMING + 1):
        parser.error(f"--steps must be at least {EVERY * (WARMING + 1)}")
    if args.tiny:
        args.lengths, args.batch, args.steps = [32], 64, 40
        args.mechanisms = ["abc-select:slots=4,window=8,sinks=1,block=4"]
    table: list[dict[str, Any]] = []
    for row in measured_rows(args):
        table.append(row)
        print(row, flush=True)
        if args.write:
            config = {"model": "tiny" if args.tiny else Path(args.model).name, "compile": args.compile}
            write_results(args.write, make_results("distillation_speed", "ABC", {TABLE: table}, config=config))


if __name__ == "__main__":
    main()
