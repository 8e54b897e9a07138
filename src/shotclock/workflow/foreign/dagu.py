"""DAG files of Dagu, in their old spelling (`continueOn`) and the new one (`continue_on`)."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from ...core.value_types import field, record
from ...providers.provider import STEP_TYPES
from ..yaml_reader import Spot, Tree, quote
from .common import (
    STEPS_LIMIT,
    Draft,
    FileRefused,
    ForeignPath,
    Unconvertible,
    both,
    converted,
    is_scalar,
    literal,
    mapping_at,
    new_draft,
    note_unknown,
    output_of,
    scalar_text,
    slug,
    text_at,
)
from .dagu_variables import Variables
from .result import Imported

KIND = "dagu"
HANDLER_SECONDS = 60  # of a handler without a timeout, in a file that has one
RESERVE_SECONDS = 1  # of each handler, which `check` counts as well
GROUP_LIMIT = 200  # characters of the name of a group of runs

# The old names of keys, by the new ones.
_OLD = {"depend": "depends", "dir": "working_dir", "precondition": "preconditions", "run": "call"}
_TOP_KEYS = {"name", "description", "dotenv", "working_dir", "env", "secrets", "params", "steps", "type", "shell"}
_TOP_KEYS |= {"handler_on", "preconditions", "timeout_sec", "max_active_steps", "max_active_runs"}
_LABELS = "runs are not listed by it"
_KEPT = "runs and their logs are kept as the settings of shotclock say"
_TOP_LOST = {
    **dict.fromkeys(("group", "tags", "labels"), _LABELS),
    **dict.fromkeys(("hist_retention_days", "hist_retention_runs", "log_dir", "log_output", "max_output_size"), _KEPT),
    **dict.fromkeys(("queue", "worker_selector"), "a run starts at once, and on this machine"),
    "otel": "traces are set up by options of shotclock",
    "run_config": "inputs can be changed when a run is started",
    "max_clean_up_time_sec": "a handler has its own timeout",
    "restart_wait_sec": "nothing starts a run by itself here",
    "schedule": "nothing starts a run by itself here",
    "skip_if_successful": "nothing starts a run by itself here",
    "catchup_window": "nothing starts a run by itself here",
    "overlap_policy": "nothing starts a run by itself here",
    "delay_sec": "there is no pause before each step",
    "retry_policy": "a whole run is not tried again",
} | dict.fromkeys(("mail_on", "error_mail", "info_mail", "smtp", "webhook"), "nobody is notified by mail")
_STEP_KEYS = {"name", "id", "description", "command", "script", "shell", "working_dir", "env", "depends", "output"}
_STEP_KEYS |= {"continue_on", "retry_policy", "repeat_policy", "preconditions", "signal_on_stop", "timeout_sec"}
_STEP_KEYS |= {"stdout", "stderr", "executor", "type", "with", "config", "args"}
_STEP_LOST = {
    "log_output": "the log of a step has both of its streams",
    "mail_on_error": "nobody is notified by mail",
    "worker_selector": "it runs here",
    "shell_packages": "install them before the run",
}
_CONTINUING_KEYS = {"failure", "skipped", "exit_code", "output"}
_RETRY_KEYS = {"limit", "interval_sec", "backoff", "max_interval_sec", "exit_code"}
# What a step does with these is not known to a shell.
_OTHER = ("call", "parallel", "container", "llm", "agent", "messages", "routes", "exec", "approval", "tools", "params")
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_HANDLERS = {"cancel": "abort"}  # the older name of a handler
_HAS_PATH = re.compile(r"\$\{([A-Za-z_]\w*)\.[\w.-]+\}")


def looks_like(document: object, file_name: str) -> bool:
    """Return whether a document is a DAG of Dagu, and not a workflow of ours."""
    if not isinstance(document, dict) or not isinstance(document.get("steps"), list | dict):
        return False
    top = set(map(_new_name, document))
    if top & {"schedule", "params", "handler_on", "max_active_runs", "hist_retention_days", "mail_on", "dotenv"}:
        return True
    steps = document["steps"]
    steps = list(steps.values()) if isinstance(steps, dict) else steps
    keys = {_new_name(key) for step in steps if isinstance(step, dict) for key in step}
    kinds = {step.get("type") for step in steps if isinstance(step, dict) and isinstance(step.get("type"), str)}
    if keys & {"exec", "depends_on"} or kinds & (STEP_TYPES.keys() - {"command"}):
        return False
    return bool(keys & {"command", "script", "depends", "continue_on", "retry_policy"})


def convert(tree: Tree, file_name: str) -> Imported:
    return converted(KIND, draft_of, tree, file_name)


def draft_of(tree: Tree, file_name: str) -> Draft:
    """Return the workflow before it is checked. Raises FileRefused or Unconvertible."""
    return _DaguFile(new_draft(KIND, tree), tree.value, Path(file_name).stem).convert()


def _new_name(key: str) -> str:
    made = re.sub(r"(?<=[a-z0-9])([A-Z])", lambda found: f"_{found[1].lower()}", key)
    return _OLD.get(made, made)


def _rename_spots(spot: Spot) -> None:
    """Let the positions of keys be found by their new names as well."""
    for key, inner in list(spot.inside.items()):
        _rename_spots(inner)
        if isinstance(key, str):
            spot.inside.setdefault(_new_name(key), inner)


def _renamed(part: dict[str, Any]) -> dict[str, Any]:
    return {_new_name(key): value for key, value in part.items()}


@record
class _DaguStep:
    name: str
    path: ForeignPath
    part: dict[str, Any]
    waits: list[str] = field(default_factory=list)  # foreign names
    ends: str = ""  # our name


class _DaguFile:
    def __init__(self, draft: Draft, document: dict[str, Any], file_name: str) -> None:
        self.draft, self.document, self.file_name = draft, _renamed(document), file_name
        _rename_spots(draft.tree.spots)
        self.text = json.dumps(document)
        self.is_old = any(key in self.text for key in ('"continueOn"', '"handlerOn"', '"retryPolicy"', '"maxActive'))
        self.variables = Variables(draft, self.document)
        self.first: list[str] = []  # our steps before all others
        self.reserved: set[str] = set()  # the names of all steps
        self.unmet = ""  # the step that checks the preconditions of the file

    def convert(self) -> Draft:
        draft, document = self.draft, self.document
        note_unknown(draft, document, _TOP_KEYS, (), _TOP_LOST)
        for key in ("container", "kubernetes", "defaults"):
            if key in document:
                raise FileRefused(f"`{key}` holds for all steps, and is not known here")
        draft.top |= {key: text_at(draft, document, key, ()) for key in ("name", "description")}
        self.variables.convert()
        seconds = self._seconds(document, "timeout_sec", ())
        draft.top["timeout"] = None if seconds is None else f"{seconds}s"
        most = document.get("max_active_steps")
        if isinstance(most, int) and not isinstance(most, bool) and 1 <= most <= 1000:
            draft.top["max_parallelism"] = most
        group = (draft.top["name"] or self.file_name)[:GROUP_LIMIT]
        if document.get("max_active_runs") == 1 and group and literal(group) == group:
            draft.top["concurrency"] = {"group": group, "on_conflict": "wait"}
        elif document.get("max_active_runs") not in (None, 0):
            draft.lose(("max_active_runs",), "several runs at a time do not wait for each other")
        defaults: dict[str, Any] = {"timeout": "0s"}
        draft.top["defaults"] = defaults
        if shell := self._shell(document.get("shell")):
            defaults["shell"] = shell
        if folder := text_at(draft, document, "working_dir", ()):
            defaults["cwd"] = self.variables.folder(folder)
        steps = self._read_steps()
        self._find_outputs(steps)
        self._convert_first()
        for step in _in_order(steps):
            self._convert_step(step, steps)
        self._convert_handlers()
        return draft

    def _shell(self, written: Any) -> list[str] | None:
        if written is None:
            return None
        words = written if isinstance(written, list) else str(written).split()
        words = [str(word) for word in words]
        name = words[0].rpartition("/")[2] if words else ""
        if name not in ("sh", "bash", "dash", "ash"):
            raise Unconvertible(f"runs in the shell {quote(written)}")
        return [words[0], *(word for word in words[1:] if word not in ("-e", "-c"))]

    def _seconds(self, holder: dict[str, Any], key: str, path: ForeignPath) -> int | None:
        value = holder.get(key)
        if value in (None, 0):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 100_000_000:
            raise Unconvertible(f"has a {key} that is no number of seconds")
        return value

    # --- the graph

    def _read_steps(self) -> dict[str, _DaguStep]:
        written = self.document.get("steps")
        if isinstance(written, dict):
            listed: list[Any] = [
                {"name": name, **part} if isinstance(part, dict) else part for name, part in written.items()
            ]
            keys: list[str | int] = list(written)
        elif isinstance(written, list):
            listed, keys = written, list(range(len(written)))
        else:
            raise FileRefused("`steps` should be a list or a mapping of steps")
        if len(listed) > STEPS_LIMIT:
            raise FileRefused(f"it has more than {STEPS_LIMIT} steps")
        kind = self.document.get("type", "chain")
        if kind not in ("graph", "chain"):
            raise FileRefused(f"a DAG of type {quote(kind)} is not known here")
        steps: dict[str, _DaguStep] = {}
        before: list[str] = []
        for key, entry in zip(keys, listed, strict=True):
            group = entry if isinstance(entry, list) else [entry]
            names = []
            for number, each in enumerate(group):
                path = ("steps", key, number) if isinstance(entry, list) else ("steps", key)
                step = self._read_step(each, path, len(steps) + 1)
                if step.name in steps:
                    raise FileRefused(f"the step {quote(step.name)} is there twice")
                if kind == "chain" and "depends" not in step.part:
                    step.waits = list(before)
                steps[step.name] = step
                names.append(step.name)
            before = names
        by_id = {str(step.part["id"]): name for name, step in steps.items() if "id" in step.part}
        for step in steps.values():
            depends = step.part.get("depends")
            listed = depends if isinstance(depends, list) else [] if depends in (None, "") else [depends]
            step.waits += [by_id.get(str(each), str(each)) for each in listed]
            if unknown := [each for each in step.waits if each not in steps]:
                raise FileRefused(f"the step {quote(step.name)} waits for {quote(unknown[0])}, which is not there")
        if "type" not in self.document and any("depends" not in each.part for each in list(steps.values())[1:]):
            message = (
                "the steps run one after another, as in newer versions; older ones ran those without `depends` at once"
            )
            if self.is_old:
                self.draft.differ(("steps",), message)
        return steps

    def _read_step(self, written: Any, path: ForeignPath, number: int) -> _DaguStep:
        part = {"command": written} if isinstance(written, str) else written
        if not isinstance(part, dict):
            raise FileRefused(f"step {number} is neither a mapping nor a command: {quote(written)}")
        part = _renamed(part)
        name = part.get("name", part.get("id"))
        return _DaguStep(scalar_text(name) if is_scalar(name) and name else f"step-{number}", path, part)

    def _find_outputs(self, steps: dict[str, _DaguStep]) -> None:
        for step in steps.values():
            step.ends = self._free(step.name)
            self.reserved.add(step.ends)
            output = step.part.get("output")
            output = output.get("name") if isinstance(output, dict) else output
            if isinstance(output, str) and output.lstrip("$").isidentifier():
                self.variables.outputs[output.lstrip("$")] = step.ends

    def _free(self, wanted: str) -> str:
        """Return a name that no step has or will have."""
        made, number = slug(wanted), 1
        while made in self.reserved or made in self.draft.steps or made in self.draft.final:
            number += 1
            made = f"{slug(wanted)}-{number}"
        return made

    def _convert_first(self) -> None:
        handlers = _renamed(mapping_at(self.document, "handler_on"))
        script = self._tests(self.document.get("preconditions"))
        if script is not None:
            made = {"exec": f"{script} || {{ echo 'the preconditions are not met' >&2; exit 1; }}"}
            self.draft.differ(("preconditions",), "where they are not met, the run fails and starts no step")
            self.unmet = self.draft.add(self._free("preconditions"), made, ("preconditions",))
            self.first = [self.unmet]
        if "init" in handlers:
            step = self._read_step(handlers["init"], ("handler_on", "init"), 0)
            step.part.pop("name", None)
            name = self._free("on-init")
            self._write(name, step, {"depends_on": list(self.first)} if self.first else {})
            self.first = [name]

    def _convert_step(self, step: _DaguStep, steps: dict[str, _DaguStep]) -> None:
        waits = [steps[each].ends for each in step.waits] or list(self.first)
        made: dict[str, Any] = {"depends_on": waits} if waits else {}
        guarded = [steps[each].part for each in step.waits if "preconditions" in steps[each].part]
        accepted = [_goes_on_skipped(part) for part in guarded]
        if accepted and all(accepted):
            made["accept_skipped"] = True
        elif any(accepted):
            self.draft.lose(step.path, "is skipped with the first of the steps before it that is skipped")
        name = step.ends
        try:
            script = self._tests(step.part.get("preconditions"))
        except Unconvertible as reason:
            self.draft.add(name, made, step.path)
            self.draft.refuse_step(name, str(reason))
            return
        if script is not None:
            check = self._free(f"{name}-check")
            self.draft.add(
                check,
                {**made, **self.variables.own_env(script, {}), "exec": f"if {script}; then echo yes; else echo no; fi"},
                step.path,
            )
            made["depends_on"] = [*waits, check]
            made["if"] = both(f"{output_of(check)} == 'yes'")
        self._write(name, step, made)

    def _tests(self, written: Any) -> str | None:
        """Return preconditions as a command that succeeds if all are met."""
        entries = written if isinstance(written, list) else [] if written is None else [written]
        made = []
        for entry in entries:
            part = {"condition": entry} if isinstance(entry, str) else entry
            if not isinstance(part, dict) or not isinstance(part.get("condition"), str):
                raise Unconvertible(f"has a precondition that cannot be read: {quote(entry)}")
            condition, expected = self.variables.script(part["condition"]), part.get("expected")
            if expected is None:
                command = condition.strip()
                command = command[1:-1] if re.fullmatch(r"`[^`]*`", command) else command
                test = f"(\n{command}\n) >&2"
            elif isinstance(expected, str) and expected.startswith("re:"):
                test = f"printf '%s\\n' {_quoted(condition)} | grep -Eq -- {shlex.quote(expected[3:])}"
            elif is_scalar(expected):
                test = f"[ {_quoted(condition)} = {_quoted(self.variables.script(scalar_text(expected)))} ]"
            else:
                raise Unconvertible(f"has a precondition that cannot be read: {quote(entry)}")
            made.append(f"! {{ {test}; }}" if part.get("negate") is True else test)
        return " && ".join(made) if made else None

    # --- one step

    def _write(self, name: str, step: _DaguStep, made: dict[str, Any]) -> None:
        try:
            made = {**made, **self._settings(step, step.path)}
            self.draft.add(name, made, step.path)
        except Unconvertible as reason:
            self.draft.add(name, made, step.path)
            self.draft.refuse_step(name, f"it {reason}")

    def _settings(self, step: _DaguStep, path: ForeignPath) -> dict[str, Any]:
        part, draft = step.part, self.draft
        for key in _OTHER:
            if part.get(key) not in (None, [], {}):
                raise Unconvertible(f"has the key `{key}`, which is not known here")
        note_unknown(draft, part, _STEP_KEYS, path, _STEP_LOST)
        made: dict[str, Any] = self._work(step, path)
        env = self.variables.read(part, self.variables.env)
        if "exec" in made:
            made |= self.variables.own_env(made["exec"], env)
        elif env:
            made["env"] = env
        if folder := text_at(draft, part, "working_dir", path):
            made["cwd"] = self.variables.folder(folder)
        seconds, limit = self._seconds(part, "timeout_sec", path), self._seconds(self.document, "timeout_sec", ())
        if seconds is not None and (limit is None or seconds < limit - 1):
            made["timeout"] = f"{seconds}s"
        if (signal := part.get("signal_on_stop")) is not None:
            if signal in _SIGNALS:
                made["stop_signal"] = signal
            else:
                draft.lose((*path, "signal_on_stop"), f"a step is asked to stop by one of {', '.join(_SIGNALS)}")
        made |= self._continuing(part, path)
        repeat = part.get("repeat_policy")
        if repeat is not None and not (isinstance(repeat, dict) and repeat.get("repeat") is False):
            raise Unconvertible("is repeated until something holds")
        if retry := self._retry(part, path):
            made["on_fail"] = {"retry": retry}
        made["description"] = text_at(draft, part, "description", path)
        if isinstance(output := part.get("output"), dict) and output.keys() - {"name", "key", "omit"}:
            raise Unconvertible("has an output of several parts")
        if "exec" in made and output is not None and not any(found == output for found in _HAS_PATH.findall(self.text)):
            made["output_format"] = "text"
        return {key: value for key, value in made.items() if value is not None}

    def _work(self, step: _DaguStep, path: ForeignPath) -> dict[str, Any]:
        part = step.part
        kind = part.get("executor", part.get("type", "command"))
        config = part.get("with", part.get("config", {}))
        if isinstance(kind, dict):
            kind, config = kind.get("type", "command"), kind.get("config", {})
        config = config if isinstance(config, dict) else {}
        if kind == "http":
            return self._http(part, config)
        if kind in ("mail", "log"):
            self.draft.lose(path, "no mail is sent" if kind == "mail" else "what it logs is not printed")
            return {"exec": ":"}
        if kind not in ("command", "shell", "", None) or (kind == "command" and config):
            raise Unconvertible(f"is run by {quote(kind)}")
        script, command = part.get("script"), part.get("command")
        shell = self._shell(part.get("shell"))
        if isinstance(command, list):
            command = self._joined(command)
        if isinstance(command, str) and part.get("args") is not None:
            command = f"{command} {part['args']}"
        if script is not None and not isinstance(script, str):
            raise Unconvertible("has a script that is no text")
        if command is not None and not isinstance(command, str):
            raise Unconvertible("has a command that is no text")
        text = command if script is None else script
        if text is None or not text.strip():
            raise Unconvertible("has no command")
        if script is not None and command:
            words = command.split()
            if words[0].rpartition("/")[2] in ("sh", "bash"):
                shell, text = self._shell(command), script
            else:
                text = _script_file(command, script)
        if "\n" in text.strip() and "set -e" not in text:
            self.draft.differ(path, "a command of several lines ends at the first one that fails")
        made = {"exec": self.variables.script(text)}
        streams = [
            f"exec {mark}{_quoted(self.variables.script(str(part[key])))}"
            for key, mark in (("stdout", ">"), ("stderr", "2>"))
            if key in part
        ]
        if "stdout" in part and "output" in part:
            raise Unconvertible("writes its output to a file and to a variable")
        made["exec"] = "\n".join([*streams, made["exec"]])
        return {**made, "shell": shell} if shell else made

    def _joined(self, command: list[Any]) -> str:
        """Return a list as commands one after another, or as the words of one. It was the latter in older versions."""
        texts = [scalar_text(each) for each in command if is_scalar(each)]
        if len(texts) != len(command) or not texts:
            raise Unconvertible("has a command that is no list of texts")
        if len(texts) == 1:
            return texts[0]
        if self.is_old or any(text.startswith("-") for text in texts[1:]):
            return " ".join(text if "$" in text and '"' not in text else shlex.quote(text) for text in texts)
        if all(" " in text.strip() for text in texts):
            return "\n".join(texts)
        raise Unconvertible("has a list that is several commands, or one command with arguments: write it as text")

    def _http(self, part: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        command = part.get("command")
        method, _, url = command.partition(" ") if isinstance(command, str) else ("", "", "")
        if not url.strip() or "$" in json.dumps([command, config]):
            raise Unconvertible("is an HTTP request with variables, or without an address")
        made: dict[str, Any] = {"type": "http_client", "method": method, "url": literal(url.strip())}
        for key, ours in (("headers", "headers"), ("query", "params"), ("body", "body")):
            if isinstance(config.get(key), str | dict):
                made[ours] = json.loads(literal(json.dumps(config[key])))
        seconds = config.get("timeout")
        made["timeout"] = f"{seconds}s" if isinstance(seconds, int) and 0 < seconds < 100_000 else None
        if lost := config.keys() - {"headers", "query", "body", "timeout", "silent", "json"}:
            raise Unconvertible(f"is an HTTP request with {', '.join(sorted(map(str, lost)))}")
        return made

    def _continuing(self, part: dict[str, Any], path: ForeignPath) -> dict[str, Any]:
        written = part.get("continue_on")
        if written in ("failed", "failure"):
            return {"continue_on_failure": True}
        found = _renamed(written) if isinstance(written, dict) else {}
        note_unknown(self.draft, found, _CONTINUING_KEYS, (*path, "continue_on"), {})
        if written is not None and not isinstance(written, dict) and written != "skipped":
            self.draft.lose((*path, "continue_on"), "should be `failed`, `skipped` or a mapping")
        if found.get("exit_code") not in (None, []) or found.get("output") not in (None, []):
            self.draft.lose((*path, "continue_on"), "later steps do not run after a failure of a certain kind")
        return {"continue_on_failure": True} if found.get("failure") is True else {}

    def _retry(self, part: dict[str, Any], path: ForeignPath) -> dict[str, Any] | None:
        written = _renamed(mapping_at(part, "retry_policy"))
        if not written:
            return None
        note_unknown(self.draft, written, _RETRY_KEYS, (*path, "retry_policy"), {})
        limit, pause = written.get("limit"), written.get("interval_sec", 0)
        if (
            isinstance(limit, bool)
            or not isinstance(limit, int)
            or not 0 <= limit <= 1000
            or not isinstance(pause, int)
        ):
            self.draft.lose((*path, "retry_policy"), "the step is not tried again: `limit` or `interval` is no number")
            return None
        grows = written.get("backoff") not in (None, False)
        backoff: dict[str, Any] = {"mode": "exponential" if grows else "fixed", "delay_ms": abs(pause) % 10**7 * 1000}
        if grows and written["backoff"] not in (True, 2, 2.0):
            self.draft.differ((*path, "retry_policy"), "each pause is twice as long as the one before")
        longest = written.get("max_interval_sec")
        if isinstance(longest, int) and not isinstance(longest, bool) and 0 < longest < 10**7:
            backoff["max_delay_ms"] = longest * 1000
        codes = written.get("exit_code", [])
        made: dict[str, Any] = {"max": limit, "backoff": backoff}
        codes = [
            code for code in (codes if isinstance(codes, list) else [codes]) if type(code) is int and 0 < code < 256
        ]
        return {**made, "on": codes} if codes else made

    # --- handlers

    def _convert_handlers(self) -> None:
        """Write the handlers as a chain of final steps: the one for the outcome, and then that for any."""
        draft = self.draft
        handlers = {_HANDLERS.get(kind, kind): kind for kind in _renamed(mapping_at(self.document, "handler_on"))}
        for kind in ("success", "failure", "abort", "exit"):
            if kind not in handlers:
                continue
            written = handlers.pop(kind)
            path = ("handler_on", written)
            step = self._read_step(_renamed(mapping_at(self.document, "handler_on"))[written], path, 0)
            name = self._free(f"on-{kind}")
            made: dict[str, Any] = {"depends_on": [{each: "ended"} for each in draft.final]} if draft.final else {}
            if condition := self._outcome(kind):
                made["if"] = condition
            draft.final[name], draft.paths[name] = made, path
            try:
                draft.final[name] = {**made, **self._settings(step, path)}
                if (seconds := self._seconds(step.part, "timeout_sec", path)) is not None:  # also if the run has less
                    draft.final[name]["timeout"] = f"{seconds}s"
                self._add_outcome(draft.final[name])
            except Unconvertible as reason:
                draft.refuse_step(name, f"it {reason}")
        self._add_time()
        for kind, written in handlers.items():
            if kind != "init":
                draft.lose(("handler_on", written), "there is no such handler here")

    def _add_time(self) -> None:
        """Add the time of the handlers to that of the run. There, they run when it is over as well."""
        seconds = self._seconds(self.document, "timeout_sec", ())
        if seconds is None or not self.draft.final:
            return
        for step in self.draft.final.values():
            step.setdefault("timeout", f"{HANDLER_SECONDS}s")
            found = re.fullmatch(r"(\d+)s", step["timeout"])
            seconds += RESERVE_SECONDS + (int(found[1]) if found else HANDLER_SECONDS)
        self.draft.top["timeout"] = f"{seconds}s"
        message = f"a handler has {HANDLER_SECONDS} seconds or its own timeout, which were added to that of the run"
        self.draft.differ(("timeout_sec",), message)

    def _outcome(self, kind: str) -> str | None:
        """Return the condition of a handler. Where the preconditions are not met, the run counts as aborted there."""
        unmet = f"steps['{self.unmet}'].status == 'failed'" if self.unmet else ""
        if kind == "failure":
            failed = "run.status in ['failed', 'timed_out']"
            return f"{failed} and not {unmet}" if unmet else failed
        if kind == "abort":
            return f"run.status == 'cancelled' or {unmet}" if unmet else "run.status == 'cancelled'"
        return "run.status == 'succeeded'" if kind == "success" else None

    def _add_outcome(self, step: dict[str, Any]) -> None:
        """Add the variables with which Dagu tells a handler about the run, where its command uses them."""
        aborted = f"({self._outcome('abort')})"
        status = f"{{{{ 'aborted' if {aborted} else 'succeeded' if run.status == 'succeeded' else 'failed' }}}}"
        values = {"DAG_RUN_STATUS": status, "DAG_RUN_ID": "{{ run.id }}", "DAG_NAME": "{{ run.name }}"}
        used = {name: text for name, text in values.items() if re.search(rf"\b{name}\b", step.get("exec", ""))}
        if used:
            step["env"] = {**used, **step.get("env", {})}


def _in_order(steps: dict[str, _DaguStep]) -> list[_DaguStep]:
    """Return the steps, each after those that it waits for. Raises FileRefused."""
    made: dict[str, _DaguStep] = {}
    while len(made) < len(steps):
        ready = {
            name: step for name, step in steps.items() if name not in made and all(each in made for each in step.waits)
        }
        if not ready:
            raise FileRefused("some steps wait for each other")
        made |= ready
    return list(made.values())


def _goes_on_skipped(part: dict[str, Any]) -> bool:
    written = part.get("continue_on")
    return written == "skipped" or (isinstance(written, dict) and written.get("skipped") is True)


def _quoted(text: str) -> str:
    """Return text in double quotes, in which the shell still replaces variables and commands."""
    pieces = re.split(r"(`[^`]*`|\$\([^()]*\))", text)
    return '"' + "".join(each if number % 2 else each.replace('"', '\\"') for number, each in enumerate(pieces)) + '"'


def _script_file(command: str, script: str) -> str:
    """Return a command that runs another program on a script."""
    return (
        f"script=$(mktemp)\ntrap 'rm -f \"$script\"' EXIT\n"
        f'cat > "$script" <<\'END_OF_SCRIPT\'\n{script.rstrip()}\nEND_OF_SCRIPT\n{command} "$script"'
    )
