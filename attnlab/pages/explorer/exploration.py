"""The result of ``explore``: a page to save, and the same view in a notebook."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.pages.explorer.page import explorer_page, script, style
from attnlab.pages.explorer.payload import Packed
from attnlab.provenance import write_atomic

__all__ = ["Exploration"]


@dataclass(frozen=True, eq=False)
class Exploration:
    """Packed maps and statistics; displayed at the end of a notebook's cell."""

    packed: Packed

    def html(self) -> bytes:
        """The page, one self-contained file."""
        return explorer_page(self.packed)

    def save(self, path: Path | str) -> Path:
        """Write the page."""
        return write_atomic(path, self.html())

    def widget(self) -> Any:
        """The view as an anywidget, for JupyterLab, VS Code and Colab."""
        try:
            import anywidget
            import traitlets
        except ImportError:
            raise ValueError("widget() needs anywidget: pip install anywidget; save() needs nothing") from None

        class Explorer(anywidget.AnyWidget):
            _esm = script("widget")
            meta = traitlets.Unicode().tag(sync=True)
            style = traitlets.Unicode().tag(sync=True)
            places = traitlets.Unicode().tag(sync=True)
            blobs = traitlets.Bytes().tag(sync=True)

        places: dict[str, tuple[int, int]] = {}
        start = 0
        for name, blob in self.packed.blobs.items():
            places[name] = (start, len(blob))
            start += len(blob)
        return Explorer(
            meta=json.dumps(self.packed.meta, allow_nan=False),
            style=style(host=True),
            places=json.dumps(places),
            blobs=b"".join(self.packed.blobs.values()),
        )

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        try:
            return self.widget()._repr_mimebundle_(**kwargs)
        except ValueError:
            # Without anywidget the whole page in a frame, which every notebook can show.
            page = html.escape(self.html().decode())
            frame = f'<iframe srcdoc="{page}" style="width:100%;height:900px;border:0"></iframe>'
            return {"text/html": frame, "text/plain": repr(self)}

    def __repr__(self) -> str:
        meta = self.packed.meta
        size = sum(map(len, self.packed.blobs.values()))
        return f"Exploration({meta['title']!r}, {len(meta['items'])} items, {size / 1e6:.1f} MB; .save('page.html'))"
