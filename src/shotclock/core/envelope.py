"""The envelope: the one answer of every call, valid against the response contract, exactly five keys.

docs/design.md: R2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from .clocks import Fired
from .errors import Ending, ErrorEntry, SideEffects, error_entry, may_retry, side_effects_of, warning_summary
from .value_types import value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    T = TypeVar("T")

SCHEMA_VERSION = "1.0"
# What an exception says may be of any length, and whoever reads the answer has to read it.
LONGEST_MESSAGE = 4_000
_MOST_FRAMES = 40
# Where the message of an exception is a whole file, its traceback is as long.
_LONGEST_TRACEBACK = 32_000
# Of what was changed in a result: enough to find the place.
MOST_CHANGES = 10
_HALF = "[\ud800-\udfff]"

Warning_ = dict[str, object]


def join_problems(problems: Sequence[dict[str, str]]) -> str:
    """Return all that is wrong with what was given, `field: message` each, as one message."""
    return "; ".join(f"{problem['field']}: {problem['message']}" for problem in problems)


class Envelope:
    """Answer of a call. `value` is what a handler returned, as it was; it is not part of the JSON.

    `error` and `meta` may be rendered when they are first looked at: where ten thousand deadlines pass at the same
    moment, the answers must go out first.
    """

    __slots__ = ("_error", "_facts", "_fired", "_meta", "_render", "_warnings", "data", "ok", "value")
    _render: Callable[[Any], Envelope]
    _warnings: Sequence[Warning_]

    def __init__(
        self,
        data: dict[str, object] | list[object] | None,
        error: dict[str, object] | None,
        warnings: list[Warning_],
        meta: dict[str, object],
        value: object = None,
        fired: Fired | None = None,
    ) -> None:
        self.data = data
        self.value = value
        self.ok = error is None
        self._error = error
        self._warnings = warnings
        self._meta = meta
        self._facts: object = None
        self._fired = fired

    @classmethod
    def rendered_later(
        cls,
        data: dict[str, object] | list[object] | None,
        warnings: tuple[Warning_, ...],
        value: object,
        ok: bool,
        render: Callable[[T], Envelope],
        facts: T,
    ) -> Envelope:
        """Make an envelope of which `render(facts)` gives error and meta when they are first looked at."""
        envelope = cls.__new__(cls)
        envelope.data, envelope._warnings, envelope.value, envelope.ok = data, warnings, value, ok
        envelope._render, envelope._facts = render, facts
        return envelope

    def _render_now(self) -> None:
        facts = self._facts  # taken once: two threads may look at the same moment
        if facts is not None:
            whole = self._render(facts)
            self._error, self._meta, self._fired, self._facts = whole._error, whole._meta, whole._fired, None

    @property
    def warnings(self) -> list[Warning_]:
        if not isinstance(self._warnings, list):  # most have none, and nobody looks
            self._warnings = list(self._warnings)
        return self._warnings

    @warnings.setter
    def warnings(self, warnings: list[Warning_]) -> None:
        self._warnings = warnings

    @property
    def error(self) -> dict[str, object] | None:
        self._render_now()
        return self._error

    @property
    def meta(self) -> dict[str, object]:
        self._render_now()
        return self._meta

    @property
    def fired(self) -> Fired | None:
        """Return the clock that this process saw ring. What `error` says of one may be somebody else's words."""
        self._render_now()
        return self._fired

    @property
    def code(self) -> str | None:
        return None if self.error is None else str(self.error["code"])

    @property
    def exit_code(self) -> int:
        return int(self.meta["exit_code"])  # type: ignore[call-overload,no-any-return]

    @property
    def ending(self) -> str:
        return str(self.meta["ending"])

    def to_dict(self) -> dict[str, object]:
        """Return the five keys of the answer."""
        return {
            "ok": self.ok,
            "data": self.data,
            "error": self.error,
            "warnings": self.warnings,
            "meta": self.meta,
        }

    def to_json(self) -> str:
        """Return one line that every reader of JSON takes: whatever was put into it, half characters are no text, and
        are replaced."""
        text = json.dumps(self.to_dict(), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        if "\\ud" in text and not is_whole(self.to_dict()):  # half of a pair, and not one of two halves
            changes = list(islice(_find_halves(self.to_dict(), ""), MOST_CHANGES))
            self.data, self._error, self._meta = make_whole([self.data, self.error, self.meta])
            self.warnings = [*make_whole(self.warnings), warning("RESULT_CHANGED", changes=changes)]
            return self.to_json()
        return text

    def __repr__(self) -> str:
        return f"Envelope({self.to_dict()!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return Envelope, (self.data, self.error, self.warnings, self.meta, self.value)


@value
class Problem:
    """Reason why a call did not succeed, before it is an envelope."""

    code: str
    message: str
    phase: str = "execution"
    fired: Fired | None = None
    context: dict[str, object] | None = None
    errors: list[dict[str, str]] | None = None
    suggestion: str | None = None
    retry_after_ms: int | None = None
    exit_code: int | None = None
    """Only where the code's registered exit code is not the one: a signal's number, a passed-through child's."""
    side_effects: SideEffects | None = None
    entry: ErrorEntry | None = None
    """Only where the code is registered in another process: an app's own."""
    outside: str | None = None
    """What callers elsewhere are told of an exception in place of the message, which may hold anything. None: the
    message was written for every caller."""

    @property
    def registered(self) -> ErrorEntry:
        """Return the entry of its code. Raises LookupError where nobody registered it."""
        return self.entry or error_entry(self.code)


def warning(code: str, message: str | None = None, **context: object) -> Warning_:
    """Return a warning of a registered code."""
    made: Warning_ = {"code": code, "message": message or warning_summary(code)}
    if context:
        made["context"] = context
    return made


def as_data(value: object) -> dict[str, object] | list[object] | None:
    """Return data as the contract allows it, an object, an array or null: a bare value is named."""
    if value is None or isinstance(value, dict | list):
        return value
    return {"result": value}


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
    """Derive everything that can be derived, so that no caller can make an envelope that contradicts itself."""
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
    """Cut a text to its beginning, and say how much is left out."""
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit} more characters)"


def whole_text(text: str) -> str:
    """Return the text with the sign for what cannot be read in the place of each half character, which no UTF-8 can
    carry. The same object where there is none."""
    if text.isascii() or not re.search(_HALF, text):
        return text
    paired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")  # two halves may be one
    return re.sub(_HALF, "\ufffd", paired)


def is_whole(plain: Any) -> bool:
    """Return whether plain data has no half characters, which no UTF-8 can carry."""
    try:
        json.dumps(plain, ensure_ascii=False).encode()
    except (UnicodeEncodeError, ValueError, RecursionError):
        return False
    return True


def make_whole(plain: Any) -> Any:
    """Return plain data with the sign for what cannot be read in the place of each half character."""
    if isinstance(plain, str):
        return whole_text(plain)
    if isinstance(plain, list):
        return [make_whole(item) for item in plain]
    if isinstance(plain, dict):
        return dict(zip(whole_keys(plain), map(make_whole, plain.values()), strict=True))
    return plain


def _find_halves(plain: Any, path: str) -> Iterator[str]:
    """Yield where plain data has half characters, in words."""
    if isinstance(plain, str):
        if whole_text(plain) is not plain:
            yield note_halves(path)
    elif isinstance(plain, list):
        for place, item in enumerate(plain):
            yield from _find_halves(item, f"{path}[{place}]")
    elif isinstance(plain, dict):
        for key, item in plain.items():
            yield from _find_halves(key, f"{path}.{key}")
            yield from _find_halves(item, f"{path}.{key}")


def note_halves(path: str) -> str:
    return f"{whole_text(path[:200]).lstrip('.') or 'the result'}: half characters became U+FFFD"


def whole_keys(value: dict[Any, Any]) -> list[Any]:
    """Return the names made whole: two that differ only in what cannot be read are still two."""
    keys: dict[Any, None] = {}
    for key in value:
        whole = whole_text(key) if isinstance(key, str) else key
        while whole != key and (whole in keys or whole in value):
            whole += "\ufffd"
        keys[whole] = None
    return list(keys)


def describe_exception(error: BaseException) -> tuple[str, str, str]:
    """Return type, message and traceback of an exception, each short enough to be sent and shown."""
    import traceback

    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be shown)"
    lines = "".join(traceback.format_exception(error, limit=_MOST_FRAMES))
    return type(error).__name__, shorten(text), shorten(lines, _LONGEST_TRACEBACK)


def _error_detail(problem: Problem, entry: ErrorEntry, retryable: bool, effects: SideEffects) -> dict[str, object]:
    detail: dict[str, object] = {
        "code": problem.code,
        "message": whole_text(shorten(problem.message)),
        "retryable": retryable,
        # Whatever it is said to be: with effects, something ran.
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


# What could not be written (sysexits.h): an answer, or output that was to be passed on.
EX_IOERR = 74
# The signals that stop us, with 128 and their number.
STOP_SIGNAL_EXITS = {"SIGHUP": 129, "SIGINT": 130, "SIGQUIT": 131, "SIGTERM": 143}


def stop_problem(signal_name: str) -> Problem:
    """Return the problem that somebody stopped us, with the exit code that says so."""
    exit_code = STOP_SIGNAL_EXITS.get(signal_name, 143)
    return Problem("CANCELLED", f"stopped by {signal_name}", context={"signal": signal_name}, exit_code=exit_code)
