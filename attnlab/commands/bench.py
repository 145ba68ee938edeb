"""``attnlab bench``: time and peak memory of mechanisms against torch's SDPA on the same call, over lengths."""

from __future__ import annotations

import argparse

from attnlab.commands._output import Answer
from attnlab.commands._shared import check_mechanisms, device_argument, mechanism_argument
from attnlab.progress import showing

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    mechanism_argument(parser)
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="N",
        default=[1024, 2048, 4096, 8192],
        help="lengths in tokens (default: 1024 2048 4096 8192)",
    )
    parser.add_argument("--heads", type=int, metavar="N", default=8, help="heads of a layer (default: %(default)s)")
    parser.add_argument("--width", type=int, metavar="N", default=64, help="width of a head (default: %(default)s)")
    parser.add_argument("--batch", type=int, metavar="N", default=1, help="texts at once (default: %(default)s)")
    parser.add_argument("--bidirectional", action="store_true", help="let every token see all others")
    parser.add_argument("--backward", action="store_true", help="time forward and backward together")
    parser.add_argument(
        "--repeats", type=int, metavar="N", default=3, help="repeats, of which the median counts (default: %(default)s)"
    )
    device_argument(parser)


def run(options: argparse.Namespace) -> Answer:
    """Time the mechanisms against SDPA."""
    from attnlab.evaluation.bench import BenchConfig, bench, bench_lines

    check_mechanisms(options.mechanism or ())
    config = BenchConfig(
        mechanisms=tuple(options.mechanism or BenchConfig.mechanisms),
        lengths=tuple(options.lengths),
        heads=options.heads,
        width=options.width,
        batch=options.batch,
        causal=not options.bidirectional,
        backward=options.backward,
        repeats=options.repeats,
        device=options.device,
    )
    with showing("timing", at_once=False):
        result = bench(config)
    return Answer(result, bench_lines(result))
