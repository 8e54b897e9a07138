"""The entries of `notify`: for which events a message is sent, and on which channel.

The user's own file, `~/.config/shotclock/config.toml`, has `[[notify]]` for all runs and proposals, and `page`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from ...core.envelope import join_problems
from ...core.errors import Failure
from ...core.references import REFERENCE, fill_in
from ...core.validation import After, Before, Limits, Part, ValidationError, field
from ...core.value_types import JsonObject
from ...core.visible_text import is_secret_header
from ...supervise.environment import config_file

MOST_ENTRIES = 20  # each is a process while it is sent
CHANNELS = ("command", "webhook", "ntfy", "slack", "smtp")
REFUSED = 3  # the exit code of our sender with a reason; Python itself ends with others
_ADDRESS = re.compile(r"[^@\s<>]+@[^@\s<>]+|[^@\r\n<>]*<[^@\s<>]+@[^@\s<>]+>")
TLS_PORT = 465  # where TLS begins with the connection


def _as_url(written: str) -> str:
    """Check a URL as far as its text is known: a variable may hold all of it. Raises ValueError."""
    if written.startswith("${"):
        return written
    example = "write a URL such as https://example.com/path, or ${NAME} for one in a variable"
    try:
        parts = urlsplit(REFERENCE.sub("1", written))
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or any(letter.isspace() or not letter.isprintable() for letter in written):
        raise ValueError(f"is not the URL of a web server; {example}")
    if "@" in parts.netloc:
        raise ValueError("holds a user name or password; send it in `headers`, as Authorization: ${NAME}")
    return written


def _as_address(written: str) -> str:
    if not _ADDRESS.fullmatch(written):
        raise ValueError("is not a mail address; write me@example.com, or Me <me@example.com>")
    return written


def _no_secrets(headers: dict[str, str]) -> dict[str, str]:
    for name, text in headers.items():
        if is_secret_header(name) and not REFERENCE.search(text):
            raise ValueError(f"the value of {name} is a secret; write it as ${{NAME}}, for a variable")
    return headers


def _only_reference(written: str) -> str:
    if not REFERENCE.fullmatch(written):
        raise ValueError("is not kept in a file; write it as ${NAME}, for a variable")
    return written


def _no_references(words: list[str]) -> list[str]:
    for word in words:
        if found := REFERENCE.search(word):
            name = found[1]
            raise ValueError(
                f"{found[0]} would be visible to others; add `env: {{{name}: ${{{name}}}}}`, and read ${name}"
            )
    return words


def _as_list(written: Any) -> Any:
    return [written] if isinstance(written, str) else written


Url = Annotated[str, After(_as_url)]
Address = Annotated[str, After(_as_address)]
Addresses = Annotated[list[Address], Before(_as_list, str | list[str])]
RunEvent = Literal["failed", "parked", "timed_out", "ended"]
AnyEvent = Literal["failed", "parked", "timed_out", "ended", "proposed"]


class SmtpPart(Part):
    host: str = field(min_length=1)
    port: int = field(default=587, ge=1, le=65535)
    from_: Address = field(keys=("from",))
    to: Addresses = field(min_length=1)
    starttls: bool = True
    user: str | None = None
    password: Annotated[str, After(_only_reference)] | None = None

    def check_together(self) -> None:
        if (self.user is None) != (self.password is None):
            raise ValueError("give both `user` and `password`, or neither")
        if self.password is not None and not self.starttls and self.port != TLS_PORT:
            raise ValueError("`starttls: false` would send the password unencrypted")


class NotifyPart(Part):
    """One message: its events, and one channel."""

    on: list[RunEvent] = field(min_length=1)
    command: Annotated[list[str], After(_no_references), Limits(min_length=1)] | None = None
    webhook: Url | None = None
    ntfy: Url | None = None
    slack: Url | None = None
    smtp: SmtpPart | None = None
    headers: Annotated[dict[str, str], After(_no_secrets)] = field(default={})
    env: dict[str, str] = field(default={})

    def check_together(self) -> None:
        given = [name for name in CHANNELS if getattr(self, name) is not None]
        if len(given) != 1:
            found = f", not {' and '.join(given)}" if given else ""
            raise ValueError(f"give one channel of {', '.join(CHANNELS)}{found}; a second one is an entry of its own")
        if self.headers and given[0] not in ("webhook", "ntfy", "slack"):
            raise ValueError("`headers` are for webhook, ntfy and slack")
        if self.env and given[0] != "command":
            raise ValueError("`env` is for a command")

    @property
    def channel(self) -> str:
        return next(name for name in CHANNELS if getattr(self, name) is not None)

    @property
    def label(self) -> str:
        """Return the channel and where it leads, without the parts of a URL that may be secret."""
        channel, target = self.channel, getattr(self, self.channel)
        if self.command is not None:
            return f"command {self.command[0]}"
        if self.smtp is not None:
            return f"smtp {self.smtp.host}:{self.smtp.port}"
        host = "" if target.startswith("${") else urlsplit(target).netloc
        return f"{channel} {host if host and not REFERENCE.search(host) else '(address in a variable)'}"

    def texts(self) -> dict[str, str]:
        """Return the texts that may name variables, by their path."""
        target = getattr(self, self.channel)
        texts = {f"headers.{name}": text for name, text in self.headers.items()}
        texts |= {f"env.{name}": text for name, text in self.env.items()}
        if isinstance(target, str):
            texts[self.channel] = target
        elif self.smtp is not None and self.smtp.password is not None:
            texts |= {"smtp.user": str(self.smtp.user), "smtp.password": self.smtp.password}
        return texts

    def filled(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return `texts` with the values of their variables. Raises UnsetVariable."""
        return {path: fill_in(text, environment) for path, text in self.texts().items()}


class UserNotifyPart(NotifyPart):
    """An entry of the user's own file, which may be about proposals too."""

    on: list[AnyEvent] = field(min_length=1)  # type: ignore[assignment]


def _few(entries: list[Any]) -> list[Any]:
    if len(entries) > MOST_ENTRIES:
        raise ValueError(f"has {len(entries)} entries; {MOST_ENTRIES} are the most")
    return entries


Entries = Annotated[list[NotifyPart], After(_few)]
UserEntries = Annotated[list[UserNotifyPart], After(_few)]


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

        table: JsonObject = tomllib.loads(text)
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
