"""`shotclock ui`: executions on a browser or a phone, written out or built from a few words, and the devices.

A warm `ui click` is a short message to a process that is there already; what it imports is paid for every time, so
payloads are looked at here only where nothing is sent: `--validate-only`, `--dry-run`, and before a device is started.
"""

from __future__ import annotations

import os
import select
import sys

from ..core.clocks import parse_duration_ms
from ..core.envelope import Envelope, Problem, stop_problem
from ..core.errors import Ending, Failure
from ..process.clock import monotonic_ns
from ..runtime.call import Call, Outcome
from ..ui import builders, client
from ..ui.device_names import DEFAULT_DEVICE, kind_of
from .output import Signalled, is_terminal, raise_on_stop, signals_heard, write_quietly
from .parser import Command, CommandTable, argument, duration, flag, option
from .subcommand import Verb, admit_call, conclude, deliver, read_verb, unstarted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

DEVICE_VARIABLE = "SHOTCLOCK_UI_DEVICE"
# How long a payload on stdin may take to come; whoever holds the pipe and writes nothing runs it out.
STDIN_LIMIT_MS = 2_000
# More than the payload may have, so that what is too large is told as that.
STDIN_MOST = 1_000_000


# --- what it takes --------------------------------------------------------------------------------------------


def _number(text: str) -> Any:
    """Read milliseconds, also those that are none: what is wrong with them is said by their path. A duration with its
    unit is one, too."""
    try:
        number = float(text)
    except ValueError:
        return parse_duration_ms(text)
    return int(number) if number == number and abs(number) < 1e15 and number == int(number) else number


def _point(text: str) -> dict[str, float]:
    x, comma, y = text.partition(",")
    try:
        if not comma:
            raise ValueError
        return {"x": float(x), "y": float(y)}
    except ValueError:
        raise ValueError(f"{text!r} is no point: write X,Y") from None


def _timeout(help: str) -> Any:
    return option("--timeout", "MS", help, read=_number)


_WHOLE = _timeout("The execution's timeoutMs [30000].")
_RUN = (
    option("--device", "NAME", f"browser, cdp:URL or android:SERIAL [{DEVICE_VARIABLE}, or browser]."),
    flag("--validate-only", "Say whether the execution is valid, and show it. Nothing runs."),
    flag("--dry-run", "Show what would be done. Nothing runs."),
    flag("--json", "The envelope alone on stdout, also on a terminal."),
)
_DEVICE = (_RUN[0], _RUN[3])
_MATCHER_KEYS = {
    "text": "textEquals", "text_contains": "textContains", "id": "resourceId", "role": "role",
    "label": "contentDescEquals", "css": "css", "ref": "ref",
}  # fmt: skip
_MATCHER = (
    option("--text", "TEXT", "The node's text."),
    option("--text-contains", "TEXT", "A part of it."),
    option("--id", "ID", "Its resource id, or test id."),
    option("--role", "ROLE", "Its role: button, link, textbox, …"),
    option("--label", "TEXT", "Its label or description.", others=("--desc",)),
    option("--css", "SELECTOR", "On a browser: a CSS selector.", others=("--selector",)),
    option("--ref", "REF", "Its ref in the last snapshot, as in [ref=e12]."),
)

TABLE = CommandTable(
    "shotclock ui",
    "Run UI actions on a browser or a phone, each in its budget.",
    (
        Command(
            "exec",
            "Run an execution: a payload of actions with a budget over the whole.",
            (
                argument("file", "The file of the payload; - is stdin."),
                option("--execution", "JSON", "The payload itself, or its file; - is stdin."),
                _timeout("Instead of the payload's timeoutMs."),
                *_RUN,
            ),
            usage="[FILE | --execution JSON] [OPTIONS]",
        ),
        Command(
            "open", "Open an address, or an app.", (argument("target", "The address or the app's id."), _WHOLE, *_RUN)
        ),
        Command(
            "click",
            "Click a node or a point.",
            (
                *_MATCHER,
                option("--at", "X,Y", "A point instead of a node.", read=_point, others=("--coordinate",)),
                flag("--long", "For long."),
                flag("--focus", "Only focus it."),
                _WHOLE,
                *_RUN,
            ),
        ),
        Command(
            "type",
            "Put text into a node.",
            (
                argument("words", "The text."),
                *_MATCHER,
                flag("--submit", "Press Enter behind it."),
                flag("--keep", "Keep what is there, and write behind it."),
                _WHOLE,
                *_RUN,
            ),
        ),
        Command(
            "press", "Press a key.", (argument("key", "enter, back, arrow_down, ctrl+a, a character, …"), _WHOLE, *_RUN)
        ),
        Command(
            "scroll",
            "Scroll once, or until a node is to be seen.",
            (argument("direction", "up, down, left or right [down]."), *_MATCHER, _WHOLE, *_RUN),
        ),
        Command(
            "read",
            "Read the text of a node.",
            (
                *_MATCHER,
                flag("--all", "Of all nodes that match."),
                flag("--value", "Of what belongs to this label."),
                _WHOLE,
                *_RUN,
            ),
        ),
        Command(
            "snapshot",
            "Show what is to be seen, as text with refs.",
            (option("--max-bytes", "N", "At most so much of it [24000].", read=_number), _WHOLE, *_RUN),
        ),
        Command(
            "screenshot",
            "Take a picture.",
            (argument("file", "Where to write it; not said, it is in the result."), _WHOLE, *_RUN),
        ),
        Command(
            "wait",
            "Wait until a node is to be seen.",
            (
                *_MATCHER,
                flag("--hidden", "Until it is not."),
                _timeout("How long the wait may take [10000, at most 60000]."),
                *_RUN,
            ),
        ),
        Command(
            "wait-for-nav",
            "Wait until another page or app is there.",
            (
                option("--app", "PACKAGE", "The app in the foreground."),
                option("--url", "URL", "The address, with * for any text."),
                *_MATCHER,
                _timeout("How long the wait may take, at most 30000. Has to be said."),
                *_RUN,
            ),
            usage="--timeout MS [OPTIONS]",
        ),
        Command(
            "sleep",
            "Let time pass on the device.",
            (argument("ms", "How many milliseconds.", read=_number), _WHOLE, *_RUN),
        ),
        Command("devices", "List the devices of this machine, and those that are kept.", (_RUN[3],)),
        Command(
            "start",
            "Start a device now instead of with the first command.",
            (*_DEVICE, duration("--idle", "End it after this long without a command [10m].", default="10m")),
        ),
        Command("stop", "Stop a device, and all that was started for it.", (*_DEVICE, flag("--all", "Every one."))),
    ),
    "verb",
)


class _Missing(Exception):
    """An argument that has to be given."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def main(words: list[str]) -> int:
    """Run `shotclock ui VERB`. Returns the exit code."""
    verb = read_verb(TABLE, words, _check, names_verb=True, check_rest=_check_execution)
    if isinstance(verb, int):
        return verb
    name, said = f"ui {verb.name}", verb.values
    raise_on_stop()
    if verb.name in ("devices", "start", "stop"):
        return _manage(verb)
    try:
        payload = _payload(verb.name, said)
    except _Missing as missing:
        errors = [{"field": missing.field, "message": str(missing)}]
        problem = Problem("MISSING_ARGUMENT", f"{missing.field}: {missing}", "validation", errors=errors)
        return deliver(unstarted(name, problem), verb.as_json)
    except Failure as failure:
        return deliver(_refuse(name, failure), verb.as_json)
    override = said["timeout"] if verb.name == "exec" else None
    if said["validate_only"] or said["dry_run"]:
        return deliver(_rehearse(name, payload, override, said["dry_run"]), verb.as_json, _show_rehearsal)
    call = admit_call(name, client.START_LIMIT_MS + client.RESULT_MARGIN_MS + _whole_ms(payload, override))
    return deliver(conclude(call, lambda: _run(call, payload, override, said)), verb.as_json, _show)


def _check(verb: str, said: dict[str, Any], report: Callable[[str, str], None]) -> None:
    if verb == "exec" and said["file"] is not None and said["execution"] is not None:
        report("execution", "either FILE or --execution: leave one out")
    if said.get("validate_only") and said.get("dry_run"):
        report("dry-run", "either --validate-only or --dry-run: leave one out")
    if verb == "click" and said["long"] and said["focus"]:
        report("focus", "either --long or --focus: leave one out")
    if verb == "stop" and said["all"] and said["device"] is not None:
        report("device", "either --device or --all: leave one out")
    if said.get("device"):
        try:
            kind_of(said["device"])
        except Failure as unknown:
            report("device", str(unknown))


def _check_execution(verb: str, said: dict[str, Any], report: Callable[[str, str], None]) -> None:
    """Report what is wrong with the execution, beside the words."""
    if verb in ("devices", "start", "stop"):
        return
    from ..ui.payload import read_execution

    override = said["timeout"] if verb == "exec" else None
    try:
        read_execution(_payload(verb, said), timeout_ms=override)
    except _Missing as missing:
        report(missing.field, str(missing))
        if override is not None:
            try:
                read_execution({}, timeout_ms=override)
            except Failure as failure:
                _report_problems(failure, report, only="timeoutMs")
    except Failure as failure:
        _report_problems(failure, report)


def _report_problems(failure: Failure, report: Callable[[str, str], None], only: str | None = None) -> None:
    errors: Any = failure.context.get("errors") or [{"field": "execution", "message": str(failure)}]
    for each in errors:
        if only in (None, each["field"]):
            report(each["field"], each["message"])


# --- payloads -------------------------------------------------------------------------------------------------


def _payload(verb: str, said: dict[str, Any]) -> Any:
    """Return what is to be run. Raises _Missing, and Failure for a file that is not there or no JSON."""
    timeout_ms, matcher = said["timeout"], {key: said[each] for each, key in _MATCHER_KEYS.items() if said.get(each)}

    def needed(field: str, message: str, value: Any) -> Any:
        if value is None or value == {}:
            raise _Missing(field, message)
        return value

    node = "which node? --text, --id, --role, --label, --css or --ref"
    match verb:
        case "exec":
            return _read_payload(said["execution"] if said["file"] is None else said["file"])
        case "open":
            return builders.build_open(
                needed("target", "open what? an address, or an app's id", said["target"]), timeout_ms
            )
        case "click":
            kind = "long_click" if said["long"] else "focus" if said["focus"] else "default"
            if said["at"] is None:
                needed("matcher", f"{node}; or a point with --at X,Y", matcher)
            return builders.build_click(timeout_ms, matcher=matcher or None, coordinate=said["at"], kind=kind)
        case "type":
            text = needed("words", "type what?", said["words"])
            into = needed("matcher", node, matcher)
            return builders.build_type(into, text, timeout_ms, submit=said["submit"], keep=said["keep"])
        case "press":
            return builders.build_press(needed("key", "which key?", said["key"]), timeout_ms)
        case "scroll":
            return builders.build_scroll(said["direction"] or "down", timeout_ms, until=matcher or None)
        case "read":
            if said["value"]:
                return builders.build_read_value(needed("matcher", node, matcher), timeout_ms)
            return builders.build_read(needed("matcher", node, matcher), timeout_ms, all_of_them=said["all"])
        case "snapshot":
            return builders.build_snapshot(timeout_ms, max_bytes=said["max_bytes"])
        case "screenshot":
            path = None if said["file"] is None else os.path.abspath(said["file"])
            return builders.build_screenshot(timeout_ms, path=path)
        case "wait":
            state = "hidden" if said["hidden"] else "visible"
            return builders.build_wait(needed("matcher", node, matcher), timeout_ms, state=state)
        case "wait-for-nav":
            needed("timeout", "how long may it take? --timeout MS, at most 30000", timeout_ms)
            if said["app"] is None and said["url"] is None:
                needed("matcher", "what is expected? --app, --url or a node", matcher)
            return builders.build_wait_for_nav(timeout_ms, package=said["app"], url=said["url"], node=matcher or None)
    return builders.build_sleep(needed("ms", "how long?", said["ms"]), timeout_ms)


def _read_payload(written: str | None) -> Any:
    from ..ui.payload import parse_payload

    if written is None:
        raise _Missing("execution", "which execution? --execution JSON, a FILE, or - for stdin")
    if written.lstrip()[:1] in ("{", "["):
        return parse_payload(written)
    if written == "-":
        return parse_payload(_read_stdin())
    try:
        with open(written, "rb") as file:
            return parse_payload(file.read(STDIN_MOST))
    except FileNotFoundError:
        is_mode = written in ("best-effort", "best_effort")
        hint = 'write "mode": "best_effort" in the payload' if is_mode else None
        raise Failure("FILE_NOT_FOUND", f"there is no file {written!r}", suggestion=hint) from None
    except OSError as error:
        raise Failure("FILE_UNREADABLE", f"{written!r} cannot be read: {error.strerror}") from None


def _read_stdin() -> bytes:
    """Return all of stdin, which has to come at once. Raises Failure INPUT_REQUIRED."""
    if is_terminal(sys.stdin) or sys.stdin is None:
        raise Failure("INPUT_REQUIRED", "the payload is read from stdin, which is a terminal: pipe it in")
    read, give_up_ns = bytearray(), monotonic_ns() + STDIN_LIMIT_MS * 1_000_000
    while len(read) <= STDIN_MOST:
        left_s = (give_up_ns - monotonic_ns()) / 1e9
        if left_s <= 0 or not select.select([0], [], [], left_s)[0]:
            raise Failure("INPUT_REQUIRED", f"stdin was not closed within {STDIN_LIMIT_MS} ms")
        if not (chunk := os.read(0, 65536)):
            break
        read += chunk
    return bytes(read)


def _whole_ms(payload: Any, override: Any) -> int:
    written = override if override is not None else payload.get("timeoutMs") if isinstance(payload, dict) else None
    return int(written) if isinstance(written, int | float) and 0 < written < 1e9 else 0


# --- executions -----------------------------------------------------------------------------------------------


def _refuse(name: str, failure: Failure) -> Envelope:
    from ..runtime.outcomes import failure_outcome

    outcome = failure_outcome(failure)
    assert isinstance(outcome.problem, Problem)
    return unstarted(name, outcome.problem)


def _rehearse(name: str, payload: Any, override: Any, dry_run: bool) -> Envelope:
    from ..ui.payload import read_execution

    call = admit_call(name, 30_000)

    def body() -> Outcome:
        execution = read_execution(payload, timeout_ms=override)
        data: dict[str, object] = {"ok": True, "validated": True, "execution": execution.written}
        if dry_run:
            data = {"ok": True, "dryRun": True, "plan": execution.plan}
        return Outcome(Ending.FINISHED, data=data)

    return conclude(call, body)


def _run(call: Call, payload: Any, override: Any, said: dict[str, Any]) -> Outcome | Envelope:
    """Have the execution run on its device, inside what our own caller has left."""
    if not isinstance(payload, dict):
        from ..ui.payload import read_execution

        read_execution(payload)
    remaining_ms = None
    if call.bound.owner != call.name and call.bound.bell is not None:
        remaining_ms = call.bound.bell.remaining_ms(monotonic_ns())
    exchanges: list[client.Exchange] = []
    try:
        return client.execute(
            _device(said),
            payload,
            timeout_ms=override,
            remaining_ms=remaining_ms,
            traceparent=call.trace.traceparent,
            on_exchange=exchanges.append,
        )
    except Signalled as signalled:  # our end of the socket is closed, and the daemon stops the execution
        steps = exchanges[0].steps if exchanges else []
        data: dict[str, object] = {"partial": True, "stepResults": steps}
        return Outcome(Ending.CANCELLED, stop_problem(signalled.name), data)


def _device(said: dict[str, Any]) -> str:
    return said.get("device") or os.environ.get(DEVICE_VARIABLE) or DEFAULT_DEVICE


# --- devices --------------------------------------------------------------------------------------------------


def _manage(verb: Verb) -> int:
    from ..runtime.commands import carry_out

    said, name = verb.values, f"ui {verb.name}"
    if verb.name == "devices":
        call = admit_call(name, 30_000)
        return deliver(conclude(call, lambda: carry_out(call, _list_devices)), verb.as_json, _show_devices)
    starting_ms, stopping_ms = client.START_LIMIT_MS * 2, client.RESULT_MARGIN_MS + client.STOP_LIMIT_MS
    call = admit_call(name, starting_ms if verb.name == "start" else stopping_ms, mutates=True, idempotent=True)
    body = _start if verb.name == "start" else _stop
    return deliver(conclude(call, lambda: body(said)), verb.as_json, _show_data)


def _start(said: dict[str, Any]) -> Outcome | Envelope:
    device = _device(said)
    exchange = client.Exchange(device, {"do": "start", "commandId": "start"}, "start")
    if (connection := client.try_connect(device)) is None:
        connection = client.start_daemon(device, idle_ms=said["idle"] or client.DEFAULT_IDLE_MS)
        exchange.has_started = True
    connection.close()
    return exchange.run(client.RESULT_MARGIN_MS)


def _stop(said: dict[str, Any]) -> Outcome:
    names = [str(kept["device"]) for kept in _look_at_daemons()] if said["all"] else [_device(said)]
    return Outcome(Ending.FINISHED, data={"stopped": [device for device in names if client.stop(device)]})


def _look_at_daemons() -> list[dict[str, Any]]:
    """Return what each daemon of this store says of itself."""
    found: list[dict[str, Any]] = []
    try:
        names = sorted(name for name in os.listdir(client.folder()) if name.endswith(".device"))
    except OSError:
        return []
    for name in names:
        with open(os.path.join(client.folder(), name), encoding="utf-8") as file:
            device = file.read()
        try:
            told = client.ask(device, "status")
        except Failure as failure:
            found.append({"device": device, "trouble": str(failure)})
            continue
        if told is not None and isinstance(told.data, dict):
            found.append(told.data)
    return found


def _list_devices() -> Outcome:
    """List what can be used and what is kept. Asks programs, so it runs where it can be killed."""
    import asyncio

    from ..ui.devices import find_all_devices

    kept = {str(each["device"]): each for each in _look_at_daemons()}
    devices: list[dict[str, object]] = [
        {"name": entry.name, "usable": entry.usable, "detail": entry.detail, "kept": kept.pop(entry.name, None)}
        for entry in asyncio.run(find_all_devices())
    ]
    devices += [{"name": name, "usable": True, "detail": "", "kept": each} for name, each in kept.items()]
    return Outcome(Ending.FINISHED, data={"devices": devices})


# --- for a person ---------------------------------------------------------------------------------------------


def _write(text: str) -> None:
    from ..core.visible_text import visible

    write_quietly(sys.stdout, visible(text) + "\n", signals_heard)


def _show(envelope: Envelope) -> None:
    """Write what the steps gave: text as it is, of the others a line."""
    data = envelope.data
    steps: Any = data.get("stepResults") if isinstance(data, dict) else None
    for step in steps or ():
        told = step["data"]
        if step["success"] and "text" in told:
            for line in told["all"] if "all" in told else str(told["text"]).split("\n"):
                _write(line)
        elif step["success"] and "value" in told:
            _write(f"{told['label']}: {told['value']}")
        else:
            _write(f"{'ok' if step['success'] else 'failed'}  {step['id']}  {step['actionType']}")


def _show_rehearsal(envelope: Envelope) -> None:
    _show_data(envelope)


def _show_data(envelope: Envelope) -> None:
    import json

    if envelope.ok:
        _write(json.dumps(envelope.data, ensure_ascii=False))


def _show_devices(envelope: Envelope) -> None:
    data = envelope.data
    for each in data["devices"] if isinstance(data, dict) else ():  # type: ignore[attr-defined]
        kept = each["kept"]
        state = "kept" if kept else "usable" if each["usable"] else "not usable"
        _write(f"{each['name']}  {state}  {each['detail']}")
