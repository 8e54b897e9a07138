"""The result of a tool: the value for the model, and the envelope for programs in `_meta`.

Models see the content only. So a success is the value itself, and a failure is a few sentences: the code and the
message, the limit, whether it is safe to call again, and how to continue.
"""

from __future__ import annotations

import re

from mcp_types import SERVER_INFO_META_KEY

from ...core.catalogue import JsonSchema
from ...core.content_blocks import LONGEST_CONTENT, blocks_of
from ...core.envelope import ENVELOPE_KEY, IN_RESULT, IN_STRUCTURE, Envelope
from ...core.errors import SideEffects, error_entries, error_entry
from ...core.json_values import as_text
from ...core.limits import format_duration
from ...core.value_types import JsonObject

REMAINING = "shotclock.dev/remainingMs"
# The SDK's readers give up on JSON nested deeper than about 200, and the client would never see the answer.
MOST_NESTED = 100
# As JSON. It is put into its message twice, and meanwhile the loop serves no other call.
LONGEST_RESULT = LONGEST_CONTENT
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NO_BRACKET = re.compile(r"[^\[\]{}]+")
_NULL: JsonSchema = {"type": "null"}
# Warnings that a model has to read: what it believes about the state of the App is no longer true.
_LOSSES = ("HOST_REPLACED", "STATE_REBUILT")
# What a model does next, where the general suggestion is for an author or a person.
_NEXT = {
    "CONFIRMATION_REQUIRED": "Call it again with confirm_destructive: true to have it done",
    "RESULT_TOO_LARGE": "Call it with arguments that ask for less; if there are none, its author can return less",
    "JOB_NOT_FOUND": "List your jobs with action list: a server knows those of its store, for a day after the end",
    "PROPOSAL_NOT_FOUND": "A server knows the proposals of its store: repeat the call or the proposal for a new one",
    "CALL_NOT_FOUND": "It has ended, or runs elsewhere: do not repeat this",
    "JOB_LOST": "Call the command again: one with checkpoints continues from the last",
    "KEY_REUSED": "Use a new key for a new call",
}
# Has FastMCP's client return the value itself as `data`, and not an object with it.
_UNWRAP = {"wrap_result": True}
# Of work that continues, or that a person has not approved.
_UNFINISHED: JsonSchema = {"type": "object", "properties": {"state": {"type": "string"}}, "required": ["state"]}


# --- what is announced --------------------------------------------------------------------------------------------


def result_schema(own: JsonSchema | None, *, may_be_unfinished: bool) -> JsonSchema | None:
    """Return the schema of a tool's structured content: an object, in which any other value is named `result`."""
    if not own or own == _NULL:
        return None
    definitions = own.get("$defs", {})
    schema = {name: item for name, item in own.items() if name not in ("$defs", "title")}
    if names_result(own):
        schema = {"type": "object", "properties": {"result": schema}, "required": ["result"]}
    if may_be_unfinished:
        schema = {"type": "object", "anyOf": [schema, _UNFINISHED]}
    return {**schema, "type": "object", **({"$defs": definitions} if definitions else {})}


def names_result(schema: JsonSchema | None) -> bool:
    """Return whether values of this schema are named `result`: all but objects."""
    if not schema or schema == _NULL:
        return False
    meant = schema
    for _ in range(16):  # a definition that refers to itself ends somewhere
        if "$ref" not in meant:
            break
        meant = schema.get("$defs", {}).get(meant["$ref"].rpartition("/")[2], {})
    return meant.get("type") != "object"


# --- what is answered ---------------------------------------------------------------------------------------------


def render_result(
    envelope: Envelope,
    server_info: JsonObject | None,
    *,
    is_wrapped: bool = False,
    has_schema: bool = True,
    has_state: bool = False,
    shown: str | None = None,
    most: int = LONGEST_RESULT,
) -> JsonObject:
    """Return the result of a tool; with `server_info`, in the form of the 2026 revision.

    `is_wrapped` names the value `result` in the structured content, as the announced schema does. Without a schema
    (`has_schema`), content blocks are sent as such. With `has_state` the schema allows unfinished work, too. The text
    is `shown`, or without that the value, or the failure in sentences. The envelope of a
    success with structured content does not have its data as well.
    """
    envelope = make_fit(envelope, most)
    is_failure = not envelope.ok and not is_unfinished(envelope)
    blocks = blocks_of(_value_of(envelope)) if envelope.ok and not has_schema else None
    content = blocks or _content(envelope, shown)
    if not is_failure:
        content = [*content, *(_text(f"Note: {loss}.") for loss in _losses(envelope))]
    result: JsonObject = {"content": content, "isError": is_failure}
    if not is_failure and blocks is None and (structured := _structured(envelope, is_wrapped)) is not None:
        result["structuredContent"] = structured
    carried = envelope.to_dict()
    if envelope.ok and "structuredContent" in result:
        del carried["data"]
        carried["meta"] = {**envelope.meta, "data_in": IN_RESULT if is_wrapped else IN_STRUCTURE}
    meta: JsonObject = {ENVELOPE_KEY: carried}
    if (remaining_ms := envelope.meta.get("remaining_ms")) is not None:
        meta[REMAINING] = remaining_ms
    if envelope.ok and is_wrapped and not has_state:
        meta["fastmcp"] = _UNWRAP
    if server_info is not None:
        result["resultType"] = "complete"
        meta[SERVER_INFO_META_KEY] = server_info
    return {**result, "_meta": meta}


def is_unfinished(envelope: Envelope) -> bool:
    """Return whether an error is no failure: work continues, or a person refused or has not answered."""
    return envelope.code in ("INCOMPLETE", "PROPOSAL_REJECTED", "PROPOSAL_EXPIRED", "PROPOSAL_WITHDRAWN")


def _structured(envelope: Envelope, is_wrapped: bool) -> JsonObject | None:
    data = envelope.data
    if not envelope.ok:
        known = data if isinstance(data, dict) else {"data": data}
        return {"state": known.get("status", "unfinished"), **known}
    if is_wrapped:
        return {"result": _value_of(envelope)}
    return data if isinstance(data, dict) else None


def _value_of(envelope: Envelope) -> object:
    """Return the value of a success: the contract names a bare one `result`."""
    data = envelope.data
    return data["result"] if isinstance(data, dict) and set(data) == {"result"} else data


def _content(envelope: Envelope, shown: str | None) -> list[JsonObject]:
    if shown is not None:
        return [_text(shown)]
    if not envelope.ok:
        return [_text(describe_failure(envelope)), *_left_data(envelope)]
    value = _value_of(envelope)
    return [] if value is None else [_text(value)]


def _losses(envelope: Envelope) -> list[str]:
    return [str(each["message"]) for each in envelope.warnings if each["code"] in _LOSSES]


def _text(value: object) -> JsonObject:
    return {"type": "text", "text": as_text(value)}


def _left_data(envelope: Envelope) -> list[JsonObject]:
    """Return the data of a failure, such as a partial result. That of unfinished work is in the sentences."""
    if envelope.data is None or is_unfinished(envelope):
        return []
    return blocks_of(_value_of(envelope)) or [_text(envelope.data)]


def describe_failure(envelope: Envelope) -> str:
    error: JsonObject = envelope.error or {}
    data: JsonObject = envelope.data if isinstance(envelope.data, dict) else {}
    sentences = [f"{error['code']}: {error['message']}"]
    clock = error.get("context", {}).get("clock")
    if clock is not None and format_duration(clock["limit_ms"]) not in error["message"]:
        sentences.append(f"Its limit was {format_duration(clock['limit_ms'])} ({clock['kind']})")
    if is_unfinished(envelope):
        if "continue_command" in data:
            sentences.append(f"To continue: {data['continue_command']}")
        if "cancel_command" in data:
            sentences.append(f"To cancel: {data['cancel_command']}")
    else:
        sentences += [*_losses(envelope), *_own_suggestion(error), _advise(envelope)]
    ended = (sentence if sentence.endswith("?") else sentence.rstrip(".") + "." for sentence in sentences)
    return " ".join(sentence[:1].upper() + sentence[1:] for sentence in ended)


def _own_suggestion(error: JsonObject) -> list[str]:
    """Return the suggestion of this error. The general ones name options and fields that a model does not see."""
    suggestion = error.get("suggestion")
    if not suggestion or any(suggestion == entry.hint for entry in error_entries()):
        suggestion = _NEXT.get(error["code"])
    return [suggestion] if suggestion else []


def _advise(envelope: Envelope) -> str:
    """Return whether it is safe to call again."""
    error: JsonObject = envelope.error or {}
    if error.get("retryable"):
        wait_ms = error.get("retry_after_ms")
        return "It is safe to call it again" + (f" after {format_duration(wait_ms)}" if wait_ms else "")
    if envelope.meta.get("side_effects") == SideEffects.NONE:
        return "It changed nothing"
    return "It may have had effects: look at them before you call it again"


def make_fit(envelope: Envelope, most: int = LONGEST_RESULT) -> Envelope:
    """Return the envelope, or an error in place of a result that a client could not read, or should not get."""
    text = envelope.to_json()
    if len(text) > most:
        hidden = "" if envelope.code is None else f"; its error was {envelope.code}"
        message = f"the answer has {len(text)} characters, {most} are the most{hidden}"
        return replace_by_error(envelope, "RESULT_TOO_LARGE", message)
    if _is_too_deep(text):
        message = f"the result is nested more than {MOST_NESTED} deep, which readers of JSON refuse"
        return replace_by_error(envelope, "RESULT_NOT_SERIALIZABLE", message)
    return envelope


def _is_too_deep(text: str) -> bool:
    if text.count("{") + text.count("[") <= MOST_NESTED:
        return False
    # Level by level from the inside, each in C, so that a long answer does not hold up the loop.
    brackets = _NO_BRACKET.sub("", _STRING.sub("", text))
    for _ in range(MOST_NESTED):
        brackets = brackets.replace("{}", "").replace("[]", "")
        if not brackets:
            return False
    return True


def replace_by_error(envelope: Envelope, code: str, message: str) -> Envelope:
    error: dict[str, object] = {
        "code": code,
        "message": message,
        "retryable": False,
        "phase": "execution",
        "suggestion": error_entry(code).hint,
    }
    return Envelope(None, error, envelope.warnings, {**envelope.meta, "exit_code": 1})
