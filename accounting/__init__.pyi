from .accountants.base import ShuffleAccountant
from .accountants.blanket import BlanketAccountant
from .accountants.crowd import CrowdAccountant
from .accountants.local import LocalAccountant
from .accountants.pld import PldAccountant
from .accountants.renyi import (
    CheckInRdpAccountant,
    Theorem3Accountant,
)
from .adjacency import ADJACENCIES, effective_sigma
from .budget import (
    NOT_PRICED,
    BudgetExceeded,
    EpsilonRow,
    PrivacyBudget,
    epsilon_table,
    price,
    rounds_within_budget,
)
from .calibration import (
    MOST_ROUNDS,
    CalibrationError,
    calibrate,
    epsilon_of,
    ideal_note,
    largest_rate,
    least_blankets,
    least_error_blankets,
    least_noise,
    mean_update_error,
    most_rounds,
    participation_note,
    unused_note,
)
from .events import CheckIn, FixedSize, Shuffled
from .ledger import Ledger, LedgerContent, LedgerEntry, LedgerError
from .mechanisms import GaussianMechanism, LdpSgd, RandomisedResponse
from .plan import PrivacyPlan
from .registry import (
    ACCOUNTANTS,
    accountants_for,
    check_accountant,
    make_accountant,
)
from .responses import fitted_response

__all__ = [
    "ACCOUNTANTS",
    "ADJACENCIES",
    "MOST_ROUNDS",
    "NOT_PRICED",
    "BlanketAccountant",
    "BudgetExceeded",
    "CalibrationError",
    "CheckIn",
    "CheckInRdpAccountant",
    "CrowdAccountant",
    "EpsilonRow",
    "FixedSize",
    "GaussianMechanism",
    "LdpSgd",
    "Ledger",
    "LedgerContent",
    "LedgerEntry",
    "LedgerError",
    "LocalAccountant",
    "PldAccountant",
    "PrivacyBudget",
    "PrivacyPlan",
    "RandomisedResponse",
    "ShuffleAccountant",
    "Shuffled",
    "Theorem3Accountant",
    "accountants_for",
    "calibrate",
    "check_accountant",
    "effective_sigma",
    "epsilon_of",
    "epsilon_table",
    "fitted_response",
    "ideal_note",
    "largest_rate",
    "least_blankets",
    "least_error_blankets",
    "least_noise",
    "make_accountant",
    "mean_update_error",
    "most_rounds",
    "participation_note",
    "price",
    "rounds_within_budget",
    "unused_note",
]
