"""Import of Visor files: https://github.com/probelabs/visor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ...core.value_types import JsonObject, field, record, replace
from ..file.loader import find_id
from ..file.schema import STEP_NAME
from ..file.yaml_reader import Tree
from ._expression import NameScope
from ._visor_file import Imported, ImportNotes, Note, VisorFile
from ._visor_steps import convert_step, failing_step
from ._writer import find_errors, text_of

# Keys that are Visor's alone. A file of ours with a mistake must not be taken for one of Visor.
_KEYS_OF_STEPS = {"transform_js", "goto_js", "run_js", "group", "criticality", "assume", "guarantee"}
_KEYS_OF_STEPS |= {"reuse_ai_session", "session_mode", "ai_custom_tools", "ai_custom_tools_js", "ai_mcp_servers"}
_KEYS_OF_STEPS |= {"ai_mcp_servers_js", "methodArgs", "argsTransform", "failure_conditions", "on_finish"}
_KEYS_OF_STEPS |= {"on_init", "fanout", "reduce", "forEach", "focus", "triggers", "appendPrompt"}
_KEYS_OF_STEPS |= {"ai_prompt_type", "ai_system_prompt", "claude_code", "debounce"}
_KEYS_OF_FILE = {"routing", "slack", "frontends", "memory", "http_server", "failure_conditions", "tag_filter"}
_KEYS_OF_FILE |= {"workspace", "sandboxes", "telegram", "ai_mcp_servers", "max_ai_concurrency", "scheduler"}
_KEYS_OF_FILE |= {"agent_protocol", "task_tracking", "limits"}
_TYPES = frozenset({"script", "http", "memory", "noop", "log", "github", "claude-code", "http_input", "a2a", "utcp"})
_EVENTS = re.compile(r"(pr|issue)_(opened|updated|closed|comment)|manual|webhook_received|slack_message")
REPAIR_ROUNDS = 4

_LEFT_OUT = {
    **dict.fromkeys(("extends", "include"), "the files that it names are not read: import the whole configuration"),
    "output": "results are not posted to pull requests here: see `shotclock report --output markdown`",
    "memory": "there is no memory between steps here: hand values on as outputs",
    "http_server": "there is no server that starts runs here: start `shotclock run` from yours",
    **dict.fromkeys(
        ("frontends", "slack", "telegram", "email", "whatsapp", "teams"),
        "there are no frontends here: start `shotclock run` from yours",
    ),
    "scheduler": "there is no scheduler here: start `shotclock run` from cron",
    "limits": "a step goes back ten times at most here",
    "tag_filter": "pick steps by `shotclock run --tags`",
    "failure_conditions": "write them as `fail_if` of the steps",
    "max_ai_concurrency": "`max_parallelism` counts steps of every type here",
    "on": "there are no events here: the run begins when it is started",
    "hooks": "the hooks of a program do not exist here",
    "tests": "tests of Visor files are not converted",
}


def looks_like(document: Any, file_name: str) -> bool:
    """Return whether a document is a file of Visor, and not one of ours with a mistake."""
    if not isinstance(document, dict):
        return False
    steps = document.get("steps", document.get("checks"))
    if not isinstance(steps, dict) or not all(isinstance(step, dict) for step in steps.values()):
        return False
    if re.fullmatch(r"\.?visor(\..*)?\.ya?ml", Path(file_name).name):
        return True
    if document.keys() & _KEYS_OF_FILE or _has_events(document.get("on")):
        return True
    return any(
        step.get("type") in _TYPES or step.keys() & _KEYS_OF_STEPS or _has_events(step.get("on"))
        for step in steps.values()
    )


def _has_events(on: Any) -> bool:
    return isinstance(on, list) and any(isinstance(each, str) and _EVENTS.fullmatch(each) for each in on)


def convert(tree: Tree, file_name: str) -> Imported:
    return _Conversion(tree, Path(file_name)).run()


@record
class _Conversion:
    tree: Tree
    path: Path
    notes: ImportNotes = field(init=False)

    def run(self) -> Imported:
        self.notes = ImportNotes(self.tree)
        document = self.tree.value
        if not isinstance(document, dict):
            return self._refuse("a Visor file is a mapping with `steps`")
        if "steps" in document and "checks" in document:
            return self._refuse("it has both `steps` and `checks`")
        key = "checks" if "checks" in document else "steps"
        steps = document.get(key)
        if not isinstance(steps, dict) or not steps:
            return self._refuse(f"it has no `{key}` of its own" + (", it extends others" * ("extends" in document)))
        for name, step in steps.items():
            if not isinstance(step, dict):
                return self._refuse(f"line {self._line(key, name)}: the step {name[:60]!r} is no mapping")
            if re.fullmatch(STEP_NAME, name) is None or len(name) > 200:
                return self._refuse(f"line {self._line(key, name)}: {name[:60]!r} cannot name a step here")
        made, file = self._top(document, key, steps)
        converted = {}
        for name, step in steps.items():
            converted[name] = convert_step(file, name, self._with_defaults(document, step))
        if all(name in file.failing for name in converted):
            return self._refuse("none of its steps can be converted")
        made["steps"] = converted
        self._repair(made, file)
        if all(name in file.failing for name in converted):
            return self._refuse("none of its steps can be converted")
        return Imported(made, self._noted(), failing=tuple(name for name in converted if name in file.failing))

    def _noted(self) -> tuple[Note, ...]:
        return tuple(dict.fromkeys(self.notes.in_order()))

    def _line(self, *path: str) -> int:
        spot = self.tree.spots
        for part in path:
            spot = spot.inside.get(part, spot)
        return spot.place.line

    def _refuse(self, why: str) -> Imported:
        return Imported(None, self._noted(), why)

    # --- the top of the file

    def _top(self, document: JsonObject, key: str, steps: JsonObject) -> tuple[JsonObject, VisorFile]:
        made: JsonObject = {"version": "1.0"}
        for name in ("name", "description", "id"):
            if isinstance(document.get(name), str):
                made[name] = document[name]
            elif document.get(name) is not None:
                self.notes.add((name,), "it should be text")
        if "name" not in made and isinstance(document.get("id"), str):
            made["name"] = document["id"]
        inputs = self._inputs(document.get("inputs"))
        if inputs:
            made["inputs"] = inputs
        kinds = {name: _kind_of(step) for name, step in steps.items()}
        scope = NameScope(kinds, {name: str(part.get("type", "any")) for name, part in inputs.items()})
        file = VisorFile(key, document, scope, self.notes, self.path.parent)
        parallel = document.get("max_parallelism")
        if isinstance(parallel, int) and not isinstance(parallel, bool) and 1 <= parallel <= 1000:
            made["max_parallelism"] = parallel
        elif "max_parallelism" in document:
            self.notes.add(("max_parallelism",), "it should be a number from 1 to 1000; the default here is 8")
        else:
            made["max_parallelism"] = 3  # Visor's default
        if isinstance(document.get("fail_fast"), bool):
            made["fail_fast"] = document["fail_fast"]
        if "env" in document and (env := file.env(("env",), document["env"])):
            made["env"] = env
        tools = self._tools(document.get("tools"), file)
        tools |= self._imports(document.get("imports"))
        if tools:
            made["tools"] = tools
        outputs = self._outputs(document.get("outputs"), file)
        if outputs:
            made["outputs"] = outputs
        self._routing(document.get("routing"), made, file)
        known = {"version", "name", "description", "id", "inputs", "max_parallelism", "fail_fast", "env", "tools"}
        known |= {"imports", "outputs", "routing", "fail_if", key, *FOR_ALL_AI}
        for name in document:
            if name not in known and not name.startswith("x-"):
                self.notes.add((name,), _LEFT_OUT.get(name, "there is nothing like it here"))
        return made, file

    def _with_defaults(self, document: JsonObject, step: JsonObject) -> JsonObject:
        """Return a step with what the file says for all of them."""
        made = dict(step)
        if document.get("fail_if") is not None and "fail_if" not in step:
            made["fail_if"] = document["fail_if"]
        if (step.get("type") or ("command" if "exec" in step else "ai")) == "ai":
            for key in FOR_ALL_AI:
                if key in document and key not in step:
                    made[key] = document[key]
        return made

    def _inputs(self, written: Any) -> JsonObject:
        made: JsonObject = {}
        listed = written if isinstance(written, list) else []
        if written is not None and not isinstance(written, list):
            self.notes.add(("inputs",), "it should be a list")
        for number, each in enumerate(listed):
            path: tuple[str | int, ...] = ("inputs", number)
            if not isinstance(each, dict) or not isinstance(each.get("name"), str):
                self.notes.add(path, "an input needs a name")
                continue
            part: JsonObject = {}
            schema = each.get("schema")
            kind = schema.get("type") if isinstance(schema, dict) else each.get("type")
            if kind in ("string", "number", "integer", "boolean", "object", "array"):
                part["type"] = kind
            elif kind is not None:
                self.notes.add((*path, "schema"), f"an input cannot be of the type {str(kind)[:40]!r} here")
            if isinstance(schema, dict) and set(schema) - {"type", "description"}:
                self.notes.add((*path, "schema"), "only the type of an input is checked here")
            if isinstance(each.get("description"), str):
                part["description"] = each["description"]
            if each.get("default") is not None:
                part["default"] = each["default"]
            # An input of Visor is required unless it says otherwise or has a default.
            if each.get("required", True) is not False and each.get("default") is None:
                part["required"] = True
            made[each["name"]] = part
        return made

    def _outputs(self, written: Any, file: VisorFile) -> dict[str, str]:
        made: dict[str, str] = {}
        if written is not None and not isinstance(written, list):
            self.notes.add(("outputs",), "it should be a list")
        for number, each in enumerate(written if isinstance(written, list) else []):
            path: tuple[str | int, ...] = ("outputs", number)
            if not isinstance(each, dict) or not isinstance(each.get("name"), str):
                self.notes.add(path, "an output needs a name")
                continue
            text = each.get("value")
            if isinstance(text, str):
                text = file.text((*path, "value"), text)
            if isinstance(text, str):
                made[each["name"]] = text
            else:
                self.notes.add(path, "an output needs a `value`; a `value_js` is not converted: write it as one")
        return made

    def _tools(self, written: Any, file: VisorFile) -> JsonObject:
        made: JsonObject = {}
        if written is not None and not isinstance(written, dict):
            self.notes.add(("tools",), "it should be a mapping")
            return made
        scope = replace(file.scope, has_args=True)
        for name, tool in (written or {}).items():
            path: tuple[str | int, ...] = ("tools", name)
            if not isinstance(tool, dict) or tool.get("type", "command") != "command" or "exec" not in tool:
                self.notes.add(path, "only tools that are commands exist here")
                continue
            command = file.text((*path, "exec"), tool["exec"], scope=scope, is_command=True)
            if command is None:
                continue
            part: JsonObject = {"exec": command}
            for theirs, ours, kind in (("description", "description", str), ("cwd", "cwd", str)):
                if isinstance(tool.get(theirs), kind):
                    part[ours] = tool[theirs]
            if isinstance(tool.get("inputSchema"), dict):
                part["input_schema"] = tool["inputSchema"]
            if isinstance(tool.get("env"), dict):
                part["env"] = file.env((*path, "env"), tool["env"])
            if "stdin" in tool and (stdin := file.text((*path, "stdin"), tool["stdin"], scope=scope)) is not None:
                part["stdin"] = stdin
            if (limit := file.duration((*path, "timeout"), tool.get("timeout"), "ms")) is not None:
                part["timeout"] = limit
            known = {"name", "type", "exec", "description", "cwd", "inputSchema", "env", "stdin", "timeout"}
            for key in tool:
                if key not in known | {"parseJson"}:
                    self.notes.add((*path, key), "tools have nothing like it here")
            made[name] = part
        return made

    def _imports(self, written: Any) -> JsonObject:
        made: JsonObject = {}
        for number, each in enumerate(written if isinstance(written, list) else []):
            if not isinstance(each, str) or "://" in each:
                self.notes.add(("imports", number), "only files beside this one can be imported")
                continue
            made[find_id(self.path.parent / each)] = {"workflow": each}
            what = f"import {each!r} as well: the file has to be a workflow of ours"
            self.notes.add(("imports", number), what, is_lost=False)
        return made

    def _routing(self, written: Any, made: JsonObject, file: VisorFile) -> None:
        if written is None:
            return
        if not isinstance(written, dict):
            self.notes.add(("routing",), "it should be a mapping")
            return
        for key, part in written.items():
            if key == "max_loops":
                if part != 10:
                    self.notes.add(("routing", key), "a step goes back ten times at most here", is_lost=False)
            elif key == "defaults" and isinstance(part, dict) and isinstance(part.get("on_fail"), dict):
                reaction = file.reaction(("routing", "defaults", "on_fail"), part["on_fail"], is_failure=True)
                if reaction:
                    made["defaults"] = {"on_fail": reaction}
            else:
                self.notes.add(("routing", key), "there is nothing like it here")

    # --- what does not pass the check

    def _repair(self, made: JsonObject, file: VisorFile) -> None:
        """Replace steps that `check` would refuse, such as a value inside a script, by steps that fail."""
        for _ in range(REPAIR_ROUNDS):
            try:
                errors = find_errors(text_of(made), self.path.absolute().parent)
            except ValueError:
                return  # reported where it is written
            wrong = {
                str(found.path[1]): found for found in errors if found.path[:1] == ("steps",) and len(found.path) > 1
            }
            wrong = {name: found for name, found in wrong.items() if found.rule.partition("/")[0] in _REPAIRABLE}
            wrong = {name: found for name, found in wrong.items() if name not in file.failing and name in made["steps"]}
            if not wrong:
                return
            for name, found in wrong.items():
                keys = [str(part) for part in found.path[2:3]]
                self.notes.add((file.key, name, *keys), f"shotclock check refuses it: {found.message}", is_failing=True)
                made["steps"][name] = failing_step(file, name, found.message, made["steps"][name])


def _kind_of(step: JsonObject) -> str:
    """Return the type of a step, as far as it says what its output is."""
    kind = str(step.get("type") or ("command" if "exec" in step else "ai"))
    return f"{kind} with transform" if step.keys() & {"transform", "transform_js"} else kind


_REPAIRABLE = frozenset({"shell", "template", "schema", "http", "git", "tool", "ai", "nested"})
FOR_ALL_AI = ("ai_model", "ai_provider", "ai_mcp_servers")
