"""The inbox: an agent proposes, a person decides, and whoever waits for it is bounded either way.

The names are imported when first used: who only looks at tokens needs no event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.late import names_of

if TYPE_CHECKING:
    from .access import Access as Access
    from .access import Issued as Issued
    from .access import Principal as Principal
    from .access import Role as Role
    from .answers import action_changed as action_changed
    from .answers import outcome_of as outcome_of
    from .answers import refused as refused
    from .answers import run_of as run_of
    from .answers import told_of as told_of
    from .answers import undecided as undecided
    from .approvals import Approvals as Approvals
    from .approvals import Passed as Passed
    from .approvals import RunWait as RunWait
    from .approvals import text_at as text_at
    from .audit import AuditFile as AuditFile
    from .audit import AuditProblem as AuditProblem
    from .budget import response_budget_ms as response_budget_ms
    from .inbox import Inbox as Inbox
    from .inbox import Reminder as Reminder

_MODULES = {
    "Access": "access",
    "Approvals": "approvals",
    "AuditFile": "audit",
    "AuditProblem": "audit",
    "Inbox": "inbox",
    "Issued": "access",
    "Passed": "approvals",
    "Principal": "access",
    "Reminder": "inbox",
    "Role": "access",
    "RunWait": "approvals",
    "action_changed": "answers",
    "outcome_of": "answers",
    "refused": "answers",
    "response_budget_ms": "budget",
    "run_of": "answers",
    "text_at": "approvals",
    "told_of": "answers",
    "undecided": "answers",
}
__all__ = sorted(_MODULES)
__getattr__ = names_of(__name__, _MODULES)
