"""Principals: users and agents that act, with a role."""

from __future__ import annotations

import functools
import os
import pwd
from collections.abc import Mapping
from enum import StrEnum

from ..core.errors import Failure
from ..core.proposal import Proposal, Summary
from ..core.value_types import field, value


class Role(StrEnum):
    AGENT = "agent"
    OPERATOR = "operator"


@functools.cache  # every call of a server asks for it, and each question reads the list of users
def _find_user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a container may run as a user that has no name
        return f"uid-{uid}"


@value
class Principal:
    """User or agent that acts on the inbox, with a role."""

    name: str
    role: Role
    via: str = field(default="", compare=False)
    """The surface, for the audit trail: the command line, HTTP, an MCP client."""
    claims: Mapping[str, object] = field(default_factory=dict, compare=False)
    """Of the issuer's token that they bear, verified."""

    @classmethod
    def local(cls) -> Principal:
        """Return the user of this process as an operator: the store is this user's own."""
        return cls(_find_user_name(os.getuid()), Role.OPERATOR)

    @property
    def owner(self) -> str | None:
        """Return the owner of their jobs and keys. None: the user of the store."""
        return None if self == Principal.local() else self.name

    @property
    def sees_jobs_of(self) -> str | None:
        """Return the owner whose jobs they see: an agent its own. None: all jobs."""
        return self.name if self.role is Role.AGENT else None

    def may_see(self, proposal: Proposal | Summary) -> bool:
        return self.role is Role.OPERATOR or proposal.asked_by == self.name

    def must_be_operator(self, to: str = "decide") -> None:
        """Raise Failure unless they are an operator. Call it before anything is read, so that the refusal reveals
        nothing."""
        if self.role is not Role.OPERATOR:
            raise Failure("NOT_ALLOWED", f"{self.name} is an agent: agents propose, operators {to}")


# No token can be issued for this name.
ANONYMOUS = Principal("(anonymous)", Role.AGENT)
