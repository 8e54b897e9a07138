"""The steps of Visor files, one function for each of its types."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...core.value_types import JsonObject, record, replace
from ..file.loader import find_id
from ..file.templates import mentions
from ._expression import Unsayable
from ._visor_file import Path_, VisorFile, with_output

PROMPT_LIMIT, SCHEMA_LIMIT = 1_000_000, 200_000  # bytes of a file
AI_DIFFERS = "Visor adds the pull request to a prompt and gives its agent tools that search code: here neither happens"
_PRESENTATION = frozenset({"group", "template", "criticality", "include_pr_context", "include_dependencies", "level"})
_LEFT_OUT = {
    "on": "there are no events here: the step runs whenever the workflow does",
    "triggers": "the step runs whichever files changed",
    **dict.fromkeys(("reuse_ai_session", "session_mode"), "each step has a conversation of its own here"),
    "on_finish": "write a step with `depends_on: {STEP: ended}`",
    "on_init": "write the steps before this one, and let it wait for them",
    "max_runs": "a step goes back ten times at most here",
    "schedule": "there is no scheduler here: start `shotclock run` from cron",
    "rate_limit": "requests are not slowed down here",
    "failure_conditions": "write them as `fail_if`",
    **dict.fromkeys(("fanout", "reduce"), "a step that a reaction runs, runs once here"),
    "debounce": "starts are not put together here",
    **dict.fromkeys(("overrides", "workflow_overrides"), "a workflow runs here as it is written"),
    "output_mapping": "take the outputs by their own names",
    "ai_custom_tools_js": "tools that are computed cannot be given to an agent",
    "ai_mcp_servers_js": "servers that are computed cannot be given to an agent",
    "argsTransform": "write the arguments as `arguments`",
    "token": "set the variable GITHUB_TOKEN where it runs",
    "sandbox": "steps run on this machine",
}
_UNKNOWN_TYPES = {
    "script": "scripts are not converted: write a command",
    "memory": "there is no memory between steps here: hand values on as outputs",
    "claude-code": "there is no such step here: write a command with `claude --print`",
    "github": "there are no operations on GitHub here: write a command with `gh`",
    "http_input": "a step does not wait for requests here: start `shotclock run` when one comes",
    "a2a": "there is no client of A2A here",
    "utcp": "there is no client of UTCP here",
}
_ISSUE = {
    **{name: {"type": "string"} for name in ("file", "ruleId", "message", "category", "suggestion", "replacement")},
    **{name: {"type": "integer"} for name in ("line", "endLine")},
    "severity": {"type": "string", "enum": ["info", "warning", "error", "critical"]},
}
_REQUIRED = ["file", "line", "ruleId", "message", "severity"]
_SCHEMAS: dict[str, JsonObject] = {
    "code-review": {
        "type": "object",
        "required": ["issues"],
        "properties": {
            "issues": {"type": "array", "items": {"type": "object", "required": _REQUIRED, "properties": _ISSUE}}
        },
    },
    "overview": {
        "type": "object",
        "required": ["text"],
        "properties": {"text": {"type": "string"}, "tags": {"type": "object"}},
    },
}


class _Unconverted(Exception):
    """A step without which the rest of its keys means nothing cannot be converted, and why."""


@record
class _VisorStep:
    """A step on its way: keys are taken out of `left`, and what stays is noted."""

    file: VisorFile
    name: str
    kind: str
    left: JsonObject
    made: JsonObject

    def path(self, *keys: str | int) -> Path_:
        return (self.file.key, self.name, *keys)

    def lose(self, key: str, message: str) -> None:
        self.left.pop(key, None)
        self.file.notes.add(self.path(key), message)

    def required(self, key: str, *, is_command: bool = False, as_key: str | None = None) -> None:
        """Convert a text without which there is no step."""
        if key not in self.left:
            raise _Unconverted(f"it has no `{key}`")
        text = self.file.text(self.path(key), self.left.pop(key), is_command=is_command)
        if text is None or not text.strip():
            raise _Unconverted(f"its `{key}` cannot be said here")
        self.made[as_key or key] = text

    def optional(self, key: str, as_key: str | None = None) -> None:
        """Convert a text that may be there. Where it cannot be said, neither can the step."""
        if self.left.get(key) is not None:
            self.required(key, as_key=as_key)
        self.left.pop(key, None)

    def plain(self, key: str, kinds: type | tuple[type, ...], as_key: str | None = None) -> None:
        """Copy a value of the right type."""
        if key not in self.left:
            return
        value = self.left.pop(key)
        if isinstance(value, kinds) and not (isinstance(value, bool) and kinds is int):
            self.made[as_key or key] = value
        elif value is not None:
            self.file.notes.add(self.path(key), "it is of another type than expected")

    def values(self, key: str, as_key: str | None = None) -> None:
        if key in self.left:
            try:
                self.made[as_key or key] = self.file.values(self.path(key), self.left.pop(key))
            except Unsayable as why:
                raise _Unconverted(f"its `{key}` has {why}") from None

    def limit(self, key: str, unit: str) -> None:
        made = self.file.duration(self.path(key), self.left.pop(key, None), unit)
        if made is not None:
            self.made[key] = made


def convert_step(file: VisorFile, name: str, written: JsonObject) -> JsonObject:
    """Return a step of ours. One that cannot be converted is a step that fails and says why."""
    written_type = written.get("type") or ("command" if "exec" in written else "ai")
    kind = written_type if isinstance(written_type, str) else ""
    step = _VisorStep(file, name, kind, {key: value for key, value in written.items() if key != "type"}, {})
    _order(step)
    try:
        convert = STEP_KINDS.get(kind)
        if convert is None:
            what = _UNKNOWN_TYPES.get(kind, "there is no such type of step here")
            file.notes.add(step.path("type"), f"`{kind[:40]}`: {what}", is_failing=True)
            raise _Unconverted(what)
        convert(step)
        _transform(step)
    except _Unconverted as why:
        if STEP_KINDS.get(kind) is not None:
            file.notes.add(step.path(), f"the step fails until it is written anew: {why}", is_failing=True)
        return failing_step(file, name, str(why), step.made)
    _gates(step)
    _reactions(step)
    _rest(step)
    return step.made


def failing_step(file: VisorFile, name: str, why: str, step: JsonObject) -> JsonObject:
    """Return a step in the place of one that cannot be converted. What depends on it does not run."""
    file.failing.add(name)
    kept: JsonObject = {key: step[key] for key in ("depends_on", "tags", "for_each") if key in step}
    said = re.sub(r"[{}%]", "", f"{name}: not imported: {why}")[:300]
    return {"type": "command", **kept, "exec": f"echo {shlex.quote(said)} >&2\nexit 1\n"}


# --- what every step has -----------------------------------------------------------------------------------


def _order(step: _VisorStep) -> None:
    written = step.left.pop("depends_on", None)
    names = [written] if isinstance(written, str) else written
    if isinstance(names, list) and all(isinstance(each, str) for each in names):
        if names:
            step.made["depends_on"] = ["|".join(part.strip() for part in each.split("|")) for each in names]
    elif written is not None:
        step.file.notes.add(step.path("depends_on"), "it should be a list of steps")
    file = step.file
    if not file.lists_before(step.name) and any(file.lists_before(each) for each in file.ancestors(step.name)):
        what = "it runs once here, after all items of the steps before it, with their outputs as lists"
        file.notes.add(step.path("depends_on"), what, is_lost=False)
    each = step.left.pop("forEach", None)
    if isinstance(each, bool):
        if each:
            step.made["for_each"] = True
    elif each is not None:
        step.file.notes.add(step.path("forEach"), "only `forEach: true` is known")
    tags = step.left.get("tags")
    if isinstance(tags, list) and all(isinstance(each, str) for each in tags):
        if tags:
            step.made["tags"] = tags
        del step.left["tags"]
    if isinstance(step.left.get("description"), str):
        step.made["description"] = step.left.pop("description")


def _listed(written: Any) -> list[Any]:
    return written if isinstance(written, list) else [written]


def _gates(step: _VisorStep) -> None:
    """Convert the conditions. One that cannot be said stays closed: the step is skipped, or fails."""
    file, scope = step.file, step.file.scope
    before: list[str | None] = []
    for key in ("if", "assume"):
        if step.left.get(key) is not None:
            for each in _listed(step.left[key]):
                before.append(file.condition(step.path(key), each, scope))
        step.left.pop(key, None)
    lists = file.lists_before(step.name)
    known = [each for each in before if each is not None]
    asks_items = any(mention.name in lists for each in known for mention in mentions(each))
    if asks_items:
        what = "it asks about an item, and `if` is asked once for all items here"
        file.notes.add(step.path("if"), what)
    if before and (asks_items or len(known) < len(before)):
        file.notes.add(step.path("if"), "the step is skipped until its condition is written anew", is_lost=False)
        step.made["if"] = False
    elif before:
        step.made["if"] = _joined(known, "and")
    after: list[str | None] = []
    own = with_output(scope, step.kind if "transform" not in step.made else "")
    if step.kind == "ai" and "output_schema" not in step.made:
        own = replace(own, output="text")
    if step.left.get("fail_if") is not None:
        after.append(file.condition(step.path("fail_if"), step.left["fail_if"], own))
    for each in _listed(step.left.get("guarantee") or []):
        if isinstance(each, str):
            after.append(file.condition(step.path("guarantee"), f"!({each})", own))
    step.left.pop("fail_if", None)
    step.left.pop("guarantee", None)
    if after and None in after:
        what = "the step fails until its condition is written anew"
        file.notes.add(step.path("fail_if"), what, is_lost=False)
        step.made["fail_if"] = "true"
    elif after:
        step.made["fail_if"] = _joined([each for each in after if each is not None], "or")
        if lists:
            file.notes.add(step.path("fail_if"), "it is asked for each item here, and not for all", is_lost=False)


def _joined(conditions: list[str], word: str) -> str:
    if len(conditions) == 1:
        return conditions[0]
    return f" {word} ".join(f"({each})" for each in conditions)


def _reactions(step: _VisorStep) -> None:
    for key in ("on_fail", "on_success"):
        if step.left.get(key) is not None:
            made = step.file.reaction(step.path(key), step.left[key], is_failure=key == "on_fail", of=step.name)
            if made:
                step.made[key] = made
        step.left.pop(key, None)


def _transform(step: _VisorStep) -> None:
    scope = with_output(step.file.scope, step.kind)
    shapes = "transform" in (*step.left, *step.made) or "transform_js" in step.left
    if shapes and step.file.lists_before(step.name):
        step.file.notes.add(step.path(), "a transform is about all items here, and not about each")
        raise _Unconverted("its output would be made of all items, and not of each")
    if "transform_js" in step.left:
        raise _Unconverted("its `transform_js` is a script: write it as `transform`, or as a command")
    if "transform" in step.left:
        made = step.file.transform(step.path("transform"), step.left.pop("transform"), scope)
        if made is None:
            raise _Unconverted("its `transform` cannot be converted")
        step.made["transform"] = made


def _rest(step: _VisorStep) -> None:
    """Convert what any step may have, and note what is left."""
    file = step.file
    if "env" in step.left and (env := file.env(step.path("env"), step.left.pop("env"))):
        step.made["env"] = env
    step.plain("continue_on_failure", bool)
    schema = step.left.pop("output_schema", None)
    if schema is None and isinstance(step.left.get("schema"), dict):
        schema = step.left.pop("schema")
    if isinstance(schema, dict):
        step.made["output_schema"] = schema
    for key in list(step.left):
        if key in _PRESENTATION or (key == "schema" and step.kind != "ai"):
            what = "results are not laid out for pull requests here"
        else:
            what = _LEFT_OUT.get(key, "steps have nothing like it here")
        file.notes.add(step.path(key), what)


# --- the types ---------------------------------------------------------------------------------------------


def _command(step: _VisorStep) -> None:
    step.required("exec", is_command=True)
    step.optional("stdin")
    step.limit("timeout", "either")
    step.plain("cwd", str)
    if step.left.get("output_format") in ("json", "text"):
        step.made["output_format"] = step.left.pop("output_format")


def _noop(step: _VisorStep) -> None:
    step.made["exec"] = "true"


def _log(step: _VisorStep) -> None:
    step.required("message", as_key="stdin")
    step.made |= {"exec": "cat", "output_format": "text"}


def _http_client(step: _VisorStep) -> None:
    step.made["type"] = "http_client"
    step.required("url")
    step.plain("method", str)
    if step.kind == "http":
        step.made.setdefault("method", "POST")
    step.values("headers")
    if isinstance(step.left.get("body"), str):
        step.required("body")
    step.values("body")
    step.values("params")
    step.optional("output_file")
    step.limit("timeout", "ms")


def _mcp(step: _VisorStep) -> None:
    step.made["type"] = "mcp"
    transport = step.left.pop("transport", None)
    if transport == "sse":
        step.file.notes.add(step.path("transport"), "servers are reached by `stdio` or `http` here")
        raise _Unconverted("its transport is SSE")
    step.plain("url", str)
    step.plain("command", str)
    for key in ("command_args", "args"):
        step.plain(key, list, as_key="args")
    step.values("headers")
    step.required("method")
    step.values("methodArgs", "arguments")
    step.values("arguments")
    step.plain("workingDirectory", str, as_key="cwd")
    step.limit("timeout", "s")
    if transport == "stdio":
        step.made.pop("url", None)
    elif transport == "http":
        step.made.pop("command", None)
        step.made.pop("args", None)
    if ("command" in step.made) == ("url" in step.made):
        raise _Unconverted("it names no server, or two")


def _human_input(step: _VisorStep) -> None:
    step.made["type"] = "human-input"
    step.required("prompt")
    step.optional("placeholder")
    step.optional("default")
    step.plain("allow_empty", bool)
    step.plain("multiline", bool)
    step.limit("timeout", "either")


def _git_checkout(step: _VisorStep) -> None:
    step.made["type"] = "git-checkout"
    step.optional("repository")
    repository = str(step.made.get("repository", ""))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        step.made["repository"] = f"https://github.com/{repository}"
    step.optional("ref")
    step.plain("fetch_depth", int)
    step.optional("working_directory", as_key="path")
    step.plain("clone_timeout_ms", int)


def _workflow(step: _VisorStep) -> None:
    step.made["type"] = "workflow"
    named = step.left.pop("workflow", None) or step.left.pop("config", None)
    if not isinstance(named, str):
        raise _Unconverted("it names no file")
    files = [each for each in _listed(step.file.document.get("imports")) if isinstance(each, str)]
    by_name = {Path(each).stem: each for each in files} | {find_id(step.file.folder / each): each for each in files}
    step.made["workflow"] = by_name.get(named, named)
    what = f"import {step.made['workflow']!r} as well: the file has to be a workflow of ours"
    step.file.notes.add(step.path("workflow"), what, is_lost=False)
    for key in ("args", "workflow_inputs", "inputs"):
        step.values(key, "inputs")


def _ai(step: _VisorStep) -> None:
    step.made["type"] = "ai"
    _prompt(step)
    step.file.note_once(step.path("prompt"), AI_DIFFERS)
    written = step.left.pop("ai", None)
    block = dict(written) if isinstance(written, dict) else {}
    for key in ("provider", "model", "mcp_servers", "system_prompt", "max_iterations"):
        given = step.left.pop(f"ai_{key}", None)
        if given is not None:
            block.setdefault("mcpServers" if key == "mcp_servers" else key, given)
    made: JsonObject = {}
    for key, part in block.items():
        _ai_key(step, made, key, part)
    tools = step.left.pop("ai_custom_tools", None)
    names = [each.get("workflow") if isinstance(each, dict) else each for each in _listed(tools or [])]
    if names:
        made["tools"] = [each for each in names if isinstance(each, str)]
    if made:
        step.made["ai"] = made
    schema = step.left.pop("schema", None)
    if isinstance(schema, dict):
        step.made["output_schema"] = schema
    elif isinstance(schema, str):
        _named_schema(step, schema)


def _prompt(step: _VisorStep) -> None:
    prompt = step.left.get("prompt")
    if isinstance(prompt, str) and re.fullmatch(r"[^\s{}]+\.liquid", prompt):
        path = step.file.folder / prompt
        try:
            if path.stat().st_size > PROMPT_LIMIT:
                raise ValueError
            step.left["prompt"] = path.read_text("utf-8")
        except (OSError, ValueError):
            step.lose("prompt", f"the file {prompt[:100]!r} cannot be read here")
            raise _Unconverted("the file of its prompt cannot be read") from None
    step.required("prompt")


_AI_TEXTS = {"model": "model", "system_prompt": "system_prompt", "custom_prompt": "system_prompt"}
_AI_NUMBERS = {
    *("timeout", "ai_timeout", "max_iterations", "graceful_stop_deadline"),
    *(f"negotiated_timeout_{name}" for name in ("budget", "max_requests", "max_per_request")),
}


def _ai_key(step: _VisorStep, made: JsonObject, key: str, part: Any) -> None:
    path = step.path("ai", key)
    if key == "provider":
        if part in ("anthropic", "openai", "google"):
            made[key] = part
        else:
            step.file.notes.add(
                path, f"there is no provider {str(part)[:40]!r} here: the first whose key is set is used"
            )
    elif key in _AI_TEXTS and isinstance(part, str):
        text = step.file.text(path, part)
        if text is None:
            raise _Unconverted(f"its `{key}` cannot be said here")
        made[_AI_TEXTS[key]] = text
    elif (key in _AI_NUMBERS and isinstance(part, int) and not isinstance(part, bool) and part > 0) or (
        key == "timeout_behavior" and part in ("graceful", "negotiated")
    ):
        made[key] = part
    elif key in ("mcpServers", "mcp_servers") and isinstance(part, dict):
        if servers := _servers(step, path, part):
            made["mcp_servers"] = servers
    elif key == "retry" and isinstance(part, dict) and isinstance(part.get("maxRetries"), int):
        made["retry"] = {"max": max(0, min(part["maxRetries"], 1000))}
        if isinstance(part.get("initialDelay"), int):
            made["retry"]["backoff"] = {"mode": "exponential", "delay_ms": part["initialDelay"]}
    elif key == "fallback" and isinstance(part, dict) and isinstance(part.get("providers"), list):
        known = [each for each in part["providers"] if isinstance(each, dict)]
        known = [each for each in known if each.get("provider") in ("anthropic", "openai", "google")]
        made["fallback"] = [{name: each[name] for name in ("provider", "model") if name in each} for each in known]
        if len(known) < len(part["providers"]):
            step.file.notes.add(path, "a provider that is not known here is left out")
    else:
        step.file.notes.add(path, "agents have nothing like it here")


def _servers(step: _VisorStep, path: Path_, written: JsonObject) -> JsonObject:
    made: JsonObject = {}
    for name, server in written.items():
        here = (*path, name)
        if (
            not isinstance(server, dict)
            or ("command" in server) == ("url" in server)
            or server.get("transport") == "sse"
        ):
            step.file.notes.add(here, "a server has a `command` or a `url`, and speaks `stdio` or `http`")
            continue
        part: JsonObject = {key: server[key] for key in ("command", "args", "url", "headers") if key in server}
        if "env" in server:
            part["env"] = step.file.env((*here, "env"), server["env"])
        allowed = server.get("allowedMethods")
        if isinstance(allowed, list) and all(isinstance(each, str) and "*" not in each for each in allowed):
            part["tools"] = allowed
        elif allowed is not None:
            step.file.notes.add((*here, "allowedMethods"), "tools are named one by one here")
            continue
        if "blockedMethods" in server:
            step.file.notes.add((*here, "blockedMethods"), "tools cannot be left out here, so the server is not given")
            continue
        made[name] = part
    return made


def _named_schema(step: _VisorStep, schema: str) -> None:
    if schema in _SCHEMAS:
        step.made["output_schema"] = _SCHEMAS[schema]
    elif schema not in ("plain", "text", "markdown", "none", ""):
        path = step.file.folder / schema
        try:
            if schema.endswith(".json") and path.stat().st_size <= SCHEMA_LIMIT:
                step.made["output_schema"] = json.loads(path.read_text("utf-8"))
                return
        except (OSError, ValueError, RecursionError):
            pass
        step.file.notes.add(step.path("schema"), f"the schema {schema[:60]!r} cannot be read here")


STEP_KINDS: dict[str, Callable[[_VisorStep], None]] = {
    "ai": _ai,
    "command": _command,
    "noop": _noop,
    "log": _log,
    "http": _http_client,
    "http_client": _http_client,
    "mcp": _mcp,
    "human-input": _human_input,
    "git-checkout": _git_checkout,
    "workflow": _workflow,
}
