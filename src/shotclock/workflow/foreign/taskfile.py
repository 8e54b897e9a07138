"""Taskfiles of go-task: each task that can be called, with all that it calls, as steps behind an input `task`."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from typing import Any

from ..yaml_reader import Tree, quote
from .common import (
    Draft,
    FileRefused,
    ForeignPath,
    Unconvertible,
    both,
    converted,
    in_quotes,
    is_scalar,
    list_at,
    literal_variable,
    mapping_at,
    new_draft,
    note_unknown,
    scalar_text,
    secrets_in,
    text_at,
)
from .result import Imported
from .taskfile_call import Deferred, TaskCall, pattern_of, steps_in
from .taskfile_templates import Expression, Value, known_text, machine, system, template_of, value_of

KIND = "taskfile"
DEPTH_LIMIT = 20  # tasks inside each other
WORK_LIMIT = 5_000  # calls and uses of global variables: both can double with each line of a file

_TOP_KEYS = {"version", "tasks", "vars", "env", "dotenv", "set", "shopt", "run", "silent"}
_TOP_LOST = {
    "output": "the output of each step is kept apart",
    "interval": "files are not watched",
    "includes": "the tasks of other files are not there",
    "method": "nothing is compared: a task always runs",
}
_TASK_KEYS = {"cmds", "cmd", "deps", "desc", "aliases", "status", "preconditions", "dir", "set", "shopt", "vars", "env"}
_TASK_KEYS |= {"dotenv", "internal", "ignore_error", "run", "platforms", "if", "requires", "prompt", "silent"}
_CMD_KEYS = {"cmd", "silent", "ignore_error", "platforms", "if", "for", "set", "shopt", "timeout"}
_TASK_LOST = {
    "label": "its steps are named after the task",
    "prefix": "its steps are named after the task",
    "summary": "`desc` is the description",
    "failfast": "the other `deps` go on",
    "sources": "files are not compared: the task always runs",
    "generates": "files are not compared: the task always runs",
    "method": "nothing is compared: the task always runs",
    "interactive": "a command has no terminal",
    "watch": "files are not watched",
    "use_gitignore": "files are not compared",
}
_NOT_WHEN_STOPPED = "it does not run if the run is stopped; in `finally` it would, but only at the end of the run"
_PLATFORM = re.compile(r"\{\{[^{}.]*\b(OS|ARCH)\b")
# A line that changes nothing for the next one, each of which has a shell of its own there.
_PLAIN = re.compile(
    r"(?!cd |exit|exec |export |set |trap |\. |source |unset |alias |umask |[A-Za-z_]\w*=)[\w./-][^\n#\\]*"
)


def looks_like(document: object, file_name: str) -> bool:
    """Return whether a document is a Taskfile."""
    if not isinstance(document, dict) or not isinstance(document.get("tasks"), dict) or "jobs" in document:
        return False
    return "version" in document or "taskfile" in file_name.lower()


def convert(tree: Tree, file_name: str) -> Imported:
    return converted(KIND, draft_of, tree, file_name)


def draft_of(tree: Tree, file_name: str) -> Draft:
    """Return the workflow before it is checked. Raises FileRefused or Unconvertible."""
    return _Taskfile(new_draft(KIND, tree), tree.value).convert()


class _Taskfile:
    def __init__(self, draft: Draft, document: dict[str, Any]) -> None:
        self.draft, self.document = draft, document
        tasks = document.get("tasks")
        if not isinstance(tasks, dict) or not tasks:
            raise FileRefused("`tasks` should be a mapping of tasks")
        if not scalar_text(document.get("version", "3")).startswith("3"):
            raise FileRefused(f"Taskfiles of version {quote(document['version'])} are not known; there is version 3")
        self.tasks = {name: self._read_task(name, task) for name, task in tasks.items()}
        self.vars = mapping_at(document, "vars")
        self.computed: dict[str, set[str]] = {}  # the steps of global variables, and the tasks that use them
        self.once: dict[tuple[str, ...], list[str]] = {}  # the ends of tasks that run once
        self.required: dict[str, None] = {}
        self.resolving: list[str] = []
        self.work = 0

    def _read_task(self, name: str, task: Any) -> dict[str, Any] | None:
        path = ("tasks", name)
        if isinstance(task, str | list):
            task = {"cmds": [task] if isinstance(task, str) else task}
        if task is None:
            task = {}
        if not isinstance(task, dict):
            self.draft.lose(path, f"should be a mapping, and is {quote(task)}")
            return None
        note_unknown(self.draft, task, _TASK_KEYS, path, _TASK_LOST)
        return task

    def convert(self) -> Draft:
        draft, document = self.draft, self.document
        note_unknown(draft, document, _TOP_KEYS, (), _TOP_LOST)
        roots = [name for name, task in self.tasks.items() if task is not None and task.get("internal") is not True]
        for name in [name for name in roots if "*" in name]:
            draft.lose(("tasks", name), "it was left out: its name is a pattern")
            roots.remove(name)
        if not roots:
            raise FileRefused("no task can be called")
        wanted: dict[str, Any] = {"type": "string", "description": f"the task: {', '.join(roots)}"[:300]}
        wanted |= {"default": "default"} if "default" in roots else {"required": True}
        draft.top |= {"inputs": {"task": wanted}, "env": self._static_env(), "env_file": self._env_files(document, ())}
        draft.top["defaults"] = {"timeout": "0s", "shell": ["bash", "+o", "pipefail"]}
        draft.differ(("tasks",), "a task is chosen by the input `task`; no step has a timeout, as there")
        if _PLATFORM.search(json.dumps(document)):
            message = f"OS and ARCH are those of the machine that imported the file: {system()}, {machine()}"
            draft.differ(("tasks",), message)
        names = {name: [name, *self._aliases(name)] for name in roots}
        everything = [name for each in names.values() for name in each]
        listed = ", ".join(map(in_quotes, everything))
        message = shlex.quote(f"there is no such task; there are {', '.join(roots)}")
        unknown = {"if": f"inputs.task not in [{listed}]", "exec": f"echo {message} >&2\nexit 1"}
        draft.add(draft.name("unknown-task"), unknown, ("tasks",))
        for name in roots:
            condition = f"inputs.task in [{', '.join(map(in_quotes, names[name]))}]"
            condition = condition if len(names[name]) > 1 else f"inputs.task == {in_quotes(name)}"
            self.expand(TaskCall(name, name, name, ("tasks", name), {}, [condition]), [])
        for step, users in self.computed.items():
            draft.steps[step]["if"] = (
                f"inputs.task in [{', '.join(in_quotes(n) for u in sorted(users) for n in names[u])}]"
            )
        draft.top["inputs"] |= {name: {"type": "string", "default": ""} for name in self.required}
        return draft

    def _aliases(self, name: str) -> list[str]:
        return [each for each in list_at(self.tasks[name] or {}, "aliases") if isinstance(each, str)]

    def _env_files(self, holder: dict[str, Any], path: ForeignPath) -> list[dict[str, Any]]:
        """Return the files of variables. There, the first one wins."""
        files = [each for each in list_at(holder, "dotenv") if isinstance(each, str)]
        if files:
            self.draft.differ((*path, "dotenv"), "these variables count before those of the environment")
        known = [known_text(each, self._no_variables) for each in files]
        return [{"path": each, "optional": True} for each in reversed(known) if each]

    def _no_variables(self, name: str) -> Value:
        value = self.vars.get(name)
        if not is_scalar(value) or name not in self.vars:
            raise Unconvertible(f"names a file by the variable {name}")
        return scalar_text(value)

    def _static_env(self) -> dict[str, Any]:
        written = mapping_at(self.document, "env")
        fixed = {key: scalar_text(each) for key, each in written.items() if is_scalar(each)}
        self.env = {key: each for key, each in written.items() if key not in fixed or "{{" in fixed[key]}
        return {key: literal_variable(text) for key, text in fixed.items() if "{{" not in text}

    def _count(self) -> None:
        self.work += 1
        if self.work > WORK_LIMIT:
            raise FileRefused("its tasks or variables use each other too often")

    # --- variables

    def lookup(self, call: TaskCall, name: str) -> Value:
        if name in call.variables:
            value = call.variables[name]
            call.used |= steps_in(value)
            return value
        if name in ("TASK", "ALIAS"):
            return call.task
        if name in ("ROOT_DIR", "TASKFILE_DIR", "USER_WORKING_DIR"):
            if (self.tasks[call.task] or {}).get("dir"):
                raise Unconvertible(f"uses {{{{.{name}}}}} in another folder")
            return "."
        if name == "CLI_ARGS":
            self.draft.lose(call.path, "arguments behind `--` are not handed on: {{.CLI_ARGS}} is empty")
            return ""
        if name in self.vars:
            return self._global(call, name)
        if name in self.required:
            return Expression(f"inputs.{name}")
        if not name.isidentifier() or name in ("CHECKSUM", "TIMESTAMP", "EXIT_CODE", "CLI_ARGS_LIST", "MATCH"):
            raise Unconvertible(f"uses {{{{.{name}}}}}")
        return self._from_environment(call, name)

    def _from_environment(self, call: TaskCall, name: str) -> Value:
        self.draft.differ(call.path, f"{name} is taken from the environment")
        return Expression(f"(env.{name} | default(''))")

    def _global(self, call: TaskCall, name: str) -> Value:
        self._count()
        if self.resolving[-1:] == [name]:  # `NAME: '{{.NAME | default "x"}}'` is the way to let a caller set it
            return self._from_environment(call, name)
        if name in self.resolving:
            raise Unconvertible(f"uses the variable {name}, which uses itself")
        self.resolving.append(name)
        try:
            inner = TaskCall(call.root, call.task, f"var-{name}", ("vars", name), {}, [])
            value = self.value(inner, self.vars[name], f"var-{name}", [], is_global=True)
        finally:
            self.resolving.pop()
        call.used |= inner.used | steps_in(value)
        for step in steps_in(value) | inner.used:
            self.computed.get(step, set()).add(call.root)
        return value

    def value(self, call: TaskCall, written: Any, name: str, after: list[str], *, is_global: bool = False) -> Value:
        """Return the value of a variable; one of a command is the output of a step."""
        if is_scalar(written):
            return value_of(scalar_text(written), lambda each: self.lookup(call, each))
        if isinstance(written, list):
            return written
        if isinstance(written, dict) and isinstance(written.get("ref"), str):
            return value_of(f"{{{{{written['ref']}}}}}", lambda each: self.lookup(call, each))
        if isinstance(written, dict) and "value" in written:
            return self.value(call, written["value"], name, after, is_global=is_global)
        if not isinstance(written, dict) or not isinstance(written.get("sh"), str):
            raise Unconvertible(f"uses a variable of another kind: {quote(written)}")
        if is_global and name in self.draft.steps:
            return Expression(f"outputs['{name}']")
        script = template_of(written["sh"], lambda each: self.lookup(call, each))
        step = self._step(call, script, after)
        step["output_format"] = "text"
        made = self.draft.name(name)
        if is_global:
            self.computed[made] = set()
        return Expression(f"outputs['{self.draft.add(made, step, call.path)}']")

    def _step(self, call: TaskCall, script: str, after: list[str]) -> dict[str, Any]:
        used = call.used.union(*(steps_in(Expression(text)) for text in call.env.values()))
        waits = list(dict.fromkeys([*after, *sorted(used)]))
        call.used.clear()
        made: dict[str, Any] = {"exec": script, "depends_on": waits, "accept_skipped": True if waits else None}
        made["if"] = both(*call.conditions)
        made["env"] = {**secrets_in(script, call.env), **call.env}
        return {key: value for key, value in made.items() if value not in (None, [], {})}

    # --- tasks

    def expand(self, call: TaskCall, after: list[str]) -> list[str]:
        """Write the steps of a call. Return those that end it."""
        self._count()
        before = list(self.draft.steps)
        task = self.tasks.get(call.task)
        try:
            if task is None:
                raise Unconvertible(f"calls {quote(call.task)}, which is not in this file")
            if call.task in call.above or len(call.above) > DEPTH_LIMIT:
                raise Unconvertible(f"calls {quote(call.task)} inside itself")
            kind = task.get("run", self.document.get("run", "always"))
            of_call = "" if kind == "once" else repr(sorted(call.variables.items(), key=lambda item: item[0]))
            key = (call.root, call.task, of_call, *call.conditions)
            if kind in ("once", "when_changed") and key in self.once:
                return [*after, *self.once[key]]
            ends = _TaskDraft(self, call, task).convert(after)
            self.once[key] = ends
            return ends
        except Unconvertible as reason:
            for name in [name for name in self.draft.steps if name not in before and name not in self.computed]:
                del self.draft.steps[name]
            self.once = {key: ends for key, ends in self.once.items() if not set(ends) - self.draft.steps.keys()}
            for name in [name for name in self.draft.final if name.startswith(f"{call.prefix}-deferred")]:
                del self.draft.final[name]
            name = self.draft.name(call.prefix)
            waits = {"depends_on": after, "accept_skipped": True} if after else {}
            self.draft.add(name, {**waits, "if": both(*call.conditions)}, call.path)
            self.draft.refuse_step(name, f"the task {reason}")
            return [name]


class _TaskDraft:
    """The steps of one call of a task."""

    def __init__(self, file: _Taskfile, call: TaskCall, task: dict[str, Any]) -> None:
        self.file, self.draft, self.call, self.task = file, file.draft, call, task
        self.after: list[str] = []
        self.buffer: list[str] = []
        self.deferred: list[Deferred] = []
        self.prelude = self._options()

    def convert(self, after: list[str]) -> list[str]:
        call, task, path = self.call, self.task, self.call.path
        self.after = after
        own = mapping_at(task, "vars")
        for name in self._required():
            if name not in own and name not in call.variables and name not in self.file.vars:
                self.file.required[name] = None
        for name, written in own.items():
            call.variables = {
                **call.variables,
                name: self.file.value(call, written, f"{call.prefix}-var-{name}", self.after),
            }
        env = {**self.file.env, **mapping_at(task, "env")}
        for name, written in env.items():
            call.env[name] = self._variable(name, written)
        self._ask()
        self._check_required()
        self._decide([text for text in [text_at(self.draft, task, "if", path)] if text], "if", is_needed=True)
        self._check_platforms()
        ends: list[str] = []
        for number, dep in enumerate(list_at(task, "deps")):
            for task_name, variables, condition in self._calls(dep, (*path, "deps", number)):
                ends += self._expand(task_name, variables, condition)
        self.after = ends or self.after
        self._check_preconditions()
        self._decide(self._texts("status"), "status", is_needed=False)
        cmds = list_at(task, "cmds") + list_at(task, "cmd")
        for number, cmd in enumerate(cmds):
            self._add_command(cmd, (*path, "cmds", number))
        self._flush()
        self._add_deferred()
        return self.after

    # --- what is asked before

    def _text(self, text: str) -> str:
        return template_of(text, lambda name: self.file.lookup(self.call, name))

    def _known(self, text: str) -> str:
        return known_text(text, lambda name: self.file.lookup(self.call, name))

    def _variable(self, name: str, written: Any) -> str:
        if is_scalar(written):
            return template_of(scalar_text(written), lambda each: self.file.lookup(self.call, each), literal_variable)
        value = self.file.value(self.call, written, f"{self.call.prefix}-env-{name}", self.after)
        if isinstance(value, Expression):
            return f"{{{{ {value.code} }}}}"
        return literal_variable(value) if isinstance(value, str) else ""

    def _texts(self, key: str) -> list[str]:
        found = list_at(self.task, key)
        if not all(isinstance(each, str) for each in found):
            raise Unconvertible(f"has a {key} that is no list of commands")
        return found

    def _required(self) -> dict[str, list[Any]]:
        found = mapping_at(self.task, "requires")
        made: dict[str, list[Any]] = {}
        for each in list_at(found, "vars"):
            part = each if isinstance(each, dict) else {"name": each}
            if not isinstance(part.get("name"), str) or not part["name"].isidentifier():
                raise Unconvertible(f"requires {quote(each)}")
            allowed = part.get("enum", [])
            if not isinstance(allowed, list):
                raise Unconvertible("requires a value of a computed list")
            made[part["name"]] = allowed
        return made

    def _check_required(self) -> None:
        for name, allowed in self._required().items():
            value = self.file.lookup(self.call, name)
            what = f"{name} is required" + (f", one of {', '.join(map(scalar_text, allowed))}" if allowed else "")
            if isinstance(value, str) and value and (not allowed or value in map(scalar_text, allowed)):
                continue
            written = f"{{{{ {value.code} }}}}" if isinstance(value, Expression) else "''"
            tests = [f"[ {written} = {shlex.quote(scalar_text(each))} ]" for each in allowed] or [f"[ -n {written} ]"]
            self._add(f"{' || '.join(tests)} || {{ echo {shlex.quote(what)} >&2; exit 1; }}", "check")

    def _check_preconditions(self) -> None:
        for each in list_at(self.task, "preconditions"):
            part = {"sh": each} if isinstance(each, str) else each
            if not isinstance(part, dict) or not isinstance(part.get("sh"), str):
                raise Unconvertible(f"has a precondition that is no command: {quote(each)}")
            given = part.get("msg")
            message = given if isinstance(given, str) else f"precondition not met: {part['sh']}"
            script = (
                self._text(f"(\n{part['sh']}\n) || {{ echo ") + self._text(shlex.quote(message)) + " >&2; exit 1; }"
            )
            self._add(script, "check")

    def _check_platforms(self) -> None:
        if pattern := pattern_of(list_at(self.task, "platforms")):
            test = f'case "$(uname -s)/$(uname -m)" in {pattern}) true;; *) false;; esac'
            self._decide([test], "platforms", is_needed=True)

    def _decide(self, commands: list[str], key: str, *, is_needed: bool) -> None:
        """Write a step that prints whether the rest is run: if all commands succeed, or unless they do."""
        if not commands:
            return
        # What a test prints is not the answer.
        tests = " && ".join(f"(\n{self._text(each)}\n) >&2" for each in commands)
        words = ("yes", "no") if is_needed else ("no", "yes")
        name = self._add(f"if {tests}; then echo {words[0]}; else echo {words[1]}; fi", key)
        self.call.conditions = [*self.call.conditions, f"outputs['{name}'] == 'yes'"]

    def _ask(self) -> None:
        prompts = self._texts("prompt")
        for text in prompts:
            step = self.file._step(self.call, "", self.after)
            step |= {
                "type": "human-input",
                "prompt": self._text(text),
                "choices": ["yes", "no"],
                "fail_if": "output != 'yes'",
            }
            name = self.draft.add(self.draft.name(f"{self.call.prefix}-prompt"), {**step}, self.call.path)
            for key in ("exec", "env"):
                self.draft.steps[name].pop(key, None)
            self.after = [name]

    def _add(self, script: str, what: str) -> str:
        name = self.draft.name(f"{self.call.prefix}-{what}" if what else self.call.prefix)
        self.draft.add(name, self._step(script, self.after), self.call.path)
        self.after = [name]
        return name

    def _step(self, script: str, after: list[str]) -> dict[str, Any]:
        step = self.file._step(self.call, script, after)
        if folder := text_at(self.draft, self.task, "dir", self.call.path):
            step["cwd"] = self._text(folder)
            self.draft.differ((*self.call.path, "dir"), "the folder has to be there already")
        if files := self.file._env_files(self.task, self.call.path):
            step["env_file"] = files
        return {**step, "tags": [re.sub(r"[^\w.-]", "-", self.call.root)]}

    # --- commands

    def _options(self) -> str:
        lines = []
        for key, command in (("set", "set -o"), ("shopt", "shopt -s")):
            names = {"e": "errexit", "u": "nounset", "x": "xtrace", "f": "noglob", "a": "allexport", "n": "noexec"}
            for holder in (self.file.document, self.task):
                for each in list_at(holder, key):
                    if not isinstance(each, str) or not re.fullmatch("[a-z_]+", each):
                        raise Unconvertible(f"sets an option that is not known: {quote(each)}")
                    lines.append(f"{command} {names.get(each, each)}\n")
        return "".join(dict.fromkeys(lines))

    def _flush(self, timeout: Any = None) -> None:
        if self.buffer:
            script, self.buffer = "\n".join(self.buffer), []
            name = self._add(self.prelude + script, "")
            if timeout is not None:
                if not isinstance(timeout, str) or not re.fullmatch(r"([0-9.]+(ms|h|m|s))+", timeout):
                    raise Unconvertible(f"has a timeout that is not known: {quote(timeout)}")
                self.draft.steps[name]["timeout"] = timeout
            if description := text_at(self.draft, self.task, "desc", self.call.path):
                self.draft.steps[name]["description"] = description

    def _add_command(self, cmd: Any, path: ForeignPath) -> None:
        part = cmd if isinstance(cmd, dict) else {"cmd": cmd}
        if is_scalar(part.get("cmd")) and part.get("cmd") is not None:
            part = {**part, "cmd": scalar_text(part["cmd"])}
        if "defer" in part:
            note_unknown(self.draft, part, {"defer", "silent"}, path, {})
            self._defer(part["defer"], path)
        elif "task" in part:
            self._flush()
            for task_name, variables, condition in self._calls(part, path):
                self.after = self._expand(task_name, variables, condition)
        elif isinstance(part.get("cmd"), str):
            note_unknown(self.draft, part, _CMD_KEYS, path, {})
            pattern, timeout = pattern_of(list_at(part, "platforms")), part.get("timeout")
            if timeout is not None:
                self._flush()
            for variables in self._items(part, path):
                self._write(part, pattern, variables)
                if timeout is not None:
                    self._flush(timeout)
        else:
            raise Unconvertible(f"has a command that is no text, call or `defer`: {', '.join(map(str, part))[:80]}")

    def _write(self, part: dict[str, Any], pattern: str, variables: dict[str, Value]) -> None:
        outer, self.call.variables = self.call.variables, {**self.call.variables, **variables}
        script = self._text(part["cmd"].strip())
        test = self._text(part["if"]) if isinstance(part.get("if"), str) else None
        self.call.variables = outer
        if part.get("set") or part.get("shopt"):
            raise Unconvertible("sets options for one command")
        if not script:
            return
        if part.get("ignore_error") is True or self.task.get("ignore_error") is True:
            script = f"(\n{script}\n) || true"
        elif _PLAIN.fullmatch(script) is None:
            script = f"(\n{script}\n)"
        if test is not None:
            script = f"if (\n{test}\n); then\n{script}\nfi"
        if pattern:
            script = f'case "$(uname -s)/$(uname -m)" in\n{pattern})\n{script}\n;;\nesac'
        self.buffer.append(script)

    def _defer(self, written: Any, path: ForeignPath) -> None:
        if not isinstance(written, str):
            self.draft.lose(path, "the task at the end of this one was left out; commands can be deferred")
            return
        # What follows fails apart from what was before, which decides whether the command is deferred at all.
        before = self.after
        self._flush()
        reached = self.after[0] if self.after is not before else None
        if reached is None and (before or any("outputs" in each for each in self.call.conditions)):
            reached = self._add(":", "defer")
        # The failure of such a command counts for nothing.
        self.deferred.append(Deferred(f"(\n{self._text(written.strip())}\n) || true", path, reached))

    def _add_deferred(self) -> None:
        """Write the deferred commands, the last one first: at the end of the run for a task that is asked for."""
        ends, before = self.after, ""
        for each in reversed(self.deferred):
            name = self.draft.name(f"{self.call.prefix}-deferred")
            step = self._step(self.prelude + each.script, [each.reached] if each.reached else [])
            if self.call.above:
                waits = dict.fromkeys([*ends, *([before] if before else [])])
                waits.pop(each.reached or "", None)
                step["depends_on"] = [*step.get("depends_on", []), *({one: "ended"} for one in waits)]
                self.draft.add(name, step, each.path)
                self.after = [*self.after, name]
                self.draft.differ(each.path, _NOT_WHEN_STOPPED)
            else:
                for key in ("depends_on", "accept_skipped"):
                    step.pop(key, None)
                if before:
                    step["depends_on"] = {before: "ended"}
                if each.reached:
                    step["if"] = f"steps['{each.reached}'].status == 'succeeded'"
                self.draft.final[name], self.draft.paths[name] = step, each.path
            before = name

    def _calls(self, part: Any, path: ForeignPath) -> list[tuple[str, dict[str, Value], str | None]]:
        """Return the calls of an entry of `deps` or `cmds`: the task, its variables, and a command as a condition."""
        part = {"task": part} if isinstance(part, str) else part
        if not isinstance(part, dict) or not isinstance(part.get("task"), str):
            raise Unconvertible(f"has a call that names no task: {quote(part)}")
        note_unknown(self.draft, part, {"task", "vars", "silent", "if", "for"}, path, {})
        made = []
        for item in self._items(part, path):
            outer, self.call.variables = self.call.variables, {**self.call.variables, **item}
            name = self._known(part["task"]).removeprefix(":")
            given = mapping_at(part, "vars")
            values = {
                key: self.file.value(self.call, each, f"{self.call.prefix}-{key}", self.after)
                for key, each in given.items()
            }
            condition = self._text(part["if"]) if isinstance(part.get("if"), str) else None
            self.call.variables = outer
            made.append((name, values, condition))
        return made

    def _expand(self, name: str, variables: dict[str, Value], condition: str | None) -> list[str]:
        call = self.call
        name = next((each for each in self.file.tasks if name in (each, *self.file._aliases(each))), name)
        conditions = list(call.conditions)
        if condition is not None:
            step = self._add(f"if (\n{condition}\n) >&2; then echo yes; else echo no; fi", "if")
            conditions.append(f"outputs['{step}'] == 'yes'")
        above = (*call.above, call.task)
        path = ("tasks", name) if name in self.file.tasks else call.path
        inner = TaskCall(call.root, name, f"{call.prefix}-{name}", path, variables, conditions, above)
        return self.file.expand(inner, self.after)

    def _items(self, part: dict[str, Any], path: ForeignPath) -> list[dict[str, Value]]:
        """Return the variables of each round of `for`."""
        loop = part.get("for")
        if loop is None:
            return [{}]
        if isinstance(loop, list) and all(map(is_scalar, loop)):
            return [{"ITEM": self._known(scalar_text(each))} for each in loop]
        if isinstance(loop, dict) and isinstance(loop.get("var"), str):
            value = self.file.lookup(self.call, loop["var"])
            as_, split = loop.get("as", "ITEM"), loop.get("split")
            if isinstance(value, str):
                value = list(value.split(split) if isinstance(split, str) and split else value.split())
            if isinstance(value, Expression) or not isinstance(as_, str):
                raise Unconvertible(f"loops over {loop['var']}, which is known only when it runs")
            return [{as_: scalar_text(each)} for each in value if is_scalar(each)]
        if isinstance(loop, dict) and isinstance(axes := loop.get("matrix"), dict):
            if not all(isinstance(values, list) and all(map(is_scalar, values)) for values in axes.values()):
                raise Unconvertible("loops over a matrix that is computed")
            rounds = itertools.islice(itertools.product(*axes.values()), 200)
            return [
                {f"ITEM.{axis}": scalar_text(each) for axis, each in zip(axes, values, strict=True)}
                for values in rounds
            ]
        raise Unconvertible(f"loops over {quote(loop)}")
