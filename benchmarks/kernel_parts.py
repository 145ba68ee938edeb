"""The command line of benchmarks of kernels: parts that make rows, printed and written as they come."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from storing import make_results, write_results

__all__ = ["Row", "run_parts"]

Row = dict[str, Any]


def run_parts(
    name: str,
    doc: str | None,
    parts: Mapping[str, Callable[..., Iterator[Row]]],
    *,
    full: Sequence[Any],
    tiny: Sequence[Any],
    usual: Sequence[str] | None = None,
    paper: str | None = None,
) -> None:
    """Read the options and run parts with the arguments ``full``, or ``tiny`` on a CPU; by default ``usual`` ones."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--part", action="append", choices=tuple(parts), help=f"by default {', '.join(usual or parts)}")
    parser.add_argument("--tiny", action="store_true", help="errors of small calls, by Triton's interpreter on a CPU")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    chosen = args.part or (["errors"] if args.tiny else list(usual or parts))
    tables: dict[str, list[Row]] = {}
    for part in chosen:
        tables[part] = []
        for row in parts[part](*(tiny if args.tiny else full)):
            tables[part].append(row)
            print(part, ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
            if args.write:
                config = {"dtype": "float32" if args.tiny else "bfloat16"}
                write_results(args.write, make_results(name, paper, tables, config=config))
