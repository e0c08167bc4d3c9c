"""What a run of shuffled rounds spends: plan, events, accountants, ledger and budget guard.

No privacy number is computed anywhere else. Each accountant says in `covers` for which neighbouring
datasets its ε holds; print it beside the number.
"""

from accounting.accountant_base import ShuffleAccountant
from accounting.adjacency import ADJACENCIES, effective_sigma
from accounting.blanket_accountant import BlanketAccountant
from accounting.budget import (
    NOT_PRICED,
    BudgetExceeded,
    EpsilonRow,
    PrivacyBudget,
    epsilon_table,
    price,
    rounds_within_budget,
)
from accounting.calibration import (
    CalibrationError,
    epsilon_of,
    largest_rate,
    least_blankets,
    least_error_blankets,
    least_noise,
    mean_update_error,
    most_rounds,
    participation_note,
)
from accounting.crowd_accountant import CrowdAccountant
from accounting.events import (
    FixedSizeShuffledGaussianDpEvent,
    ShuffledCheckInGaussianDpEvent,
    ShuffledGaussianDpEvent,
)
from accounting.ledger import Ledger, LedgerContent, LedgerEntry, LedgerError
from accounting.local_accountant import LocalAccountant
from accounting.plan import PrivacyPlan
from accounting.pld_accountant import PldAccountant
from accounting.rdp_accountants import (
    CheckInRdpAccountant,
    OrderRangeWarning,
    Theorem3Accountant,
)
from accounting.registry import (
    ACCOUNTANTS,
    accountants_for,
    check_accountant,
    make_accountant,
)

__all__ = [
    "ACCOUNTANTS",
    "ADJACENCIES",
    "NOT_PRICED",
    "BlanketAccountant",
    "BudgetExceeded",
    "CalibrationError",
    "CheckInRdpAccountant",
    "CrowdAccountant",
    "EpsilonRow",
    "FixedSizeShuffledGaussianDpEvent",
    "Ledger",
    "LedgerContent",
    "LedgerEntry",
    "LedgerError",
    "LocalAccountant",
    "OrderRangeWarning",
    "PldAccountant",
    "PrivacyBudget",
    "PrivacyPlan",
    "ShuffleAccountant",
    "ShuffledCheckInGaussianDpEvent",
    "ShuffledGaussianDpEvent",
    "Theorem3Accountant",
    "accountants_for",
    "check_accountant",
    "effective_sigma",
    "epsilon_of",
    "epsilon_table",
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
]
