"""Run folders and results in; tables, figures and self-contained HTML pages out, without torch."""

from attnlab.pages.charts import Axes, Point, Series, bar_chart, interval_chart, line_chart, scatter_chart
from attnlab.pages.compare import compare_page
from attnlab.pages.demo import demo_page
from attnlab.pages.heatmaps import heat_maps
from attnlab.pages.html import Html, element, page
from attnlab.pages.maps import map_pair, map_viewer
from attnlab.pages.run_pages import run_page
from attnlab.pages.tables import Column, table

__all__ = [
    "Axes",
    "Column",
    "Html",
    "Point",
    "Series",
    "bar_chart",
    "compare_page",
    "demo_page",
    "element",
    "heat_maps",
    "interval_chart",
    "line_chart",
    "map_pair",
    "map_viewer",
    "page",
    "run_page",
    "scatter_chart",
    "table",
]
