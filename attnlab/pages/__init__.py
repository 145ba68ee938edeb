"""Run folders and results in; tables, figures and self-contained HTML pages out. Nothing here imports torch."""

from attnlab.reports.charts import Point, Series, bar_chart, heat_maps, line_chart, scatter_chart
from attnlab.reports.compare import compare_page
from attnlab.reports.html import Html, element, page
from attnlab.reports.ledger_page import claims_page
from attnlab.reports.maps import map_viewer
from attnlab.reports.results import beside_paper, load_results, merge_results, paper_table
from attnlab.reports.run_pages import run_page
from attnlab.reports.tables import Column, table

__all__ = [
    "Column",
    "Html",
    "Point",
    "Series",
    "bar_chart",
    "beside_paper",
    "claims_page",
    "compare_page",
    "element",
    "heat_maps",
    "line_chart",
    "load_results",
    "map_viewer",
    "merge_results",
    "page",
    "paper_table",
    "run_page",
    "scatter_chart",
    "table",
]
