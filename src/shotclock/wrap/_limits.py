"""The limits of a wrapped server: those of each call, by the name of its tool, and those of the server itself."""

from __future__ import annotations

from fnmatch import fnmatchcase

from ..core.limits import Clocks, format_duration, parse_duration_ms
from ..core.value_types import replace, value
from ._messages import LISTEN

# Long enough for a download by npx, a handshake, and most tools.
DEFAULT_TIMEOUT_MS = 600_000
DEFAULT_QUEUE_MS = 30_000
DEFAULT_START_UP_MS = 120_000
DEFAULT_LIST_MS = 60_000
DEFAULT_SHUTDOWN_MS = 5_000
DEFAULT_GRACE_MS = 2_000

_START_UP_METHODS = ("initialize", "server/discover")
_QUICK_METHODS = ("ping", "logging/setLevel", "resources/subscribe", "resources/unsubscribe")


@value
class CallLimits:
    """Limits of one request in milliseconds; 0 is none. Progress resets the idle limit, nothing resets the timeout."""

    timeout_ms: int = DEFAULT_TIMEOUT_MS
    idle_ms: int = 0
    queue_ms: int = DEFAULT_QUEUE_MS

    @property
    def clocks(self) -> Clocks:
        return Clocks(timeout_ms=self.timeout_ms, idle_ms=self.idle_ms, queue_ms=self.queue_ms, grace_ms=0)

    def describe(self) -> str:
        """Return the numbers of both limits for an answer."""
        idle = f"idle limit {format_duration(self.idle_ms)}" if self.idle_ms else "no idle limit"
        timeout = f"timeout {format_duration(self.timeout_ms)}" if self.timeout_ms else "no timeout"
        return f"{timeout}, {idle}"


@value
class ToolLimits:
    """Limits for the tools whose names match a pattern. None: those of the server."""

    pattern: str
    timeout_ms: int | None = None
    idle_ms: int | None = None
    queue_ms: int | None = None


@value
class ServerLimits:
    """All limits of a server, of time in milliseconds; 0 is none."""

    call: CallLimits = CallLimits()
    tools: tuple[ToolLimits, ...] = ()
    start_up_ms: int = DEFAULT_START_UP_MS
    list_ms: int = DEFAULT_LIST_MS
    shutdown_ms: int = DEFAULT_SHUTDOWN_MS
    grace_ms: int = DEFAULT_GRACE_MS
    heartbeat_ms: int = 0
    idle_shutdown_ms: int = 0
    lifetime_ms: int = 0
    result_bytes: int = 0  # of the answer to a call

    def of(self, method: str, tool: str) -> CallLimits:
        """Return the limits of a request. A start-up, a list and a subscription have their own."""
        if method == LISTEN:
            return replace(self.call, timeout_ms=0, idle_ms=0)
        if method in _START_UP_METHODS:
            return CallLimits(self.start_up_ms, 0, self.start_up_ms)
        if _is_quick(method):
            return CallLimits(self.list_ms, 0, self.call.queue_ms)
        found = next((each for each in self.tools if tool and fnmatchcase(tool, each.pattern)), None)
        if found is None:
            return self.call
        given = {"timeout_ms": found.timeout_ms, "idle_ms": found.idle_ms, "queue_ms": found.queue_ms}
        return replace(self.call, **{name: limit for name, limit in given.items() if limit is not None})


def name_of_timeout(method: str) -> str:
    """Return what the timeout of a request is called in an answer."""
    if method in _START_UP_METHODS:
        return "the limit of --start-up"
    return "the limit of --list" if _is_quick(method) else "its timeout"


def _is_quick(method: str) -> bool:
    return method.endswith("/list") or method in _QUICK_METHODS


def read_tool_limits(text: str) -> ToolLimits:
    """Read `PATTERN=timeout:30m,idle:2m`. Raises ValueError."""
    pattern, _, rest = text.partition("=")
    if not pattern or not rest:
        raise ValueError(f"{text!r} should be PATTERN=LIMITS, as in 'build_*=timeout:30m,idle:2m'")
    limits: dict[str, int] = {}
    for each in rest.split(","):
        name, colon, duration = each.partition(":")
        if name not in ("timeout", "idle", "queue") or not colon:
            raise ValueError(f"{each!r} should be timeout:D, idle:D or queue:D")
        if f"{name}_ms" in limits:
            raise ValueError(f"{name} was given before: leave one out")
        limits[f"{name}_ms"] = parse_duration_ms(duration)
    return ToolLimits(pattern, **limits)
