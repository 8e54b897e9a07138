"""`shotclock ui`: executions on a browser or a phone, whole payloads or single verbs, and the devices."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from ..calls.call import Call, Outcome
from ..core.envelope import Envelope, stop_problem
from ..core.errors import Ending, Failure, SideEffects
from ..core.limits import NS_PER_MS, parse_duration_ms
from ..core.value_types import JsonObject
from ..core.visible_text import visible
from ..supervise.clock import monotonic_ns
from ..terminal.output import Signalled, StopListener, is_terminal, read_stdin, write_quietly
from ..terminal.parser import CommandTable, Option, Subcommand, explain
from ..terminal.subcommand import TIMEOUT_MS, ChildWork, admit_call, conclude, deliver, unstarted
from . import client
from .device import DEFAULT_DEVICE, kind_of
from .payload import Execution, parse_payload, read_execution
from .verbs import VERBS, Input, build

DEVICE_VARIABLE = "SHOTCLOCK_UI_DEVICE"
STDIN_LIMIT_MS = 2_000  # a writer that keeps the pipe open reaches it
MAX_FILE_BYTES = 1_000_000  # above the limit of a payload, so that a larger one is refused for its size


def _number(text: str) -> object:
    """Read milliseconds or a duration. A number that is illegal there is refused later, with its path."""
    try:
        number = float(text)
    except ValueError:
        return parse_duration_ms(text)
    return int(number) if number == number and abs(number) < 1e15 and number == int(number) else number


def _point(text: str) -> dict[str, float]:
    x, _, y = text.partition(",")
    try:
        return {"x": float(x), "y": float(y)}
    except ValueError:
        raise ValueError(f"{text!r} is not a point: write X,Y") from None


def _device_name(name: str) -> str:
    try:
        kind_of(name)
    except Failure as unknown:
        raise ValueError(str(unknown)) from None
    return name


_DEVICE = Option.taking(
    "--device", "NAME", f"browser, cdp:URL or android:SERIAL [{DEVICE_VARIABLE}, or browser].", read=_device_name
)
_RUN = (
    _DEVICE,
    Option.flag("--validate-only", "Validate the execution and show it. Nothing runs."),
    Option.flag("--dry-run", "Show the plan of the execution. Nothing runs.", excludes=("--validate-only",)),
)


def _parameter(each: Input) -> Option:
    name, text = each.name.replace("_", "-"), each.text
    if each.by_place:
        read, repeats = _number if each.type is int else None, each.type is list
        return Option.argument(name, text, read=read, repeats=repeats, choices=each.choices)
    if each.type is bool:
        return Option.flag(f"--{name}", text)
    if each.type is int:
        return Option.taking(f"--{name}", "MS" if name == "timeout" else "N", text, read=_number)
    return Option.taking(f"--{name}", "X,Y" if name == "at" else "TEXT", text, read=_point if name == "at" else None)


def _verb(name: str) -> Subcommand:
    options = [_parameter(each) for each in VERBS[name].inputs]
    if all(each.key != "timeout" for each in options):
        options.append(Option.taking("--timeout", "MS", "The execution's timeoutMs [30000].", read=_number))
    return Subcommand(name, VERBS[name].text, (*options, *_RUN), partial(_execute, name))


def _execute(verb: str, **values: Any) -> Callable[[bool], int]:
    name = f"ui {verb}"

    def start(as_json: bool) -> int:
        try:
            execution = _read(verb, values)
        except Failure as failure:
            return deliver(unstarted(name, failure), as_json)
        if values["validate_only"] or values["dry_run"]:
            data: dict[str, object] = {"ok": True, "validated": True, "execution": execution.written}
            if values["dry_run"]:
                data = {"ok": True, "dryRun": True, "plan": execution.plan}
            call = admit_call(name, TIMEOUT_MS)
            return deliver(conclude(call, lambda: Outcome(Ending.FINISHED, data=data)), as_json, _show_data)
        most_ms = client.START_LIMIT_MS + client.RESULT_MARGIN_MS + execution.timeout_ms
        call = admit_call(name, most_ms, mutates=execution.mutates)
        envelope = conclude(call, lambda: _run(call, execution, values["device"]))
        now_ns, timeout_ms = monotonic_ns(), min(execution.timeout_ms, call.bound.limit_ms)
        envelope.meta |= {  # not the daemon's own
            "duration_ms": (now_ns - call.time.began_ns) // NS_PER_MS,
            "timeout_ms": timeout_ms,
            "remaining_ms": max(0, timeout_ms - (now_ns - call.started_ns) // NS_PER_MS),
        }
        return deliver(envelope, as_json, _show_steps)

    return start


def _read(verb: str, values: JsonObject) -> Execution:
    if verb == "exec":
        written = values["file"] or values["execution"]
        return read_execution(_read_payload(written), timeout_ms=values["timeout"])
    if isinstance(file := values.get("file"), str):
        values = {**values, "file": os.path.abspath(file)}
    elif file:
        values = {**values, "file": [os.path.abspath(each) for each in file]}
    return read_execution(build(verb, values, values["timeout"]))


def _read_payload(written: str | None) -> object:
    if written is None:
        errors = [{"field": "execution", "message": "is missing: use --execution JSON, a FILE, or - for stdin"}]
        raise Failure("MISSING_ARGUMENT", f"execution {errors[0]['message']}", context={"errors": errors})
    if written.lstrip()[:1] in ("{", "["):
        return parse_payload(written)
    if written == "-":
        if sys.stdin is None or is_terminal(sys.stdin):
            raise Failure("INPUT_REQUIRED", "the payload is read from stdin, which is a terminal: pipe it in")
        data = bytearray()
        for chunk in read_stdin(STDIN_LIMIT_MS):  # which must arrive at once
            data += chunk
            if len(data) > MAX_FILE_BYTES:
                break
        return parse_payload(bytes(data))
    try:
        with open(written, "rb") as file:
            return parse_payload(file.read(MAX_FILE_BYTES))
    except FileNotFoundError:
        hint = explain(written, (), "shotclock ui exec")[1] or None
        raise Failure("FILE_NOT_FOUND", f"there is no file {written!r}", suggestion=hint) from None
    except OSError as error:
        raise Failure("FILE_UNREADABLE", f"{written!r} cannot be read: {error.strerror}") from None


def _run(call: Call, execution: Execution, device: str | None) -> Outcome | Envelope:
    remaining_ms = None
    if call.bound.owner != call.name and call.bound.bell is not None:
        remaining_ms = call.bound.bell.remaining_ms(monotonic_ns())
    requests: list[client.DeviceRequest] = []
    try:
        StopListener.raise_at_once()
        return client.execute(
            _device(device),
            execution.written,
            remaining_ms=remaining_ms,
            traceparent=call.trace.traceparent,
            on_request=requests.append,
        )
    except Signalled as signalled:  # the socket is closed, and the daemon stops the execution
        outcome = Outcome(Ending.CANCELLED, stop_problem(signalled.name), {"partial": True, "stepResults": []})
        outcome.side_effects = SideEffects.NONE
        for request in requests:
            outcome.data = {"partial": True, "stepResults": request.steps}
            outcome.side_effects = request.effects_on(execution)
        return outcome


def _device(name: str | None) -> str:
    return name or os.environ.get(DEVICE_VARIABLE) or DEFAULT_DEVICE


def _start(device: str | None, idle: int) -> Callable[[bool], int]:
    def body() -> Envelope:
        request = client.DeviceRequest(_device(device), "start")
        if not client.is_running(request.device):
            client.start_daemon(request.device, idle_ms=idle or client.DEFAULT_IDLE_MS).close()
            request.has_started = True
        return request.run(client.RESULT_MARGIN_MS)

    return lambda as_json: _manage("ui start", client.START_LIMIT_MS * 2, body, as_json)


def _stop(device: str | None, all: bool) -> Callable[[bool], int]:
    def body() -> Outcome:
        names = [str(each["device"]) for each in _find_daemons()] if all else [_device(device)]
        return Outcome(Ending.FINISHED, data={"stopped": [name for name in names if client.stop(name)]})

    return lambda as_json: _manage("ui stop", client.RESULT_MARGIN_MS + client.STOP_LIMIT_MS, body, as_json)


def _manage(name: str, timeout_ms: int, body: Callable[[], Outcome | Envelope], as_json: bool) -> int:
    StopListener.raise_at_once()
    call = admit_call(name, timeout_ms, mutates=True, idempotent=True)
    return deliver(conclude(call, body), as_json, _show_data)


def _find_daemons() -> list[JsonObject]:
    from pathlib import Path  # slow to import; the other verbs do not need it

    found: list[JsonObject] = []
    for path in sorted(Path(client.folder()).glob("*.device")):
        device = path.read_text(encoding="utf-8")
        try:
            status = client.find_status(device)
        except Failure as failure:
            found.append({"device": device, "trouble": str(failure)})
            continue
        if status is not None and isinstance(status.data, dict):
            found.append(status.data)
    return found


def _list_devices() -> Outcome:
    """List the usable and the running devices. It runs programs, so it runs where it can be killed."""
    import asyncio  # slow to import, as the runtime is, which other verbs do not need

    from .daemon import find_all_devices

    running = {str(each["device"]): each for each in _find_daemons()}
    devices: list[dict[str, object]] = [
        {"name": entry.name, "usable": entry.usable, "detail": entry.detail, "kept": running.pop(entry.name, None)}
        for entry in asyncio.run(find_all_devices())
    ]
    devices += [{"name": name, "usable": True, "detail": "", "kept": each} for name, each in running.items()]
    return Outcome(Ending.FINISHED, data={"devices": devices})


def _write(text: str) -> None:
    write_quietly(sys.stdout, visible(text) + "\n")


def _show_steps(envelope: Envelope) -> None:
    steps: Any = envelope.data.get("stepResults") if isinstance(envelope.data, dict) else None
    for step in steps or ():
        data = step["data"]
        if step["success"] and "tabs" in data:
            for tab in data["tabs"]:
                _write(f"{'*' if tab.get('active') else ' '} {tab['tab']}  {tab['where']}  {tab['title']}")
        elif step["success"] and "text" in data:
            for line in data["all"] if "all" in data else str(data["text"]).split("\n"):
                _write(line)
        elif step["success"] and "value" in data:
            _write(f"{data['label']}: {data['value']}")
        else:
            _write(f"{'ok' if step['success'] else 'failed'}  {step['id']}  {step['actionType']}")
        for note in data.get("opened", ()):
            _write(f"  opened {' '.join(str(note[key]) for key in ('kind', 'tab', 'where', 'state') if note.get(key))}")
        for note in data.get("dialogs", ()):
            _write(f"  {note['answer']} {note['type']}: {note['message']}")


def _show_data(envelope: Envelope) -> None:
    if envelope.ok:
        _write(json.dumps(envelope.data, ensure_ascii=False))


def _show_devices(envelope: Envelope) -> None:
    data: Any = envelope.data
    for each in data["devices"] if isinstance(data, dict) else ():
        state = "kept" if each["kept"] else "usable" if each["usable"] else "not usable"
        _write(f"{each['name']}  {state}  {each['detail']}")


TABLE = CommandTable(
    "shotclock ui",
    "Run UI actions on a browser or a phone, each within its budget.",
    (
        Subcommand(
            "exec",
            "Run an execution: a payload of actions with a budget over the whole.",
            (
                Option.argument("file", "The file of the payload; - is stdin."),
                Option.taking(
                    "--execution", "JSON", "The payload itself, or its file; - is stdin.", excludes=("file",)
                ),
                Option.taking("--timeout", "MS", "Replaces the payload's timeoutMs.", read=_number),
                *_RUN,
            ),
            partial(_execute, "exec"),
            usage="[FILE | --execution JSON] [OPTIONS]",
        ),
        *map(_verb, VERBS),
        Subcommand(
            "devices",
            "List the devices of this machine and the running ones.",
            (),
            lambda: ChildWork("ui devices", _list_devices, show=_show_devices),
        ),
        Subcommand(
            "start",
            "Start a device before its first command.",
            (
                _DEVICE,
                Option.duration("--idle", "End it after this long without a command.", default="10m"),
            ),
            _start,
        ),
        Subcommand(
            "stop",
            "Stop a device and its processes.",
            (_DEVICE, Option.flag("--all", "Stop every device.", excludes=("--device",))),
            _stop,
        ),
    ),
    "verb",
)

COMMANDS = {"ui": TABLE}
