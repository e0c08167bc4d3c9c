from . import accounting
from .accounting.plan import PrivacyPlan
from .accounting.search import calibrate
from .accounting.validation import ConfigError
from .api import STOP, RunResult, grid, load_run, resume, run
from .simulator.data.datasets import Dataset
from .simulator.tasks import Task

__all__ = [
    "STOP",
    "ConfigError",
    "Dataset",
    "PrivacyPlan",
    "RunResult",
    "Task",
    "accounting",
    "calibrate",
    "grid",
    "load_run",
    "resume",
    "run",
]
