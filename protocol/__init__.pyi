from .events import Allocation, CheckIn, FixedSize, Shuffled, Summed
from .mechanisms import GaussianMechanism, LdpSgd, RandomisedResponse
from .outcomes import AgreedNode, RoundRecord, Schedule, StoppedBy
from .plan import Plan, shuffler_of

__all__ = [
    "AgreedNode",
    "Allocation",
    "CheckIn",
    "FixedSize",
    "GaussianMechanism",
    "LdpSgd",
    "Plan",
    "RandomisedResponse",
    "RoundRecord",
    "Schedule",
    "Shuffled",
    "StoppedBy",
    "Summed",
    "shuffler_of",
]
