"""``attnlab audit``: what every head of a model does on a text, and what has changed since an earlier audit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from attnlab.commands._output import Answer
from attnlab.commands._shared import device_argument, loaded_with_text, model_argument, text_argument, trust_argument
from attnlab.progress import Progress

__all__ = ["arguments", "run"]

JSON, PAGE = "audit.json", "audit.html"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    model_argument(parser)
    text_argument(parser)
    parser.add_argument(
        "--baseline", type=Path, metavar="FILE", help="an audit.json of before; a change from it is exit code 1"
    )
    parser.add_argument("-o", "--out", type=Path, metavar="FOLDER", help=f"write {JSON} and {PAGE} to this folder")
    parser.add_argument(
        "--windows", type=int, metavar="N", default=8, help="how many windows are read (default: %(default)s)"
    )
    parser.add_argument(
        "--length", type=int, metavar="N", help="tokens in a window (default: 256, or what the model can take)"
    )
    device_argument(parser)
    trust_argument(parser)


def run(options: argparse.Namespace) -> Answer:
    """Audit, and write what was seen; the exit code is 1 if something has changed since the baseline."""
    progress = Progress("auditing", plain=True)
    progress.stage("reading the model and the text")
    from attnlab.evaluation.audit import audit, check_windows
    from attnlab.evaluation.audit_changes import read_baseline
    from attnlab.evaluation.audit_lines import audit_lines

    check_windows(options.windows)
    baseline = None if options.baseline is None else read_baseline(options.baseline)
    _check_folder(options.out, options.baseline)
    loaded, text, names = loaded_with_text(options)
    result = audit(
        loaded,
        text,
        baseline=baseline,
        windows=options.windows,
        length=options.length,
        progress=progress,
        **names,
    )
    written = [] if options.out is None else _write(options.out, result)
    return Answer(result, audit_lines(result), written, code=int(bool(result["changes"])))


def _check_folder(out: Path | None, baseline: Path | None) -> None:
    """Raise now if the folder cannot be written, or holds the baseline, which a changed model would replace."""
    from attnlab.provenance import check_writable

    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder for {JSON} and {PAGE}")
    for path in [out / JSON, out / PAGE] if out.exists() else [out]:
        check_writable(path)
    if baseline is not None and (out / JSON).resolve() == baseline.resolve():
        raise ValueError(f"the audit would replace its own baseline, {baseline}; choose another folder for --out")


def _write(out: Path, result: dict[str, Any]) -> list[Path]:
    from attnlab.pages.audit import audit_page
    from attnlab.provenance import write_atomic, write_json

    page = audit_page(result)
    out.mkdir(exist_ok=True)
    return [write_atomic(out / PAGE, page), write_json(out / JSON, result)]
