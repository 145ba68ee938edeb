"""One offline page in which people look at attention: arrays in, a self-contained HTML file out; no torch here."""

from attnlab.explorer.exploration import Exploration
from attnlab.explorer.page import explorer_page
from attnlab.explorer.payload import Item, LayerMaps, Packed, Tokens, pack
from attnlab.explorer.timeline import RecordedStep, Timeline, read_timeline
from attnlab.explorer.watching import explore_run

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
