"""What a surface asks for: one call of a command, with all that came along with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.records import record

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from ..core.clocks import Clocks
    from ..core.deadlines import Deadline
    from ..dispatch.invocation import Stdin
    from ..inbox.access import Principal
    from ..inbox.approval import RunWait
    from ..process.context import Progress
    from .call import Outcome


@record
class CallRequest:
    """A command by its name, its arguments, and how this one call of it is made."""

    name: str
    arguments: Mapping[str, object]
    clocks: Clocks | None = None
    """What the caller says instead of the command's own."""
    principal: Principal | None = None
    """Who asks, and owns what the call starts. None: whoever runs this process."""
    idempotency_key: str | None = None
    parent: Deadline | None = None
    """The caller's own deadline, if it came with the call."""
    began_ns: int = 0
    """When the caller began to wait, if that was before the call was made."""
    budget_ms: int | None = None
    """How long the caller waits for a command that may outlive it, or for a person. None: as long as the work takes."""
    confirmed: bool = False
    """It may destroy what it destroys. Not said here or as the argument `confirm_destructive`, it is only shown."""
    dry_run: bool = False
    validate_only: bool = False
    resume_from: str | None = None
    on_progress: Progress | None = None
    stop: asyncio.Future[str] | None = None
    """Once it holds the name of a signal the work is stopped, and what came of it until then is the answer."""
    stdin: Stdin | None = None
    justification: str = ""
    """Why a person should approve it."""
    repeat_hint: str | None = None
    """How this caller makes the same call once more."""
    run_wait: RunWait | None = None
    """How a step of a run waits for a person."""
    refusal: Outcome | None = None
    """Why the surface itself cannot let it pass. It is the answer, and nothing runs."""

    @property
    def owner(self) -> str | None:
        """Whose its jobs and keys are. None: the user's whose store it is."""
        return None if self.principal is None else self.principal.owner
