"""The loader of workflow files: the workflow, or everything that is wrong with its shape, with file, line and
column."""

from __future__ import annotations

import copy
import errno
import hashlib
import os
import stat
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ..core.envelope import Problem
from ..core.errors import Ending
from ..core.validation import Part, ValidationError
from ..core.value_types import field, value
from ..providers.provider import STEP_TYPES, Approval, Backoff, Reaction, Retry, StepPart, StepRetry
from ..runtime.call import Outcome
from .schema import DefaultsPart, InputPart, ToolPart, WorkflowFile
from .spellings import translate
from .yaml_reader import TOP, SourcePosition, Spot, quote, read_tree

# A file that a person wrote is far smaller; one that is larger was not meant for us.
SIZE_LIMIT = 4_000_000
# Past this many a list of problems helps nobody.
FINDINGS_LIMIT = 200
# Looking for what was meant takes time with the square of it, and nobody mistypes a key this long.
WORD_LIMIT = 60
# So many names are listed in a suggestion, so many are compared.
LISTED_LIMIT, COMPARED_LIMIT = 15, 500

# So often what is wrong is taken out of a file: taking something out may leave something missing.
SALVAGE_ROUNDS = 4

Path_ = tuple[str | int, ...]


@value
class Finding:
    """An error, which keeps the file from running, or a warning, which does not."""

    rule: str
    message: str
    path: Path_ = ()
    place: SourcePosition = TOP
    suggestion: str | None = None
    is_error: bool = True
    file: str | None = None
    """Where it is not the file that was asked about, but one that this one runs."""

    @property
    def field(self) -> str:
        return ".".join(_printable(part) for part in self.path) or "file"


@value
class Source:
    """A file and where each of its keys stands."""

    name: str
    spots: Spot = field(default_factory=Spot)
    folder: Path = field(default_factory=Path)
    size: int = 0
    """In bytes."""
    sha256: str = ""

    def place_of(self, path: Sequence[str | int]) -> SourcePosition:
        """Return the position of a key, or of the nearest thing around it that is there."""
        spot = self.spots
        for part in path:
            names = [part, *_other_names(part)] if isinstance(part, str) else [part]
            found = next((spot.inside[name] for name in names if name in spot.inside), None)
            if found is None:
                break
            spot = found
        return spot.place


@value
class Loaded:
    source: Source
    workflow: WorkflowFile | None
    findings: tuple[Finding, ...] = ()
    salvaged: WorkflowFile | None = None
    """Where its shape is wrong: the file without what is wrong, to find what else is. Never run."""

    def format_finding(self, found: Finding) -> str:
        """Return a finding in one line, as compilers do."""
        hint = f"; {found.suggestion}" if found.suggestion else ""
        return f"{found.file or self.source.name}:{found.place.line}:{found.place.column}: {found.message}{hint}"


def load_file(path: Path) -> Loaded:
    """Read a workflow file. Raises OSError if it cannot be read at all. A pipe or a device may never end, so only files
    are read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
        data = file.read(SIZE_LIMIT + 1)
    return load_text(data, str(path), path.parent)


def load_or_refuse(flow: str) -> Loaded | Outcome:
    """Read a workflow file, or return why it cannot be read."""
    try:
        return load_file(Path(flow))
    except FileNotFoundError:
        problem = Problem("FILE_NOT_FOUND", f"there is no file {flow!r}", "validation")
    except OSError as error:
        hint = None if isinstance(error, PermissionError) else "name a file that holds a workflow"
        said = f"{flow!r} cannot be read: {error.strerror}"
        problem = Problem("FILE_UNREADABLE", said, "validation", suggestion=hint)
    except ValueError as error:  # a NUL in its name
        problem = Problem("FILE_NOT_FOUND", f"{flow!r} is no name of a file: {error}", "validation")
    return Outcome(Ending.NOT_STARTED, problem)


def judge(
    loaded: Loaded, findings: list[Finding], data: dict[str, object] | None = None, *, may_be_tight: bool = False
) -> Outcome:
    """Return the outcome for what was found. With `may_be_tight`, clocks that cannot fit are no reason to refuse it."""
    wrong = [finding for finding in findings if finding.is_error]
    if may_be_tight:
        wrong = [finding for finding in wrong if not finding.rule.startswith("budget/")]
    if data is None:
        data = {"findings": [describe_finding(loaded, finding) for finding in findings]}
    data = {"file": loaded.source.name, **data}
    if not wrong:
        return Outcome(Ending.FINISHED, data=data)
    errors = [{"field": finding.field, "message": loaded.format_finding(finding)} for finding in wrong]
    count = "1 problem" if len(wrong) == 1 else f"{len(wrong)} problems"
    problem = Problem("WORKFLOW_INVALID", f"{loaded.source.name}: {count}, nothing ran", "validation", errors=errors)
    return Outcome(Ending.FINISHED, problem, data)


def describe_finding(loaded: Loaded, finding: Finding) -> dict[str, object]:
    shown: dict[str, object] = {
        "rule": finding.rule,
        "severity": "error" if finding.is_error else "warning",
        "file": finding.file or loaded.source.name,
        "line": finding.place.line,
        "column": finding.place.column,
        "field": finding.field,
        "message": finding.message,
    }
    if finding.suggestion:
        shown["suggestion"] = finding.suggestion
    return shown


def load_text(data: bytes, name: str = "workflow.yaml", folder: Path | None = None) -> Loaded:
    sha256 = hashlib.sha256(data).hexdigest()
    source = Source(name, folder=folder or Path(), size=len(data), sha256=sha256)
    if len(data) > SIZE_LIMIT:
        return Loaded(source, None, (Finding("file/size", f"is larger than {SIZE_LIMIT} bytes"),))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].rpartition(b"\n")[2].decode("utf-8", "replace")
        place = SourcePosition(data.count(b"\n", 0, error.start) + 1, len(before) + 1)
        return Loaded(source, None, (Finding("file/encoding", "is not UTF-8", place=place),))
    tree = read_tree(text)
    source = Source(name, tree.spots, folder or Path(), len(data), sha256)
    flaws = [Finding(flaw.rule, flaw.message, (), flaw.place, flaw.suggestion) for flaw in tree.flaws]
    if not tree.is_whole:
        return Loaded(source, None, tuple(flaws))
    if not isinstance(tree.value, dict):
        held = "is empty" if tree.value is None else f"holds {_kind_of(tree.value)}"
        flaws.append(Finding("file/shape", f"{held}; a workflow is a mapping with `steps`", place=tree.spots.place))
        return Loaded(source, None, tuple(flaws))
    plain = _with_types(translate(tree.value, source.folder))
    try:
        workflow = WorkflowFile.model_validate(plain)
        return Loaded(source, None if flaws else workflow, _sort(flaws), workflow if flaws else None)
    except ValidationError as error:
        salvaged, more = _salvage(source, plain, error)
        return Loaded(source, None, _sort([*flaws, *_findings(source, plain, error), *more]), salvaged)


def _with_types(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the file with the type of every step: one that only says `exec` is a command. Keys `x-…` hold what others
    merge in, and are left out."""
    typed = {key: value for key, value in plain.items() if not key.startswith("x-")}
    for name in ("steps", "checks"):
        steps = plain.get(name)
        if isinstance(steps, dict):
            typed[name] = {
                step_id: {**step, "type": "command"}
                if isinstance(step, dict) and step.get("type") is None and "exec" in step
                else step
                for step_id, step in steps.items()
            }
    return typed


def _salvage(
    source: Source, plain: dict[str, Any], error: ValidationError
) -> tuple[WorkflowFile | None, list[Finding]]:
    """Return the file without what is wrong, if anything is left; and what is wrong with steps of an unknown type."""
    left = copy.deepcopy(plain)
    unknown: set[str] = set()
    found: list[Finding] = []
    for _ in range(SALVAGE_ROUNDS):
        for problem in error.errors(include_url=False):
            path = _file_path(problem["loc"], left, problem["type"])
            if problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
                unknown.add(str(path[-1]))
            elif len(path) > 2 and str(path[1]) in unknown:
                found.append(_finding(source, path, [problem]))
            _repair(left, path, problem["type"])
        try:
            return WorkflowFile.model_validate(left), found
        except ValidationError as next_error:
            error = next_error
    return None, found


def _repair(left: dict[str, Any], path: Path_, kind: str) -> None:
    """Take out what is wrong there. A step stays known by its name, whatever is wrong with it."""
    if len(path) == 2 and path[0] in ("steps", "checks") and kind != "string_pattern_mismatch":
        written = left[path[0]][path[1]]
        known = {key for name in StepPart.model_fields for key in StepPart.keys_of(name)}
        kept = {key: value for key, value in written.items() if key in known} if isinstance(written, dict) else {}
        exec_ = written.get("exec") if isinstance(written, dict) else None
        left[path[0]][path[1]] = {**kept, "type": "command", "exec": exec_ if isinstance(exec_, str) else "true"}
        return
    short = path[: next((at for at, part in enumerate(path) if isinstance(part, int)), len(path))]
    node: Any = left
    for part in short[:-1]:
        if not isinstance(node, dict) or part not in node:
            return
        node = node[part]
    if not short or not isinstance(node, dict):
        return
    if kind == "missing":
        node[short[-1]] = 1 if short[-1] == "max" else "x"  # all else that is required is text
    else:
        node.pop(short[-1], None)


# --- what is wrong, and where -----------------------------------------------------------------------------


def _findings(source: Source, plain: dict[str, Any], error: ValidationError) -> list[Finding]:
    """Return one finding for each place: that a value is none of the several types it may have is one mistake, not
    several."""
    by_path: dict[Path_, list[Any]] = {}
    for problem in error.errors(include_url=False):
        path = _file_path(problem["loc"], plain, problem["type"])
        by_path.setdefault(path, []).append(problem)
    around = {path[:depth] for path in by_path for depth in range(len(path))}
    for path, problems in list(by_path.items()):
        # What is wrong inside a mapping says which of several shapes was meant; that it is none of the others does not.
        if path in around:
            problems[:] = [each for each in problems if each["type"] not in _WANTED]
            if not problems:
                del by_path[path]
    paths = sorted(by_path, key=lambda path: _order(source.place_of(path)))
    found = [_finding(source, path, by_path[path]) for path in paths[:FINDINGS_LIMIT]]
    if len(paths) > FINDINGS_LIMIT:
        rest = Finding("schema/more", f"and {len(paths) - FINDINGS_LIMIT} problems more", place=found[-1].place)
        found.append(rest)
    return found


def _finding(source: Source, path: Path_, problems: list[Any]) -> Finding:
    problem = problems[0]
    kind, place = problem["type"], source.place_of(path)
    match kind:
        case "extra_forbidden":
            key = str(path[-1])
            model = _model_at(problem["loc"][:-1])
            known = _keys_of(model)
            if key in known:
                first = next(same[0] for same in map(model.keys_of, model.model_fields) if key in same)
                message = f"{key!r} is another name of {first!r}, which is there as well"
                return Finding("schema/twice", message, path, place, "keep one of them")
            hint = suggest(key, known, otherwise="known here: ")
            return Finding("schema/unknown-key", f"unknown key {quote(key)}", path, place, hint)
        case "union_tag_invalid":
            path = (*path, "type")
            written = problem["input"].get("type")
            hint = suggest(str(written), STEP_TYPES, otherwise="one of ")
            if isinstance(written, str) and written in _KINDS_ELSEWHERE:
                hint = _KINDS_ELSEWHERE[written]
            message = "a step needs a `type`" if written is None else f"unknown type {quote(written)}"
            return Finding("schema/type", message, path, source.place_of(path), hint)
        case "union_tag_not_found":
            hint = suggest("", STEP_TYPES, otherwise="one of ")
            for key in problem["input"] if isinstance(problem["input"], dict) else ():
                if _ELSEWHERE.get(key) == "exec":
                    hint = f"did you mean 'exec' instead of {key!r}?"
            return Finding("schema/type", "a step needs a `type`", path, place, hint)
        case "missing":
            return Finding("schema/missing", f"{path[-1]!r} is missing", path, source.place_of(path[:-1]))
        case "string_pattern_mismatch" if problem["loc"][-1] == "[key]":
            message = f"{quote(path[-1])} cannot name a step: use letters, digits, `_`, `.` and `-`, a letter first"
            return Finding("schema/value", message, path, place)
    hint = None
    wanted = [_WANTED[each["type"]] for each in problems if each["type"] in _WANTED]
    if len(wanted) == len(problems):
        wanted = [word for word in wanted if word != "a whole number" or "a number" not in wanted]
        message = f"should be {' or '.join(dict.fromkeys(wanted))}, and is {_kind_of(problem['input'])}"
        if "true or false" in wanted and str(problem["input"]).lower() in _YES_NO:
            hint = f"write {_YES_NO[str(problem['input']).lower()]}: in YAML 1.2 {problem['input']} is text"
    else:
        others = [each for each in problems if each["type"] not in _WANTED]
        message = str(others[0]["msg"]).removeprefix("Value error, ")
        if others[0]["type"] in ("too_short", "string_too_short"):
            message = "is empty"
        elif others[0]["type"] == "literal_error":
            expected = [word.strip("'") for word in others[0]["ctx"]["expected"].replace(" or ", ", ").split(", ")]
            message = f"{quote(others[0]['input'])} is not one of {', '.join(expected)}"
            hint = suggest(str(others[0]["input"]), expected)
    return Finding("schema/value", message, path, place, hint)


# What pydantic calls it: what a person would.
_WANTED = {
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
    "list_type": "a list",
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
}
_YES_NO = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
# What other tools call it. Only said where the key that is meant exists.
_ELSEWHERE = {
    "run": "exec",
    "script": "exec",
    "cmd": "exec",
    "command": "exec",
    "shell": "exec",
    "uses": "type",
    "when": "if",
    "after": "depends_on",
    "jobs": "steps",
    "tasks": "steps",
    "retry": "on_fail",
    "retries": "on_fail",
    "timeout_ms": "timeout",
    "timeout_seconds": "timeout",
    "question": "prompt",
    "file": "workflow",
}
# Kinds of steps that others have, and what does the same here.
_KINDS_ELSEWHERE = {
    "http": "did you mean 'http_client'?",
    "fetch": "did you mean 'http_client'?",
    "bash": "did you mean 'command'? It has `shell: bash`",
    "shell": "did you mean 'command'?",
    "script": "did you mean 'command'?",
    "exec": "did you mean 'command'?",
    "log": "a 'command' with `exec: echo …` does that",
    "logger": "a 'command' with `exec: echo …` does that",
    "noop": "a 'command' with `exec: 'true'` does that",
    "human": "did you mean 'human-input'?",
    "input": "did you mean 'human-input'?",
    "git": "did you mean 'git-checkout'?",
    "checkout": "did you mean 'git-checkout'?",
}


def suggest(word: str, known: Collection[str], otherwise: str | None = None) -> str | None:
    """Return what may have been meant by a word that is not known, or what there is."""
    if _ELSEWHERE.get(word) in known:
        return f"did you mean {_ELSEWHERE[word]!r}?"
    if len(word) <= WORD_LIMIT and len(known) <= COMPARED_LIMIT:
        plain = {_squeeze(name): name for name in reversed(list(known))}  # of two spellings the first
        import difflib

        close = difflib.get_close_matches(_squeeze(word), plain, n=1)
        if close:
            return f"did you mean {plain[close[0]]!r}?"
    if otherwise is None:
        return None
    names = list(known)
    more = f" and {len(names) - LISTED_LIMIT} more" if len(names) > LISTED_LIMIT * 2 else ""
    return otherwise + (", ".join(names[:LISTED_LIMIT] if more else names) or "none") + more


def _squeeze(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def _file_path(loc: Sequence[Any], plain: Any, kind: str) -> Path_:
    """Return the path in the file: the schema adds the tag of the chosen type, the branch of a union, `[key]`."""
    path: list[str | int] = []
    node = plain
    for position, part in enumerate(loc):
        if position == 2 and loc[0] in ("steps", "checks"):
            continue
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            if kind == "missing" and position == len(loc) - 1:
                path.append(part)
            continue
        path.append(part)
    return tuple(path)


def _model_at(loc: Sequence[Any]) -> type[Part]:
    """Return the part of the schema whose keys are known at this place."""
    match tuple(loc):
        case ("steps" | "checks", _, str(kind)):
            return STEP_TYPES[kind].schema
        case ("steps" | "checks", _, "ai", "ai", *inside):
            from ..providers import ai, ai_models

            parts = {"limits": ai.AiLimits, "mcp_servers": ai.AiServer, "fallback": ai_models.AiModel, "retry": Retry}
            if inside[-1:] == ["backoff"]:
                return Backoff
            return parts.get(str(inside[0]), ai.AiPart) if inside else ai.AiPart
        case (*_, "on_fail" | "on_success"):
            return Reaction
        case (*_, "approval", "Approval"):
            return Approval
        case (*_, "retry", "backoff"):
            return Backoff
        case (*_, "retry"):
            return StepRetry
        case ("tools", _):
            return ToolPart
        case ("inputs", _):
            return InputPart
        case ("defaults",):
            return DefaultsPart
    return WorkflowFile


def _keys_of(model: type[Part]) -> list[str]:
    """Return the keys of a part. Those of a step's own type come before those that every step has."""
    names = sorted(model.model_fields, key=lambda name: issubclass(model, StepPart) and name in StepPart.model_fields)
    return [key for name in names for key in model.keys_of(name)]


def _other_names(key: str) -> set[str]:
    """Return what else a key may be called in the file. Only of types that it has: nobody asks about others."""
    models: list[type[Part]] = [WorkflowFile, ToolPart, *(each.schema for each in STEP_TYPES.loaded)]
    return {other for model in models if key in model.model_fields for other in model.keys_of(key)[1:]}


def _sort(findings: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: _order(finding.place)))


def _order(place: SourcePosition) -> tuple[int, int]:
    return place.line, place.column


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case int() | float():
            return f"the number {quote(value).strip(chr(39))}"
    return f"the text {quote(value)}"


def _printable(part: str | int) -> str:
    text = str(part)
    return text if text.isprintable() and len(text) <= WORD_LIMIT else quote(text)
