"""The envelope: the one answer of every call, exactly five keys.

Contract (AGENTS.md): one envelope.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from .errors import Ending, ErrorEntry, Failure, SideEffects, error_entry, may_retry, side_effects_of, warning_summary
from .limits import Fired
from .value_types import entity, value

SCHEMA_VERSION = "1.0"
# Over MCP: the envelope in `_meta` of a result, and the extension of clients that stop and extend calls.
ENVELOPE_KEY = "shotclock.dev/envelope"
CONTROLS_EXTENSION = "shotclock.dev/controls"
# Characters of a message: that of an exception may have any length.
LONGEST_MESSAGE = 4_000
_MOST_FRAMES = 40
_LONGEST_TRACEBACK = 32_000
# Frames between a caller and the function that raised: ours, and the event loop's.
_CALLERS = (f"{__file__.rpartition('/core/')[0]}/", f"{json.__file__.rpartition('/json/')[0]}/asyncio/")
MOST_CHANGES = 10
_HALF = "[\ud800-\udfff]"

Warning_ = dict[str, object]


def join_problems(problems: Sequence[dict[str, str]]) -> str:
    return "; ".join(f"{problem['field']}: {problem['message']}" for problem in problems)


def refusal(problems: Sequence[dict[str, str]]) -> Failure:
    """Return the Failure that names every problem at once."""
    return Failure("ARG_ERROR", join_problems(problems), context={"errors": problems})


@entity
class Envelope:
    """Answer of a call. `value` is the raw result of a handler; it is not part of the JSON."""

    data: dict[str, object] | list[object] | None
    error: dict[str, object] | None
    warnings: list[Warning_]
    meta: dict[str, object]
    value: object = None
    fired: Fired | None = None  # the clock that fired in this process. `error` may name a clock of another process

    @property
    def ok(self) -> bool:
        """Return whether the call succeeded."""
        return self.error is None

    @property
    def code(self) -> str | None:
        """Return the code of the error, or None."""
        return None if self.error is None else str(self.error["code"])

    @property
    def exit_code(self) -> int:
        """Return the exit code of the answer, 0 for success."""
        return int(self.meta["exit_code"])  # type: ignore[call-overload,no-any-return]

    @property
    def ending(self) -> str:
        """Return how the work ended: finished, killed, cancelled, abandoned, not_started or detached."""
        return str(self.meta["ending"])

    def to_dict(self) -> dict[str, object]:
        """Return the five keys of the envelope as a dict."""
        return {"ok": self.ok, "data": self.data, "error": self.error, "warnings": self.warnings, "meta": self.meta}

    def to_json(self) -> str:
        """Return one line of strict JSON, with half characters replaced."""
        text = json.dumps(self.to_dict(), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        if "\\ud" in text and not is_whole(self.to_dict()):  # half of a pair
            changes = list(islice(_find_halves(self.to_dict(), ""), MOST_CHANGES))
            self.data, self.error, self.meta = make_whole([self.data, self.error, self.meta])
            self.warnings = [*make_whole(self.warnings), warning("RESULT_CHANGED", changes=changes)]
            return self.to_json()
        return text

    def __repr__(self) -> str:
        return f"Envelope({self.to_dict()!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return Envelope, (self.data, self.error, self.warnings, self.meta, self.value)


@value
class Problem:
    code: str
    message: str
    phase: str = "execution"
    fired: Fired | None = None
    context: dict[str, object] | None = None
    errors: list[dict[str, str]] | None = None
    suggestion: str | None = None
    retry_after_ms: int | None = None
    exit_code: int | None = None  # of a signal or a child process; None is the registered one
    side_effects: SideEffects | None = None
    entry: ErrorEntry | None = None  # where only another process registered the code
    outside: str | None = None
    """The message for clients of a server, because that of an exception may contain anything. None: the same."""

    @property
    def registered(self) -> ErrorEntry:
        return self.entry or error_entry(self.code)


def warning(code: str, message: str | None = None, **context: object) -> Warning_:
    made: Warning_ = {"code": code, "message": message or warning_summary(code)}
    if context:
        made["context"] = context
    return made


def as_data(value: object) -> dict[str, object] | list[object] | None:
    if value is None or isinstance(value, dict | list):
        return value
    return {"result": value}


# Where the data of a success is in the result of an MCP tool: there alone, and `meta.data_in` names it.
IN_STRUCTURE, IN_RESULT = "structuredContent", "structuredContent.result"


def restore_data(carried: Mapping[str, object], structured: object) -> dict[str, object]:
    """Return an envelope from the `_meta` of an MCP result, with the data that travelled beside it."""
    meta = carried.get("meta")
    place = meta.get("data_in") if isinstance(meta, dict) else None
    if "data" in carried or place not in (IN_STRUCTURE, IN_RESULT) or not isinstance(structured, dict):
        return dict(carried)
    return {**carried, "data": structured if place == IN_STRUCTURE else as_data(structured.get("result"))}


def build_envelope(
    *,
    data: dict[str, object] | list[object] | None,
    problem: Problem | None,
    ending: Ending,
    mutates: bool,
    idempotent: bool,
    meta: dict[str, object],
    warnings: list[Warning_] | None = None,
    value: object = None,
    effects: SideEffects | None = None,
) -> Envelope:
    """Make an envelope, with all derived fields, so that it cannot contradict itself."""
    if effects is None and problem is not None:
        effects = problem.side_effects
    if effects is None:
        effects = side_effects_of(ending=ending, ok=problem is None, mutates=mutates)
    meta = {
        "exit_code": 0,
        **meta,
        "ending": ending.value,
        "side_effects": effects.value,
        "schema_version": SCHEMA_VERSION,
    }
    meta["exit_code"] = 0
    error = None
    if problem is not None:
        entry = problem.registered
        meta["exit_code"] = entry.exit_code if problem.exit_code is None else problem.exit_code
        if meta["exit_code"] == 0:
            raise ValueError(f"{problem.code} cannot exit 0")
        retry = may_retry(registered=entry.retryable, effects=effects, mutates=mutates, idempotent=idempotent)
        error = _error_detail(problem, entry, retry, effects)
    fired = None if problem is None else problem.fired
    return Envelope(data, error, warnings or [], meta, value, fired)


def shorten(text: str, limit: int = LONGEST_MESSAGE) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit} more characters)"


def whole_text(text: str) -> str:
    """Return the text with U+FFFD for each half character, which UTF-8 cannot encode; without one, the same object."""
    if text.isascii() or not re.search(_HALF, text):
        return text
    paired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")  # joins two halves
    return re.sub(_HALF, "\ufffd", paired)


def is_whole(plain: Any) -> bool:
    try:
        json.dumps(plain, ensure_ascii=False).encode()
    except (UnicodeEncodeError, ValueError, RecursionError):
        return False
    return True


def make_whole(plain: Any) -> Any:
    if isinstance(plain, str):
        return whole_text(plain)
    if isinstance(plain, list):
        return [make_whole(item) for item in plain]
    if isinstance(plain, dict):
        return dict(zip(whole_keys(plain), map(make_whole, plain.values()), strict=True))
    return plain


def _find_halves(plain: Any, path: str) -> Iterator[str]:
    if isinstance(plain, str):
        if whole_text(plain) is not plain:
            yield describe_halves(path)
    elif isinstance(plain, list):
        for place, item in enumerate(plain):
            yield from _find_halves(item, f"{path}[{place}]")
    elif isinstance(plain, dict):
        for key, item in plain.items():
            yield from _find_halves(key, f"{path}.{key}")
            yield from _find_halves(item, f"{path}.{key}")


def describe_halves(path: str) -> str:
    return f"{whole_text(path[:200]).lstrip('.') or 'the result'}: half characters became U+FFFD"


def whole_keys(value: dict[Any, Any]) -> list[Any]:
    """Return the keys with U+FFFD for half characters, still distinct."""
    keys: dict[Any, None] = {}
    for key in value:
        whole = whole_text(key) if isinstance(key, str) else key
        while whole != key and (whole in keys or whole in value):
            whole += "\ufffd"
        keys[whole] = None
    return list(keys)


def describe_exception(error: BaseException) -> tuple[str, str, str]:
    """Return the type, the message and the traceback."""
    import traceback  # slow on Python 3.14

    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be shown)"
    raised = error.__traceback__  # from the first frame of the author's code, if it has one
    while raised is not None and raised.tb_frame.f_code.co_filename.startswith(_CALLERS):
        raised = raised.tb_next
    raised = raised or error.__traceback__
    lines = "".join(traceback.format_exception(type(error), error, raised, limit=_MOST_FRAMES))
    return type(error).__name__, shorten(text), shorten(lines, _LONGEST_TRACEBACK)


def _error_detail(problem: Problem, entry: ErrorEntry, retryable: bool, effects: SideEffects) -> dict[str, object]:
    detail: dict[str, object] = {
        "code": problem.code,
        "message": whole_text(shorten(problem.message)),
        "retryable": retryable,
        # With side effects, something ran.
        "phase": problem.phase if effects is SideEffects.NONE or problem.phase != "validation" else "execution",
        "suggestion": problem.suggestion or entry.hint,
    }
    if problem.retry_after_ms is not None:
        detail["retry_after_ms"] = problem.retry_after_ms
    if problem.errors:
        detail["errors"] = problem.errors
    context = dict(problem.context or {})
    if problem.fired is not None:
        context["clock"] = problem.fired.as_context()
    if context:
        detail["context"] = context
    return detail


# Output that could not be written (sysexits.h).
EX_IOERR = 74
# Signals that stop this process: 128 and their number.
STOP_SIGNAL_EXITS = {"SIGHUP": 129, "SIGINT": 130, "SIGQUIT": 131, "SIGTERM": 143}


def stop_problem(signal_name: str) -> Problem:
    code = STOP_SIGNAL_EXITS.get(signal_name, 143)
    return Problem("CANCELLED", f"stopped by {signal_name}", context={"signal": signal_name}, exit_code=code)
