"""Results files of the benchmarks, by the row store of the papers.

``python benchmarks/NAME.py`` has this folder on its path, not the repository: importing this module adds that.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from papers.common.row_store import choose_rows, make_results, merge_results, read_results, write_results

__all__ = ["choose_rows", "make_results", "merge_results", "read_results", "write_results"]
