from . import accounting
from .accounting.privacy_plan import PrivacyPlan
from .accounting.search import calibrate
from .api import STOP, RunResult, grid, load_run, resume, run
from .learning.data.datasets import Dataset
from .learning.tasks import Task
from .protocol.validation import ConfigError

__version__: str

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
