"""One offline page in which people look at attention: arrays in, a self-contained HTML file out; no torch here."""

from attnlab.explorer.timeline import RecordedStep, Timeline, read_timeline

__all__ = ["RecordedStep", "Timeline", "read_timeline"]
