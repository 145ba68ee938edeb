"""``python -m papers abc-family``: the table of control strategies, read from the mechanisms themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnlab.attention import AttentionCall
from attnlab.progress import each
from attnlab.registry import all_mechanisms, mechanism, mechanism_names
from papers.common.row_store import make_results, write_results

__all__ = ["NAME", "family_rows", "write_family"]

NAME = "abc-family"


def family_rows() -> list[dict[str, Any]]:
    """For each member: its control, what it learns, whether it may be causal, and how large its past is."""
    return [_row(name) for name in each([name for name in mechanism_names() if name.startswith("abc-")])]


def write_family(out: Path) -> None:
    """The table as a results file; it depends on the code alone."""
    write_results(out, make_results(NAME, "ABC", {"family": family_rows()}, config={}, seed=None))


def _row(name: str) -> dict[str, Any]:
    spec = next(spec for spec in all_mechanisms() if spec.partition(":")[0] == name)
    mech = mechanism(spec)
    # The first sentence of a member's docstring is its control in the paper's symbols.
    first_sentence = " ".join((type(mech).__doc__ or "").split("\n\n")[0].split())
    where = re.search(r" \((?:[^()]*; )?ABC, ([^()]*)\)", first_sentence)
    control = first_sentence[: where.start()] if where else first_sentence
    refused = mech.cannot()
    return {
        "member": f"`{name}`",
        "control": control.replace("``", "`").rstrip(".,:"),
        "paper": where[1] if where else None,
        "depends_on": _depends_on(mech, refused),
        "learned": _learned(mech),
        "causal": "no: " + refused["causal"] if "causal" in refused else "yes",
    }


def _depends_on(mech: Any, refused: dict[str, str]) -> str:
    """Content, if the control needs the inputs of the keys or changes with the keys; else position."""
    if "no-x" in refused:
        return "content"
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 9, 4).unbind()
    calls = [AttentionCall(q, keys, v) for keys in (k, torch.randn_like(k))]
    if hasattr(mech, "log_alpha"):
        logs = [mech.log_alpha(call) for call in calls]
    elif hasattr(mech, "control"):
        logs = [mech.control(call, torch.arange(9)[None]).log for call in calls]
    else:
        return "position"
    return "position" if torch.equal(*logs) else "content"


def _learned(mech: Any) -> str:
    if not isinstance(mech, nn.Module):
        return "nothing"
    return "tied across layers" if mech.tied_across_layers else "in each layer"
