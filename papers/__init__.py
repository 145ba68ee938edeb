"""The reproductions of five papers, beside the library and not installed with it: ``python -m papers`` lists them.

A paper is a folder with its settings (config.py), its experiments (run.py), its tables (tables.py), its claims
(claims.py) and the paper's own numbers (paper_tables.json). Folders are discovered by name. Those of further papers may
lie elsewhere: the variable ATTNLAB_PAPERS names the folders that hold them.
"""

import os

__path__ += [folder for folder in os.environ.get("ATTNLAB_PAPERS", "").split(os.pathsep) if folder]
