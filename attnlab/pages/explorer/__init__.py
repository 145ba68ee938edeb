"""One offline page that shows attention: arrays in, a self-contained HTML file out, without torch."""

from attnlab.pages.explorer.exploration import Exploration
from attnlab.pages.explorer.page import explorer_page
from attnlab.pages.explorer.payload import Item, LayerMaps, Packed, Tokens, pack
from attnlab.pages.explorer.timeline import RecordedStep, Timeline, read_timeline
from attnlab.pages.explorer.timeline_pages import explore_run

__all__ = [
    "Exploration",
    "Item",
    "LayerMaps",
    "Packed",
    "RecordedStep",
    "Timeline",
    "Tokens",
    "explore_run",
    "explorer_page",
    "pack",
    "read_timeline",
]
