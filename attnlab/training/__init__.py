"""One training engine: the loop, run folders, checkpoints, exact resume, many runs. It knows no paper."""

from attnlab.training.callbacks import Callback, Moment
from attnlab.training.checkpoints import average_checkpoints, best_checkpoint, list_checkpoints, load_weights
from attnlab.training.engine import DivergedError, Evaluation
from attnlab.training.feed import Source
from attnlab.training.loop import Interrupted, Outcome, train
from attnlab.training.many import RunReport, map_runs
from attnlab.training.runs import RunError, read_metrics, read_result
from attnlab.training.settings import Recipe, Schedule, Settings, every, log_spaced
from attnlab.training.terms import CrossEntropy, Loss, Term

__all__ = [
    "Callback",
    "CrossEntropy",
    "DivergedError",
    "Evaluation",
    "Interrupted",
    "Loss",
    "Moment",
    "Outcome",
    "Recipe",
    "RunError",
    "RunReport",
    "Schedule",
    "Settings",
    "Source",
    "Term",
    "average_checkpoints",
    "best_checkpoint",
    "every",
    "list_checkpoints",
    "load_weights",
    "log_spaced",
    "map_runs",
    "read_metrics",
    "read_result",
    "train",
]
