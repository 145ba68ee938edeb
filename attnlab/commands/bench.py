"""``attnlab bench``: time and peak memory of mechanisms against torch's SDPA on the same call, over lengths."""

from __future__ import annotations

import argparse

from attnlab.commands._shared import check_mechanisms, print_json

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("-m", "--mechanism", action="append", metavar="SPEC", help="a mechanism; repeat for more")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="in tokens (default: 1024 to 8192)"
    )
    parser.add_argument("--heads", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of a head (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="texts at once (default: %(default)s)")
    parser.add_argument("--bidirectional", action="store_true", help="not causal")
    parser.add_argument("--backward", action="store_true", help="forward and backward")
    parser.add_argument("--repeats", type=int, default=3, help="of which the median counts (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="such as cuda (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")


def run(options: argparse.Namespace) -> None:
    """Time the mechanisms and print the ratios."""
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
    result = bench(config)
    if options.json:
        print_json(result)
    else:
        print("\n".join(bench_lines(result)))
