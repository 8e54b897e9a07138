"""The arithmetic of overtime: at the soft limit of a call an observer decides whether it may take longer.

The timeout stays the ceiling unless the policy sets `hard_extends`. The time an observer needs is charged to the budget
like the time it grants, so a call never takes longer than its soft limit and the budget together.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from .limits import DurationError, format_duration, parse_duration_ms, reserve_ms_for
from .value_types import JsonObject, as_dict, field, record, replace, value

DEFAULT_REQUESTS = 3
MOST_REQUESTS = 1000
# An observer is a program or a model that reads a summary. Only one that hangs exhausts this.
DEFAULT_OBSERVER_MS = 10_000
# The share of the timeout after which the observer decides if there is no soft limit: a grant then has room below it.
SOFT_SHARE = (3, 4)


class ObserverKind(StrEnum):
    PROGRESS = "progress"  # grants time while progress or output grows
    COMMAND = "command"
    MODEL = "model"
    PERSON = "person"
    NONE = "none"  # grants nothing; only the call itself or an operator asks for overtime


_DURATIONS = ("budget", "max_per_request", "observer_timeout")
_KEYS = ("observer", *_DURATIONS, "max_requests", "hard_extends", "command", "model", "deciders")


class OvertimeError(ValueError):
    """An invalid policy. The message names the key."""


@value
class OvertimePolicy:
    """The most overtime a call may have, and the observer that decides about it."""

    observer: ObserverKind
    budget_ms: int  # the total, including the time the observer needs
    max_requests: int = DEFAULT_REQUESTS
    max_per_request_ms: int = 0  # 0 means the whole budget
    observer_timeout_ms: int = DEFAULT_OBSERVER_MS
    hard_extends: bool = False  # whether each grant also moves the timeout, never past the parent's deadline
    target: str | None = None
    model: Mapping[str, Any] | None = None  # the `ai` block of the observer; None is the step's own
    deciders: tuple[str, ...] = ()
    folder: str | None = None  # of the observer's command; None is the current one

    @classmethod
    def of(cls, written: object, timeout_ms: int, *, bare: str | None = None) -> OvertimePolicy | None:
        """Read a policy: true, an observer, a budget or an object. None if switched off. Raises OvertimeError."""
        if written is None or written is False:
            return None
        keys = _as_keys(written, bare)
        if "function" in keys or keys.get("observer") == "function":
            raise OvertimeError(
                "a function cannot decide about overtime: write command, with a program that reads the summary on stdin"
            )
        if unknown := [str(key) for key in keys if key not in _KEYS]:
            raise OvertimeError(f"{', '.join(unknown)}: not a key of overtime; the keys are {', '.join(_KEYS)}")
        observer = _read_observer(keys)
        limits = {key: _read_duration(key, keys[key], bare) for key in _DURATIONS if keys.get(key) is not None}
        budget_ms = limits.get("budget", timeout_ms)
        if not budget_ms:
            raise OvertimeError("budget: write the total overtime, because there is no timeout")
        requests = keys.get("max_requests", DEFAULT_REQUESTS)
        if isinstance(requests, bool) or not isinstance(requests, int) or not 0 <= requests <= MOST_REQUESTS:
            raise OvertimeError(f"max_requests: a whole number from 0 to {MOST_REQUESTS}, not {requests!r:.40}")
        if not isinstance(keys.get("hard_extends", False), bool):
            raise OvertimeError(f"hard_extends: true or false, not {keys['hard_extends']!r:.40}")
        command = keys.get("command")
        if observer is ObserverKind.COMMAND and (not isinstance(command, str) or not command.strip()):
            raise OvertimeError("command: write the shell command that decides")
        model, deciders = keys.get("model"), keys.get("deciders", ())
        model = {"model": model} if isinstance(model, str) else model
        if model is not None and not isinstance(model, dict):
            raise OvertimeError(f"model: a name, or an object like the `ai` block of a step, not {model!r:.40}")
        named = [deciders] if isinstance(deciders, str) else deciders
        if not isinstance(named, list | tuple) or not all(isinstance(each, str) and each.strip() for each in named):
            raise OvertimeError("deciders: a name, or a list of names")
        return cls(
            observer,
            budget_ms,
            requests,
            limits.get("max_per_request", 0),
            limits.get("observer_timeout", budget_ms if observer is ObserverKind.PERSON else DEFAULT_OBSERVER_MS),
            bool(keys.get("hard_extends", False)),
            command if observer is ObserverKind.COMMAND else None,
            model,
            tuple(named),
        )

    @property
    def share_ms(self) -> int:
        """Return the grant where an observer names none: the most allowed, or an equal share of the budget."""
        return self.max_per_request_ms or -(-self.budget_ms // max(1, self.max_requests))

    @property
    def has_observer(self) -> bool:
        return self.observer is not ObserverKind.NONE

    def soft_ms(self, timeout_ms: int) -> int | None:
        """Return the default soft limit. None where there is no timeout or no observer."""
        return max(1, timeout_ms * SOFT_SHARE[0] // SOFT_SHARE[1]) if timeout_ms and self.has_observer else None

    def describe(self) -> str:
        each = f", {format_duration(self.max_per_request_ms)} at a time" if self.max_per_request_ms else ""
        return f"up to {format_duration(self.budget_ms)}{each}, {self.max_requests} times; observer: {self.observer}"


def kept_for_wind_down_ms(limit_ms: int, soft_ms: int, wind_down_ms: int) -> int:
    """Return the time before the timeout that no grant may reach, so that the work can still wind down."""
    return min(wind_down_ms, max(0, limit_ms - soft_ms) // 2) if limit_ms else 0


class Verdict(StrEnum):
    GRANTED = "granted"
    DECLINED = "declined"
    FAILED = "failed"  # the observer hung, failed or gave an invalid answer
    UNANSWERED = "unanswered"  # the work ended before the observer answered
    EXHAUSTED = "exhausted"  # nothing was left to grant


@value
class OvertimeDecision:
    """The answer of an observer. `extend_ms` 0 declines."""

    extend_ms: int = 0
    reason: str = ""
    failed: bool = False


@value
class OvertimeRequest:
    at_ms: int  # since the call began
    asked_by: str  # `soft clock`, `call`, or the operator's name
    observer: str
    verdict: Verdict
    asked_ms: int = 0
    granted_ms: int = 0
    took_ms: int = 0
    reason: str = ""
    is_gift: bool = False  # given by an operator: it counts neither as a request nor against the budget

    @classmethod
    def by_person(cls, name: str, at_ms: int, asked_ms: int, granted_ms: int) -> OvertimeRequest:
        return cls(at_ms, name, ObserverKind.PERSON.value, Verdict.GRANTED, asked_ms, granted_ms, is_gift=True)

    def as_meta(self) -> dict[str, object]:
        meta = as_dict(self)
        del meta["is_gift"]
        return {**meta, "verdict": self.verdict.value}


@record
class Overtime:
    """The overtime of one call. It never exceeds its policy."""

    policy: OvertimePolicy
    used_ms: int = 0  # the grants, and the time observers needed
    requests: list[OvertimeRequest] = field(default_factory=list)

    @classmethod
    def of_person(cls) -> Overtime:
        return cls(OvertimePolicy(ObserverKind.NONE, 0, 0))

    @property
    def granted_ms(self) -> int:
        return sum(request.granted_ms for request in self.requests)

    @property
    def requests_left(self) -> int:
        used = sum(request.verdict is not Verdict.EXHAUSTED for request in self.requests if not request.is_gift)
        return max(0, self.policy.max_requests - used)

    def room_ms(self, ceiling_ms: int | None, took_ms: int = 0) -> int:
        """Return the largest grant, with `ceiling_ms` left (None: no ceiling) after `took_ms` of the observer."""
        if not self.requests_left:
            return 0
        room = max(0, self.policy.budget_ms - self.used_ms - took_ms)
        if self.policy.max_per_request_ms:
            room = min(room, self.policy.max_per_request_ms)
        return room if ceiling_ms is None else max(0, min(room, ceiling_ms))

    def patience_ms(self, ceiling_ms: int | None) -> int:
        """Return how long an observer may take: its grant, and less than the budget, because stopping it takes time."""
        left_ms = self.policy.budget_ms - self.used_ms
        limit_ms = min(self.policy.observer_timeout_ms, left_ms - reserve_ms_for(left_ms))
        return max(1, limit_ms if ceiling_ms is None else min(limit_ms, ceiling_ms))

    def settle(
        self,
        decision: OvertimeDecision,
        *,
        at_ms: int,
        took_ms: int,
        ceiling_ms: int | None,
        asked_by: str = "soft clock",
        is_asked: bool = True,
    ) -> OvertimeRequest:
        """Grant as much as policy and ceiling allow. Record the request and return it."""
        granted_ms = 0 if decision.failed else min(max(0, decision.extend_ms), self.room_ms(ceiling_ms, took_ms))
        verdict = Verdict.GRANTED if granted_ms else Verdict.DECLINED
        reason = decision.reason
        if decision.failed:
            verdict = Verdict.FAILED
        elif not granted_ms and decision.extend_ms > 0:
            verdict, reason = Verdict.EXHAUSTED, reason or self._explain_no_room(ceiling_ms, took_ms)
        observer = self.policy.observer.value if is_asked else ObserverKind.NONE.value
        asked_ms = max(0, decision.extend_ms)
        request = OvertimeRequest(at_ms, asked_by, observer, verdict, asked_ms, granted_ms, took_ms, reason)
        self.used_ms = min(self.policy.budget_ms, self.used_ms + took_ms + granted_ms)
        self.requests.append(request)
        return request

    def reduce_last(self, granted_ms: int, reason: str) -> OvertimeRequest:
        """Reduce the last grant to what the work allows."""
        last = self.requests[-1]
        self.used_ms -= last.granted_ms - granted_ms
        verdict = Verdict.GRANTED if granted_ms else Verdict.EXHAUSTED
        self.requests[-1] = replace(last, granted_ms=granted_ms, verdict=verdict, reason=reason)
        return self.requests[-1]

    def record_unanswered(self, at_ms: int, asked_by: str, took_ms: int) -> OvertimeRequest:
        self.used_ms = min(self.policy.budget_ms, self.used_ms + took_ms)
        observer = self.policy.observer.value
        self.requests.append(OvertimeRequest(at_ms, asked_by, observer, Verdict.UNANSWERED, took_ms=took_ms))
        return self.requests[-1]

    def _explain_no_room(self, ceiling_ms: int | None, took_ms: int) -> str:
        if not self.policy.max_requests:
            return "no requests are allowed (max_requests)"
        if not self.requests_left:
            return f"all {self.policy.max_requests} requests are used up"
        if self.used_ms + took_ms >= self.policy.budget_ms:
            return f"the budget of {format_duration(self.policy.budget_ms)} is used up"
        return "the timeout leaves no room for more" if ceiling_ms is not None else "nothing was granted"

    def as_meta(self) -> dict[str, object]:
        return {
            "observer": self.policy.observer.value,
            "budget_ms": self.policy.budget_ms,
            "used_ms": self.used_ms,
            "granted_ms": self.granted_ms,
            "requests": [request.as_meta() for request in self.requests],
        }


def read_decision(answered: object) -> OvertimeDecision:
    """Read {"extend": "30s"} (or extend_ms) or {"decline": true}, with a reason. An invalid answer grants nothing."""
    if not isinstance(answered, dict):
        return OvertimeDecision(failed=True, reason=f"the observer answered {answered!r:.80}, which is not an object")
    reason = answered.get("reason", "")
    reason = reason[:500] if isinstance(reason, str) else ""
    if answered.get("decline") or answered.get("extend") is False:
        return OvertimeDecision(reason=reason)
    try:
        if answered.get("extend_ms") is not None:
            return OvertimeDecision(parse_duration_ms(answered["extend_ms"], bare="ms"), reason)
        if "extend" in answered and answered["extend"] is not True:
            return OvertimeDecision(parse_duration_ms(answered["extend"]), reason)
    except DurationError as error:
        return OvertimeDecision(failed=True, reason=f"the observer answered an invalid duration: {error}")
    if reason and "extend" not in answered:
        return OvertimeDecision(reason=reason)
    return OvertimeDecision(failed=True, reason='the observer answered neither "extend" nor "decline"')


def _as_keys(written: object, bare: str | None) -> JsonObject:
    if written is True:
        return {}
    if isinstance(written, int | float) and not isinstance(written, bool):
        return {"budget": written}
    if isinstance(written, str):
        return _read_words(written, bare)
    if isinstance(written, dict):
        return dict(written)
    raise OvertimeError(f"write true, an observer, a budget or an object with its keys, not {written!r:.40}")


def _read_words(text: str, bare: str | None) -> JsonObject:
    keys: JsonObject = {}
    for position, word in enumerate(part.strip() for part in text.split(",")):
        name, equals, content = word.partition("=")
        name = name.replace("-", "_")
        if equals and content in ("true", "false"):
            keys[name] = content == "true"
        elif equals:
            keys[name] = int(content) if name == "max_requests" and content.isdecimal() else content
        elif word in set(ObserverKind):
            keys["observer"] = word
        elif position == 0:
            try:
                parse_duration_ms(word, bare=bare)
            except DurationError:
                names = ", ".join(ObserverKind)
                raise OvertimeError(f"{word!r} is neither an observer ({names}) nor a budget such as 2m") from None
            keys["budget"] = word
        else:
            message = "write KEY=VALUE after the observer, or a JSON object if a value contains a comma"
            raise OvertimeError(f"{word!r}: {message}")
    return keys


def _read_observer(keys: JsonObject) -> ObserverKind:
    named = keys.get("observer")
    if named is None and "command" in keys:
        return ObserverKind.COMMAND
    if named is None:
        return ObserverKind.MODEL if keys.get("model") else ObserverKind.PROGRESS
    try:
        return ObserverKind(named)
    except ValueError:
        raise OvertimeError(f"observer: one of {', '.join(ObserverKind)}, not {named!r:.40}") from None


def _read_duration(key: str, written: object, bare: str | None) -> int:
    try:
        ms = parse_duration_ms(written, bare=bare)
    except DurationError as error:
        raise OvertimeError(f"{key}: {error}") from None
    if not ms:
        raise OvertimeError(f"{key}: should be more than 0")
    return ms
