from . import accounting
from .accounting.plan import PrivacyPlan
from .accounting.search import calibrate
from .accounting.validation import ConfigError
from .api import STOP, RunResult, grid, load_run, resume, run
from .simulator.data.datasets import Dataset

__all__ = [
    "STOP",
    "ConfigError",
    "Dataset",
    "PrivacyPlan",
    "RunResult",
    "accounting",
    "calibrate",
    "grid",
    "load_run",
    "resume",
    "run",
]
