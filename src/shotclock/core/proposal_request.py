"""Request of an agent to a person, the person's decision, and the mistakes that can be made in either."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

from .clocks import MAX_MS
from .value_types import as_dict, value

JSON = Any  # whatever `json.loads` gives; a recursive alias would say no more to anybody who has to look inside

TITLE_LIMIT = 200
TEXT_LIMIT = 20_000
PATH_LIMIT = 4_096
ARGUMENTS_LIMIT = 256 * 1024
FILE_LIMIT = 1024 * 1024
LIST_LIMIT = 100
# What was written must be readable from a deeper stack as well: parsers give up at some depth.
DEPTH_LIMIT = 64
KEY_LIMIT = 200


@value
class InboxLimits:
    """Limits of how many proposals may be open at once. An agent that asks in a loop buries neither a person nor other
    agents."""

    each: int = 100
    """Of one asker."""
    all: int = 1_000


class ProposalStatus(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    MODIFIED = "modified"
    REJECTED = "rejected"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"

    @property
    def is_open(self) -> bool:
        return self is ProposalStatus.PENDING

    @property
    def is_decided(self) -> bool:
        """Return whether a person decided it."""
        return self in (ProposalStatus.APPROVED, ProposalStatus.MODIFIED, ProposalStatus.REJECTED)

    @property
    def allows(self) -> bool:
        return self in (ProposalStatus.APPROVED, ProposalStatus.MODIFIED)


class Kind(StrEnum):
    OPERATION = "operation"
    FILE = "file"
    QUESTION = "question"


@value
class Policy:
    ttl_ms: int = 86_400_000
    """How long it stays open, and for how long its decision answers the identical call. 0: for as long as it takes."""
    remind_ms: int = 0
    """So long before the end there is a reminder. 0: none."""
    when_expired: Literal["expire", "reject", "default"] = "expire"
    """What the asker's work does with an unanswered one. The proposal itself is `expired` in any case."""
    deciders: tuple[str, ...] = ()
    """The operators who may decide, by name. Empty: any."""
    destructive: bool = False
    """Approving asks for the confirmation to be typed."""


@value
class ProposedFile:
    path: str
    proposed: str
    current: str | None = None
    """What the change is shown against. None: there is no such file yet, or nobody said."""
    was_read: bool = False
    """Whether we read `current` ourselves; otherwise it is what the asker says."""


@value
class ProposalRequest:
    """Content of a proposal. Never changes; whoever wants something else makes another proposal."""

    kind: Kind
    title: str
    justification: str = ""
    operation: str | None = None
    arguments: Mapping[str, JSON] | None = None
    file: ProposedFile | None = None
    choices: tuple[str, ...] = ()
    default: JSON = None
    input_schema: dict[str, JSON] | None = None
    """Of `arguments`: for a form, and to find mistakes in a modification early."""
    policy: Policy = Policy()
    surroundings: Mapping[str, JSON] | None = None
    """What else decides what is done, and cannot be modified: directory, environment, program, how many tries."""
    dispatched: bool = False
    """We do it ourselves once it is approved. Otherwise whoever asked does it, and nothing here sees it."""

    @property
    def text(self) -> str:
        """Return all of what would be done, as everybody is shown it."""
        from .visible_text import action_text  # every App has policies, and few start with a proposal

        return action_text(self)

    @property
    def action_hash(self) -> str:
        """Return the hash of what would be done. Not of the reasons given, nor of who may decide until when."""
        return _sha256(self.text)

    @property
    def confirmation(self) -> str:
        """Return what has to be typed before something destructive is approved."""
        return " ".join((self.operation or self.title).split())

    def about(self) -> dict[str, JSON]:
        """Return what a list shows of it. None of it is long."""
        return {
            "kind": self.kind.value,
            "title": self.title,
            "operation": self.operation,
            "path": None if self.file is None else self.file.path,
            "destructive": self.policy.destructive,
            "deciders": list(self.policy.deciders),
            "dispatched": self.dispatched,
        }

    def as_json(self) -> dict[str, JSON]:
        policy = as_dict(self.policy) | {"deciders": list(self.policy.deciders)}
        return {
            "kind": self.kind.value,
            "title": self.title,
            "justification": self.justification,
            "operation": self.operation,
            "arguments": None if self.arguments is None else dict(self.arguments),
            "file": None if self.file is None else as_dict(self.file),
            "choices": list(self.choices),
            "default": self.default,
            "input_schema": self.input_schema,
            "policy": policy,
            "surroundings": None if self.surroundings is None else dict(self.surroundings),
            "dispatched": self.dispatched,
        }

    @classmethod
    def of_json(cls, plain: Mapping[str, JSON]) -> ProposalRequest:
        """Return the request of which `as_json` gave this."""
        policy = plain["policy"]
        return cls(**{
            **plain,
            "kind": Kind(plain["kind"]),
            "file": None if plain["file"] is None else ProposedFile(**plain["file"]),
            "choices": tuple(plain["choices"]),
            "policy": Policy(**{**policy, "deciders": tuple(policy["deciders"])}),
        })  # fmt: skip


@value
class Decision:
    status: ProposalStatus
    """APPROVED, MODIFIED or REJECTED."""
    notes: str = ""
    arguments: Mapping[str, JSON] | None = None
    """What a modified operation is run with."""
    file_text: str | None = None
    """What a modified file holds."""
    answer: JSON = None
    """To a question, which is approved with it."""

    def as_json(self) -> dict[str, JSON]:
        return {
            "status": self.status.value,
            "notes": self.notes,
            "arguments": None if self.arguments is None else dict(self.arguments),
            "file_text": self.file_text,
            "answer": self.answer,
        }

    @classmethod
    def of_json(cls, plain: Mapping[str, JSON]) -> Decision:
        """Return the decision of which `as_json` gave this."""
        return cls(**{**plain, "status": ProposalStatus(plain["status"])})


def canonical(value: JSON) -> str:
    """Return one text for one value, whatever order its keys came in. Raises ValueError or TypeError for what is no
    JSON."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deep") from None


def digest(value: JSON) -> str:
    return _sha256(canonical(value))


# --- mistakes, all at once --------------------------------------------------------------------------------------

Problems = list[dict[str, str]]


def problems_with(ask: ProposalRequest) -> Problems:
    """Return everything that is wrong with a request; empty if it can be proposed."""
    found: Problems = []
    kind: object = ask.kind
    if not isinstance(kind, Kind):
        _add_problem(found, "kind", f"must be {', '.join(Kind)}")
    _text(found, "title", ask.title, TITLE_LIMIT, needed=True)
    _text(found, "justification", ask.justification, TEXT_LIMIT)
    match ask.kind:
        case Kind.OPERATION:
            _text(found, "operation", ask.operation, PATH_LIMIT, needed=True)
        case Kind.FILE if ask.file is None:
            _add_problem(found, "file", "required")
    for name, there, kind in (
        ("operation", ask.operation is not None or ask.arguments is not None, Kind.OPERATION),
        ("file", ask.file is not None, Kind.FILE),
        ("choices", bool(ask.choices), Kind.QUESTION),
    ):
        if there and ask.kind is not kind:
            _add_problem(found, name, f"does not belong to a {ask.kind}")
    if ask.arguments is not None:
        _arguments(found, "arguments", ask.arguments)
    if ask.surroundings is not None:
        _arguments(found, "surroundings", ask.surroundings)
    if ask.file is not None:
        _text(found, "file.path", ask.file.path, PATH_LIMIT, needed=True)
        _file_text(found, "file.proposed", ask.file.proposed)
        if ask.file.current is not None:
            _file_text(found, "file.current", ask.file.current)
    _names(found, "choices", ask.choices, TEXT_LIMIT)
    if ask.choices and ask.default is not None and ask.default not in ask.choices:
        _add_problem(found, "default", "is not one of the choices")
    _json(found, "default", ask.default)
    _json(found, "input_schema", ask.input_schema)
    _policy(found, ask.policy)
    return found


def problems_with_key(key: str | None) -> Problems:
    """Return what is wrong with a key; empty if it can be used."""
    found: Problems = []
    if key is not None:
        _text(found, "idempotency_key", key, KEY_LIMIT, needed=True)
    return found


def problems_with_answer(ask: ProposalRequest, decision: Decision) -> Problems:
    """Return everything that is wrong with a decision on this request; empty if it can be carried out."""
    found: Problems = []
    modified = decision.status is ProposalStatus.MODIFIED
    status: object = decision.status
    if not isinstance(status, ProposalStatus) or not status.is_decided:
        _add_problem(found, "status", "a decision is approved, modified or rejected")
    _text(found, "notes", decision.notes, TEXT_LIMIT)
    if modified and ask.kind is Kind.QUESTION:
        _add_problem(found, "status", "a question is answered or rejected, not modified")
    if modified and ask.kind is Kind.OPERATION and decision.arguments is None:
        _add_problem(found, "arguments", "required: what the operation is to be run with")
    if modified and ask.kind is Kind.FILE and decision.file_text is None:
        _add_problem(found, "file_text", "required: what the file is to hold")
    if decision.arguments is not None:
        if not modified or ask.kind is not Kind.OPERATION:
            _add_problem(found, "arguments", "only a modified operation has new ones")
        else:
            _arguments(found, "arguments", decision.arguments)
            found += _check_fits(ask.input_schema, decision.arguments, ask.arguments or {})
    if decision.file_text is not None:
        if not modified or ask.kind is not Kind.FILE:
            _add_problem(found, "file_text", "only a modified file has a new one")
        else:
            _file_text(found, "file_text", decision.file_text)
    if ask.kind is Kind.QUESTION and decision.status is ProposalStatus.APPROVED:
        if decision.answer is None:
            _add_problem(found, "answer", "required")
        elif ask.choices and decision.answer not in ask.choices:
            _add_problem(found, "answer", f"must be one of {', '.join(ask.choices)}")
        else:
            _json(found, "answer", decision.answer)
    elif decision.answer is not None:
        _add_problem(found, "answer", "only a question that is approved has one")
    return found


def _add_problem(found: Problems, field: str, message: str) -> None:
    found.append({"field": field, "message": message})


def _text(found: Problems, field: str, text: object, limit: int, *, needed: bool = False) -> None:
    if needed and (text is None or (isinstance(text, str) and not text.strip())):
        _add_problem(found, field, "required")
    elif not isinstance(text, str):
        _add_problem(found, field, "must be text")
    elif len(text) > limit:
        _add_problem(found, field, f"{len(text)} characters are too many: {limit} at most")
    elif _size(text) < 0:
        _add_problem(found, field, "is not valid Unicode")


def _file_text(found: Problems, field: str, text: object) -> None:
    if not isinstance(text, str):
        _add_problem(found, field, "must be text")
    elif (size := _size(text)) < 0:
        _add_problem(found, field, "is not valid Unicode")
    elif size > FILE_LIMIT:
        _add_problem(found, field, f"{size} bytes are too many: {FILE_LIMIT} at most")


def _arguments(found: Problems, field: str, arguments: object) -> None:
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        _add_problem(found, field, "must be named values")
    else:
        _json(found, field, dict(arguments))


def _json(found: Problems, field: str, value: object) -> None:
    try:
        if _is_deeper_than(DEPTH_LIMIT, value):
            raise ValueError(f"nested deeper than {DEPTH_LIMIT} levels")
        size = _size(json.dumps(value, allow_nan=False, ensure_ascii=False, sort_keys=True))
    except (TypeError, ValueError) as error:
        _add_problem(found, field, f"is not JSON: {error}")
        return
    if size < 0:
        _add_problem(found, field, "is not valid Unicode")
    elif size > ARGUMENTS_LIMIT:
        _add_problem(found, field, f"{size} bytes of JSON are too many: {ARGUMENTS_LIMIT} at most")


def _is_deeper_than(limit: int, value: object) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return bool(inner) and (limit == 0 or any(_is_deeper_than(limit - 1, each) for each in inner))


def _names(found: Problems, field: str, names: Any, limit: int) -> None:
    if not isinstance(names, tuple) or len(names) > LIST_LIMIT:
        _add_problem(found, field, f"must be a list of {LIST_LIMIT} at most")
        return
    for name in names:
        _text(found, field, name, limit, needed=True)
    if any(name in names[:place] for place, name in enumerate(names)):
        _add_problem(found, field, "names one twice")


def _policy(found: Problems, policy: Policy) -> None:
    if type(policy.ttl_ms) is not int or not 0 <= policy.ttl_ms <= MAX_MS:
        _add_problem(found, "policy.ttl_ms", "must be from 1 ms to ten years, or 0 for no end")
    elif type(policy.remind_ms) is not int or not 0 <= policy.remind_ms < (policy.ttl_ms or 1):
        _add_problem(found, "policy.remind_ms", "must be shorter than ttl_ms")
    if policy.when_expired not in ("expire", "reject", "default"):
        _add_problem(found, "policy.when_expired", "must be expire, reject or default")
    _names(found, "policy.deciders", policy.deciders, TITLE_LIMIT)
    destructive: object = policy.destructive
    if not isinstance(destructive, bool):
        _add_problem(found, "policy.destructive", "must be true or false")


def _size(text: str) -> int:
    """Return the bytes of a text; -1 for what holds undecodable ones, which no JSON parser would take from us."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return -1


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}


def _check_fits(
    schema: Mapping[str, JSON] | None, arguments: Mapping[str, JSON], asked: Mapping[str, JSON]
) -> Problems:
    """Return what a person would have mistyped: a missing or unknown name, another type, none of the values.

    Not the whole of JSON Schema: the schema may come from whoever proposes, and one can be written that takes for
    ever to check. All of it is checked where the operation runs, on the clock.
    """
    found: Problems = []
    if not isinstance(schema, Mapping):
        return found
    properties = schema.get("properties")
    known: Mapping[str, JSON] = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    for name in required if isinstance(required, list) else []:
        if isinstance(name, str) and name not in arguments:
            _add_problem(found, f"arguments.{name}", "required")
    for name, value in arguments.items():
        if name not in known:
            if schema.get("additionalProperties") is False:
                _add_problem(found, f"arguments.{name}", "there is no such argument")
            continue
        if name in asked and type(asked[name]) is type(value) and asked[name] == value:
            continue  # nobody changed it: a default does not have to fit
        wanted = known[name] if isinstance(known[name], Mapping) else {}
        names = wanted.get("type")
        types = [
            each for each in (names if isinstance(names, list) else [names]) if isinstance(each, str) and each in _TYPES
        ]
        if types and not any(_is_a(value, each) for each in types):
            _add_problem(found, f"arguments.{name}", f"must be of type {' or '.join(types)}")
        elif isinstance(wanted.get("enum"), list) and value not in wanted["enum"]:
            _add_problem(found, f"arguments.{name}", "is not one of the values it may have")
    return found


def _is_a(value: JSON, name: str) -> bool:
    if isinstance(value, bool):  # which Python takes for a number
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _sha256(text: str) -> str:
    import hashlib  # loads a library of its own, which a command that asks nobody can do without

    return hashlib.sha256(text.encode()).hexdigest()
