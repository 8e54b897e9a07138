"""The inbox: an agent proposes, a person decides, and whoever waits for it is bounded either way."""

from .access import Access, Issued, Principal, Role
from .answers import outcome_of, refused
from .approvals import Approvals, Passed
from .audit import AuditFile, AuditProblem
from .budget import response_budget_ms
from .inbox import Inbox, Reminder

__all__ = [
    "Access",
    "Approvals",
    "AuditFile",
    "AuditProblem",
    "Inbox",
    "Issued",
    "Passed",
    "Principal",
    "Reminder",
    "Role",
    "outcome_of",
    "refused",
    "response_budget_ms",
]
