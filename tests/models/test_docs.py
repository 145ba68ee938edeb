"""The table of named configs in docs/models.md is generated: ``python -m tests.models.test_docs`` writes it anew."""

from __future__ import annotations

import re
from pathlib import Path

from attnlab.models import CONFIGS, count_parameters

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def table() -> str:
    rows = [
        "| name | kind | layers | width | heads | feed-forward | vocabulary | parameters |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, c in CONFIGS.items():
        heads, parameters = f"{c.heads} of {c.head_width}", f"{count_parameters(c) / 1e6:,.1f}M"
        rows.append(
            f"| `{name}` | {c.kind} | {c.layers} | {c.width} | {heads} | {c.hidden_width} | {c.vocab:,} | {parameters} |"
        )
    return "\n".join(rows)


def test_the_table_is_current() -> None:
    assert table() in PAGE.read_text()


if __name__ == "__main__":
    text = re.sub(
        r"<!-- configs -->.*<!-- /configs -->",
        f"<!-- configs -->\n{table()}\n<!-- /configs -->",
        PAGE.read_text(),
        flags=re.DOTALL,
    )
    PAGE.write_text(text)
