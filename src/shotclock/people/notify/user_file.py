"""The user's own file, `~/.config/shotclock/config.toml`: `[[notify]]` for all runs and proposals, and `page`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from ...core.envelope import join_problems
from ...core.errors import Failure
from ...core.validation import After, Part, ValidationError, field
from ...supervise.environment import config_file
from .entries import Url, UserEntries, UserNotifyPart


class UserFile(Part):
    """What the user's file says about notifications; other keys are read elsewhere."""

    notify: UserEntries = field(default=[])
    page: Annotated[Url, After(lambda url: url.rstrip("/"))] | None = None
    """Where the operators' page is served, for links to a proposal."""

    def entries_for(self, event: str) -> list[UserNotifyPart]:
        return [entry for entry in self.notify if event in entry.on]

    def link_to(self, proposal_id: str) -> str | None:
        """Return the page at a proposal. It holds no key: the browser must be an operator's already, or sign in."""
        return None if self.page is None else f"{self.page}/#/{proposal_id}"


KEYS = tuple(UserFile.model_fields)


def read_user_file(environ: Mapping[str, str]) -> UserFile:
    """Return the entries of the user's file. Raises Failure that lists every mistake."""
    path = config_file(environ)
    if not path:
        return UserFile()
    try:
        text = Path(path).read_text("utf-8")
        import tomllib  # takes as long as a tenth of a start, and most users have no such file

        table: dict[str, Any] = tomllib.loads(text)
    except FileNotFoundError:
        return UserFile()
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Failure("FILE_UNREADABLE", f"{path}: {reason}", suggestion="correct the file") from None
    try:
        return UserFile.model_validate({key: table[key] for key in KEYS if key in table})
    except ValidationError as wrong:
        errors = [
            {"field": ".".join(map(str, each["loc"])), "message": each["msg"].removeprefix("Value error, ")}
            for each in wrong.errors()
        ]
        message = f"{path}: {join_problems(errors)}"
        raise Failure("ARG_ERROR", message, context={"errors": errors}, suggestion="correct the file") from None
