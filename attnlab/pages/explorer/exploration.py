"""The result of ``explore``: a page to save, and the same view in a notebook."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.pages.explorer.page import explorer_page, script, style
from attnlab.pages.explorer.payload import Packed
from attnlab.pages.html import element
from attnlab.provenance import write_atomic

__all__ = ["Exploration"]

# A Jupyter server drops an output of more than 1 MB a second, reckoned over 3 seconds.
LARGEST_FRAME = 2_500_000
HEIGHT = 900


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
            raise ValueError(
                "widget() needs anywidget: pip install anywidget; save() and the frame need nothing"
            ) from None

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
        frame = self._frame()
        if len(frame) > LARGEST_FRAME and importlib.util.find_spec("anywidget") is not None:
            return self.widget()._repr_mimebundle_(**kwargs)
        return {"text/html": frame, "text/plain": repr(self)}

    def _frame(self) -> str:
        """The whole page in a frame, which every notebook shows and keeps, and which cannot reach the notebook."""
        return element(
            "iframe",
            srcdoc=self.html().decode(),
            title=f"Attention of {self.packed.meta['title']}",
            sandbox="allow-scripts allow-downloads",
            style=f"width:100%;height:{HEIGHT}px;border:0",
        )

    def __repr__(self) -> str:
        meta = self.packed.meta
        size = sum(map(len, self.packed.blobs.values()))
        return f"Exploration({meta['title']!r}, {len(meta['items'])} items, {size / 1e6:.1f} MB; .save('page.html'))"
