from .events import Allocation, CheckIn, FixedSize, Shuffled, Summed
from .mechanisms import GaussianMechanism, LdpSgd, RandomisedResponse
from .outcomes import AgreedNode, RoundOutcome, RoundRecord, StoppedBy
from .plan import Plan, shuffler_of
from .plan_fields import Schedule

__all__ = [
    "AgreedNode",
    "Allocation",
    "CheckIn",
    "FixedSize",
    "GaussianMechanism",
    "LdpSgd",
    "Plan",
    "RandomisedResponse",
    "RoundOutcome",
    "RoundRecord",
    "Schedule",
    "Shuffled",
    "StoppedBy",
    "Summed",
    "shuffler_of",
]
