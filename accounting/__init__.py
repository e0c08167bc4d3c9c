"""What a run of shuffled rounds spends: plan, events, accountants, ledger and budget guard.

No privacy number is computed anywhere else. Each accountant says in `covers` for which neighbouring
datasets its ε holds; print it beside the number.
"""

from accounting.accountant_base import ShuffleAccountant
from accounting.adjacency import ADJACENCIES, effective_sigma
from accounting.budget import (
    BudgetExceeded,
    EpsilonRow,
    PrivacyBudget,
    epsilon_table,
    rounds_within_budget,
)
from accounting.events import (
    FixedSizeShuffledGaussianDpEvent,
    ShuffledCheckInGaussianDpEvent,
    ShuffledGaussianDpEvent,
)
from accounting.ledger import Ledger, LedgerContent, LedgerEntry, LedgerError
from accounting.local_accountant import LocalAccountant
from accounting.plan import PrivacyPlan
from accounting.rdp_accountants import (
    CheckInRdpAccountant,
    OrderRangeWarning,
    Theorem3Accountant,
)
from accounting.registry import ACCOUNTANTS, make_accountant

__all__ = [
    "ACCOUNTANTS",
    "ADJACENCIES",
    "BudgetExceeded",
    "CheckInRdpAccountant",
    "EpsilonRow",
    "FixedSizeShuffledGaussianDpEvent",
    "Ledger",
    "LedgerContent",
    "LedgerEntry",
    "LedgerError",
    "LocalAccountant",
    "OrderRangeWarning",
    "PrivacyBudget",
    "PrivacyPlan",
    "ShuffleAccountant",
    "ShuffledCheckInGaussianDpEvent",
    "ShuffledGaussianDpEvent",
    "Theorem3Accountant",
    "effective_sigma",
    "epsilon_table",
    "make_accountant",
    "rounds_within_budget",
]
