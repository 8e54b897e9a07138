"""The loader of workflow files: the workflow, or every mistake in its shape with its position."""

from __future__ import annotations

import contextlib
import copy
import difflib
import errno
import hashlib
import os
import stat
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ...calls.call import Outcome
from ...core import foreign_words
from ...core.envelope import Problem
from ...core.errors import Ending, Failure
from ...core.validation import Part, ValidationError
from ...core.value_types import JsonObject, field, replace, value
from ..steps.provider import STEP_TYPES, StepPart
from ._env_files import EnvFiles, files_of
from ._step_list import merge_finally, name_steps
from .schema import ToolPart, WorkflowFile
from .yaml_reader import TOP, SourcePosition, Spot, quote, read_tree

SIZE_LIMIT = 4_000_000  # bytes. A file that a person wrote is far smaller
FINDINGS_LIMIT = 200
# Characters of a word, and names, for which a similar name is searched: the time grows with the square.
WORD_LIMIT, COMPARED_LIMIT = 60, 500
LISTED_LIMIT = 15
SALVAGE_ROUNDS = 4  # removing a mistake may leave something missing

Path_ = tuple[str | int, ...]


@value
class Finding:
    """An error, which keeps the file from running, or a warning."""

    rule: str
    message: str
    path: Path_ = ()
    place: SourcePosition = TOP
    suggestion: str | None = None
    is_error: bool = True
    file: str | None = None  # if it is not the checked file but one that it runs

    @property
    def field(self) -> str:
        return ".".join(_printable(part) for part in self.path) or "file"


@value
class Source:
    name: str
    spots: Spot = field(default_factory=Spot)
    folder: Path = field(default_factory=Path)
    size: int = 0  # in bytes
    sha256: str = ""

    def place_of(self, path: Sequence[str | int]) -> SourcePosition:
        """Return the position of a key, or of the nearest existing key around it."""
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
    readable: WorkflowFile | None  # without the mistakes in its shape, to find others
    findings: tuple[Finding, ...] = ()

    @property
    def workflow(self) -> WorkflowFile | None:
        """The file, if its shape has no mistake."""
        return None if self.findings else self.readable

    def format_finding(self, found: Finding) -> str:
        """Return one line, as compilers write it."""
        hint = f"; {found.suggestion}" if found.suggestion else ""
        return f"{found.file or self.source.name}:{found.place.line}:{found.place.column}: {found.message}{hint}"

    def format_errors(self, findings: Sequence[Finding]) -> tuple[str, list[dict[str, str]]]:
        """Return the number of problems in words, and the errors for an envelope."""
        count = "1 problem" if len(findings) == 1 else f"{len(findings)} problems"
        errors = [{"field": found.field, "message": self.format_finding(found)} for found in findings]
        return f"{self.source.name}: {count}, nothing ran", errors


def load_file(path: Path) -> Loaded:
    """Raises OSError. A pipe or a device may never end, so it is not read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
        data = file.read(SIZE_LIMIT + 1)
    return load_text(data, str(path), path.parent)


def try_load(file: str | Path) -> Loaded | Failure:
    name = str(file)
    try:
        return load_file(Path(file))
    except FileNotFoundError:
        return Failure("FILE_NOT_FOUND", f"there is no file {name!r}")
    except OSError as error:
        hint = None if isinstance(error, PermissionError) else "name a file that holds a workflow"
        return Failure("FILE_UNREADABLE", f"{name!r} cannot be read: {error.strerror}", suggestion=hint)
    except ValueError:  # a NUL in its name
        return Failure("FILE_NOT_FOUND", f"{name!r} cannot be the name of a file")


def load_or_refuse(flow: str) -> Loaded | Outcome:
    loaded = try_load(flow)
    if isinstance(loaded, Loaded):
        return loaded
    return Outcome(Ending.NOT_STARTED, Problem(loaded.code, str(loaded), "validation", suggestion=loaded.suggestion))


def judge(
    loaded: Loaded, findings: list[Finding], data: dict[str, object] | None = None, *, may_be_tight: bool = False
) -> Outcome:
    """Return the outcome of a check, with `data`. With `may_be_tight`, clocks that cannot fit are no errors."""
    wrong = [finding for finding in findings if finding.is_error]
    if may_be_tight:
        wrong = [finding for finding in wrong if not finding.rule.startswith("budget/")]
    described = [_describe_finding(loaded, finding) for finding in findings]
    data = {"file": loaded.source.name, "findings": described, **(data or {})}
    if not wrong:
        return Outcome(Ending.FINISHED, data=data)
    message, errors = loaded.format_errors(wrong)
    return Outcome(Ending.FINISHED, Problem("WORKFLOW_INVALID", message, "validation", errors=errors), data)


def _describe_finding(loaded: Loaded, finding: Finding) -> dict[str, object]:
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
    source = Source(name, folder=folder or Path(), size=len(data), sha256=hashlib.sha256(data).hexdigest())
    if len(data) > SIZE_LIMIT:
        return Loaded(source, None, (Finding("file/size", f"is larger than {SIZE_LIMIT} bytes"),))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].rpartition(b"\n")[2].decode("utf-8", "replace")
        place = SourcePosition(data.count(b"\n", 0, error.start) + 1, len(before) + 1)
        return Loaded(source, None, (Finding("file/encoding", "is not UTF-8", place=place),))
    tree = read_tree(text)
    source = replace(source, spots=tree.spots)
    flaws = [Finding(flaw.rule, flaw.message, (), flaw.place, flaw.suggestion) for flaw in tree.flaws]
    if tree.is_whole and not isinstance(tree.value, dict):
        content = "is empty" if tree.value is None else f"holds {_kind_of(tree.value)}"
        flaws.append(Finding("file/shape", f"{content}; a workflow is a mapping with `steps`", place=tree.spots.place))
    if not tree.is_whole or not isinstance(tree.value, dict):
        return Loaded(source, None, tuple(flaws))
    written, listed = dict(tree.value), []
    for key in ("steps", "checks"):
        if isinstance(written.get(key), list):
            named = name_steps(written[key], tree.spots.inside[key], written.get("defaults"))
            written[key], tree.spots.inside[key] = named.steps, named.spots
            listed += named.flaws
    listed += merge_finally(written, tree.spots)
    for name, flaw in listed:
        path = ("steps", name) if name else ("finally",)
        flaws.append(Finding(flaw.rule, flaw.message, path, flaw.place, flaw.suggestion))
    plain = _translate(written, source.folder)
    try:
        return _with_env_files(Loaded(source, WorkflowFile.model_validate(plain), tuple(flaws)))
    except ValidationError as error:
        salvaged, more = _salvage(source, plain, error)
        return _with_env_files(Loaded(source, salvaged, (*flaws, *_findings(source, error), *more)))


def _with_env_files(loaded: Loaded) -> Loaded:
    """Return the file with the variables of its `env_file`s, and a digest that covers them."""
    source, workflow = loaded.source, loaded.readable
    if workflow is None or not files_of(workflow):
        return replace(loaded, findings=_sort([*loaded.findings]))
    files = EnvFiles(source.folder, {})
    merged, flaws = files.merge_into(workflow)
    found = [Finding(flaw.rule, flaw.message, flaw.path, source.place_of(flaw.path), flaw.suggestion) for flaw in flaws]
    digest = hashlib.sha256(source.sha256.encode())
    for data in files.contents.values():
        digest.update(hashlib.sha256(data if isinstance(data, bytes) else b"").digest())
    source = replace(source, sha256=digest.hexdigest())
    return Loaded(source, merged, _sort([*loaded.findings, *found]))


def _salvage(source: Source, plain: JsonObject, error: ValidationError) -> tuple[WorkflowFile | None, list[Finding]]:
    """Return the file without its mistakes, if anything is left; and those in steps of an unknown type."""
    left = copy.deepcopy(plain)
    unknown: set[str] = set()
    found: list[Finding] = []
    for _ in range(SALVAGE_ROUNDS):
        for problem in error.errors(include_url=False):
            path = problem["loc"]
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


def _repair(left: JsonObject, path: Path_, kind: str) -> None:
    """Remove a mistake. A step keeps its name."""
    if len(path) == 2 and path[0] in ("steps", "checks") and kind != "invalid_key":
        if path[1] not in left.get(path[0], {}):
            return  # removed already, because its name is invalid as well
        written = left[path[0]][path[1]]
        if not isinstance(written, dict):
            written = {}
        known = {key for name in StepPart.model_fields for key in StepPart.keys_of(name)}
        kept = {key: value for key, value in written.items() if key in known}
        exec_ = written.get("exec")
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
        node[short[-1]] = 1 if short[-1] == "max" else "x"  # all other required keys hold text
    else:
        node.pop(short[-1], None)


# Keys of a step, or of the file, and the keys of the `ai` block with the same meaning.
_AI_KEYS = {"ai_model": "model", "ai_provider": "provider", "ai_mcp_servers": "mcp_servers", "ai_custom_tools": "tools"}


def _translate(plain: JsonObject, folder: Path) -> JsonObject:
    """Return the file in the schema's keys, without `x-…`. Keys of another meaning stay, and are refused later."""
    made = {key: value for key, value in plain.items() if not key.startswith("x-")}
    if isinstance(imports := made.get("imports"), list) and isinstance(made.get("tools", {}), dict):
        named = {find_id(folder / file): {"workflow": file} for file in imports if isinstance(file, str)}
        if len(named) == len(imports):
            made["tools"] = {**named, **made.get("tools", {})}
            del made["imports"]
    for key, read in (("inputs", _read_input), ("outputs", _read_output)):
        listed = made.get(key)
        if isinstance(listed, list) and all(isinstance(i, dict) and isinstance(i.get("name"), str) for i in listed):
            made[key] = {item["name"]: read(item) for item in listed}
    for_all = {key: made[key] for key in _AI_KEYS if key in made}
    for name in ("steps", "checks"):
        if isinstance(steps := made.get(name), dict):
            made[name] = {step_id: _translate_step(step, for_all) for step_id, step in steps.items()}
            made = {key: value for key, value in made.items() if key not in for_all}
    return made


def _translate_step(step: Any, for_all: JsonObject) -> Any:
    if isinstance(step, dict) and step.get("type") is None and "exec" in step:
        return {**step, "type": "command"}
    if not isinstance(step, dict) or step.get("type") != "ai" or not isinstance(step.get("ai", {}), dict):
        return step
    made, block = dict(step), {}
    for key, name in _AI_KEYS.items():
        if key in step and name not in step.get("ai", {}):
            block[name] = made.pop(key)
        elif key in for_all:
            block[name] = for_all[key]
    if isinstance(tools := block.get("tools"), list):  # some are written as {workflow: NAME}
        block["tools"] = [
            each["workflow"] if isinstance(each, dict) and set(each) == {"workflow"} else each for each in tools
        ]
    return {**made, "ai": {**block, **step.get("ai", {})}} if block else step


def _read_input(written: JsonObject) -> Any:
    made = {key: value for key, value in written.items() if key != "name"}
    if isinstance(schema := made.get("schema"), dict) and set(schema) == {"type"}:
        made["type"] = made.pop("schema")["type"]
    return made


def _read_output(written: JsonObject) -> Any:
    return written["value"] if set(written) <= {"name", "value", "description"} and "value" in written else written


def find_id(file: Path) -> str:
    """Return the `id` of a workflow file, or its name; `check` reports why it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        if file.is_file() and file.stat().st_size <= SIZE_LIMIT:
            found = read_tree(file.read_text("utf-8-sig")).value
            if isinstance(found, dict) and isinstance(found.get("id"), str):
                return str(found["id"])
    return file.stem


def _findings(source: Source, error: ValidationError) -> list[Finding]:
    """Return one finding per path: a value that has none of several types is one mistake."""
    by_path: dict[Path_, list[Any]] = {}
    for problem in error.errors(include_url=False):
        by_path.setdefault(problem["loc"], []).append(problem)
    around = {path[:depth] for path in by_path for depth in range(len(path))}
    for path, problems in list(by_path.items()):
        # A mistake inside a mapping shows which of several shapes was meant.
        if path in around:
            problems[:] = [each for each in problems if each["type"] not in _WANTED]
            if not problems:
                del by_path[path]
    paths = sorted(by_path, key=source.place_of)
    found = [_finding(source, path, by_path[path]) for path in paths[:FINDINGS_LIMIT]]
    if len(paths) > FINDINGS_LIMIT:
        found.append(Finding("schema/more", f"and {len(paths) - FINDINGS_LIMIT} problems more", place=found[-1].place))
    return found


def _finding(source: Source, path: Path_, problems: list[Any]) -> Finding:
    problem = problems[0]
    place, written = source.place_of(path), problem["input"]
    match problem["type"]:
        case "extra_forbidden":
            return _unknown_key(path, place, problem["ctx"]["part"])
        case "union_tag_invalid":
            path, name = (*path, "type"), written.get("type")
            hint = foreign_words.KINDS.get(str(name)) or suggest(str(name), STEP_TYPES, otherwise="one of ")
            message = "a step needs a `type`" if name is None else f"unknown type {quote(name)}"
            return Finding("schema/type", message, path, source.place_of(path), hint)
        case "union_tag_not_found":
            hint = _meant_keys(written) or suggest("", STEP_TYPES, otherwise="one of ")
            return Finding("schema/type", "a step needs a `type`", path, place, hint)
        case "missing":
            return Finding("schema/missing", f"{path[-1]!r} is missing", path, source.place_of(path[:-1]))
        case "invalid_key":
            message = f"{quote(path[-1])} cannot name a step: use letters, digits, `_`, `.` and `-`, a letter first"
            return Finding("schema/value", message, path, place)
    message, hint = _wrong_value(problems)
    return Finding("schema/value", message, path, place, hint)


def _meant_keys(step: Any) -> str | None:
    """Return the keys that a step without a type may have meant, as if it were a command."""
    schema = STEP_TYPES["command"].schema
    known = [key for name in schema.model_fields for key in schema.keys_of(name)]
    unknown = [key for key in step if isinstance(key, str) and key not in known] if isinstance(step, dict) else []
    meant = {key: suggest(key, known) for key in unknown}
    return " ".join(f"{quote(key)}: {hint}" for key, hint in meant.items() if hint) or None


def _unknown_key(path: Path_, place: SourcePosition, part: type[Part]) -> Finding:
    key = str(path[-1])
    # Keys of the step's own type come first.
    names = sorted(part.model_fields, key=lambda name: issubclass(part, StepPart) and name in StepPart.model_fields)
    known = {other: part.keys_of(name)[0] for name in names for other in part.keys_of(name)}
    if key in known:
        message = f"{key!r} is another name of {known[key]!r}, which is there as well"
        return Finding("schema/twice", message, path, place, "keep one of them")
    hint = suggest(key, known, otherwise="known here: ")
    return Finding("schema/unknown-key", f"unknown key {quote(key)}", path, place, hint)


def _wrong_value(problems: list[Any]) -> tuple[str, str | None]:
    wanted = [_WANTED[each["type"]] for each in problems if each["type"] in _WANTED]
    if len(wanted) == len(problems):
        written = problems[0]["input"]
        wanted = [word for word in wanted if word != "a whole number" or "a number" not in wanted]
        meant = _YES_NO.get(str(written).lower()) if "true or false" in wanted else None
        hint = None if meant is None else f"write {meant}: in YAML 1.2 {written} is text"
        return f"should be {' or '.join(dict.fromkeys(wanted))}, and is {_kind_of(written)}", hint
    other = next(each for each in problems if each["type"] not in _WANTED)
    if other["type"] in ("too_short", "string_too_short"):
        return "is empty", None
    if other["type"] == "literal_error":
        expected = [word.strip("'") for word in other["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        return f"{quote(other['input'])} is not one of {', '.join(expected)}", suggest(str(other["input"]), expected)
    return str(other["msg"]).removeprefix("Value error, "), None


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


# Keys of other tools, and the key here. Suggested where that key exists.
def suggest(word: str, known: Collection[str], otherwise: str | None = None) -> str | None:
    """Return the name that may have been meant, or else the known names after `otherwise`."""
    if foreign_words.KEYS.get(word) in known:
        return f"did you mean {foreign_words.KEYS[word]!r}?"
    if len(word) <= WORD_LIMIT and len(known) <= COMPARED_LIMIT:
        plain = {_squeeze(name): name for name in reversed(list(known))}  # of two spellings the first
        if close := difflib.get_close_matches(_squeeze(word), plain, n=1):
            return f"did you mean {plain[close[0]]!r}?"
    if otherwise is None:
        return None
    names = list(known)
    more = f" and {len(names) - LISTED_LIMIT} more" if len(names) > LISTED_LIMIT * 2 else ""
    return otherwise + (", ".join(names[:LISTED_LIMIT] if more else names) or "none") + more


def _squeeze(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def _other_names(key: str) -> set[str]:
    """Return the other names of a key, for the types of steps that have it."""
    models: list[type[Part]] = [WorkflowFile, ToolPart, *(each.schema for each in STEP_TYPES.loaded)]
    return {other for model in models if key in model.model_fields for other in model.keys_of(key)[1:]}


def _sort(findings: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: finding.place))


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
