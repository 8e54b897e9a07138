"""A workflow file read: the workflow, or everything that is wrong with its shape, each with file, line and column."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from .kinds import KINDS
from .schema import (
    STEP_TYPES,
    Backoff,
    DefaultsPart,
    InputPart,
    Part,
    Reaction,
    Retry,
    ToolPart,
    WorkflowFile,
)

# A file that a person wrote is far smaller; one that is larger was not meant for us.
SIZE_LIMIT = 4_000_000
# Aliases can make a small file unfold into a huge one.
NODE_LIMIT = 200_000

Path_ = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the file something stands. Lines and columns count from 1."""

    line: int = 1
    column: int = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about the file: an error keeps it from running, a warning does not."""

    rule: str
    message: str
    path: Path_ = ()
    place: Place = Place()
    suggestion: str | None = None
    is_error: bool = True

    @property
    def field(self) -> str:
        return ".".join(map(str, self.path)) or "file"


@dataclass(frozen=True)
class Source:
    """A file and where each of its keys stands."""

    name: str
    tree: Any = None
    folder: Path = field(default_factory=Path)

    def place_of(self, path: Sequence[str | int]) -> Place:
        """Of the key, or of the nearest thing around it that is there."""
        place, node = Place(), self.tree
        for part in path:
            if part == "steps" and isinstance(node, dict) and "steps" not in node:
                part = "checks"
            found = _position(node, part)
            if found is None:
                break
            place = found
            try:
                node = node[part]
            except (KeyError, IndexError, TypeError):
                break
        return place


@dataclass(frozen=True)
class Loaded:
    source: Source
    workflow: WorkflowFile | None
    findings: tuple[Finding, ...] = ()


def load_file(path: Path) -> Loaded:
    """Raises OSError if it cannot be read at all."""
    data = path.read_bytes()[: SIZE_LIMIT + 1]
    return load_text(data, str(path), path.parent)


def load_text(data: bytes, name: str = "workflow.yaml", folder: Path | None = None) -> Loaded:
    source = Source(name, None, folder or Path())
    if len(data) > SIZE_LIMIT:
        return Loaded(source, None, (Finding("file/size", f"is larger than {SIZE_LIMIT} bytes"),))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return Loaded(source, None, (Finding("file/encoding", "is not UTF-8", place=Place(line, 1)),))
    try:
        tree = _parser().load(text)
    except MarkedYAMLError as error:
        return Loaded(source, None, (_syntax(error),))
    except (YAMLError, ValueError, RecursionError) as error:
        return Loaded(source, None, (Finding("file/syntax", f"is no YAML: {str(error)[:200]}"),))
    source = Source(name, tree, folder or Path())
    if not isinstance(tree, CommentedMap):
        what = "is empty" if tree is None else f"holds a {_kind_of(tree)}"
        return Loaded(source, None, (Finding("file/shape", f"{what}; a workflow is a mapping with `steps`"),))
    try:
        plain = _plain(tree, [0])
    except _TooLarge:
        return Loaded(source, None, (Finding("file/size", f"unfolds into more than {NODE_LIMIT} values"),))
    plain, inferred = _with_types(plain)
    try:
        return Loaded(source, WorkflowFile.model_validate(plain), ())
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        findings = [_finding(source, problem, inferred) for problem in problems]
        return Loaded(source, None, tuple(sorted(findings, key=lambda found: (found.place.line, found.place.column))))


def _parser() -> YAML:
    parser = YAML(typ="rt", pure=True)
    parser.version = None
    parser.allow_duplicate_keys = False
    return parser


class _TooLarge(Exception):
    pass


def _plain(node: Any, count: list[int]) -> Any:
    """Without what ruamel needs to write it back. Timestamps and the like become the text they were."""
    count[0] += 1
    if count[0] > NODE_LIMIT:
        raise _TooLarge
    if isinstance(node, dict):
        return {str(key): _plain(value, count) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(item, count) for item in node]
    if node is None or isinstance(node, bool):
        return node
    for kind in (int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return str(node)


def _with_types(plain: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """A step that only says `exec` is a command. Which ones that was guessed for is told, for the messages."""
    inferred = set()
    for name in ("steps", "checks"):
        steps = plain.get(name)
        if isinstance(steps, dict):
            for step_id, step in steps.items():
                if isinstance(step, dict) and "type" not in step and "exec" in step:
                    step["type"] = "command"
                    inferred.add(step_id)
    return plain, inferred


# --- what is wrong, and where -----------------------------------------------------------------------------


def _syntax(error: MarkedYAMLError) -> Finding:
    mark = error.problem_mark or error.context_mark
    place = Place() if mark is None else Place(mark.line + 1, mark.column + 1)
    message = str(error.problem or error.context or error).strip().partition("\n")[0]
    if "duplicate key" in message:
        return Finding("file/duplicate-key", message, place=place, suggestion="remove or rename one of them")
    return Finding("file/syntax", f"is no YAML: {message}", place=place)


def _finding(source: Source, problem: Any, inferred: set[str]) -> Finding:
    loc = tuple(problem["loc"])
    path = _file_path(loc)
    kind, message, suggestion = problem["type"], str(problem["msg"]).removeprefix("Value error, "), None
    if kind == "extra_forbidden":
        model = _model_at(loc[:-1])
        known = _keys_of(model) if model is not None else []
        close = difflib.get_close_matches(str(path[-1]), known, n=1)
        suggestion = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(sorted(known))}"
        return Finding("schema/unknown-key", f"unknown key {path[-1]!r}", path, source.place_of(path), suggestion)
    if kind == "union_tag_invalid":
        written = problem.get("ctx", {}).get("tag", "")
        close = difflib.get_close_matches(str(written), KINDS, n=1)
        suggestion = f"did you mean {close[0]!r}?" if close else f"one of {', '.join(KINDS)}"
        if written == "ai":
            suggestion = "`ai` steps are not there yet"
        path = (*path, "type")
        return Finding("schema/type", f"unknown type {written!r}", path, source.place_of(path), suggestion)
    if kind == "union_tag_not_found":
        return Finding(
            "schema/type", "a step needs a `type`", path, source.place_of(path), f"one of {', '.join(KINDS)}"
        )
    if kind == "missing":
        rule, message = "schema/missing", f"{path[-1]!r} is missing"
        return Finding(rule, message, path, source.place_of(path[:-1]))
    return Finding("schema/value", message, path, source.place_of(path), suggestion)


def _file_path(loc: Sequence[Any]) -> Path_:
    """Without what pydantic adds: the tag of the chosen type, the branch of a union, `[key]`."""
    path: list[str | int] = []
    for position, part in enumerate(loc):
        if position == 2 and loc[0] in ("steps", "checks") and part in KINDS:
            continue
        if isinstance(part, str) and (part == "[key]" or part in _BRANCHES or "[" in part):
            continue
        path.append(part)
    return tuple(path)


_BRANCHES = {"str", "int", "float", "bool", "none", "constrained-str"}


def _model_at(loc: Sequence[Any]) -> type[Part] | None:
    """The part of the file whose keys are known at this place."""
    match tuple(loc):
        case ():
            return WorkflowFile
        case ("steps" | "checks", _, str(kind)):
            return STEP_TYPES.get(kind)
        case ("steps" | "checks", _, _, "on_fail" | "on_success") | ("defaults", "on_fail"):
            return Reaction
        case (*_, "retry", "backoff"):
            return Backoff
        case (*_, "retry"):
            return Retry
        case ("tools", _):
            return ToolPart
        case ("inputs", _):
            return InputPart
        case ("defaults",):
            return DefaultsPart
    return None


def _keys_of(model: type[Part]) -> list[str]:
    return [key for name, info in model.model_fields.items() for key in _names_of(name, info)]


def _names_of(name: str, info: FieldInfo) -> list[str]:
    if isinstance(info.validation_alias, AliasChoices):
        return [str(choice) for choice in info.validation_alias.choices]
    return [info.alias or name]


def _position(node: Any, part: str | int) -> Place | None:
    if not isinstance(node, CommentedMap | CommentedSeq):
        return None
    try:
        line, column = node.lc.key(part) if isinstance(node, CommentedMap) else node.lc.item(part)
    except (KeyError, AttributeError, TypeError, IndexError):
        return None
    return Place(line + 1, column + 1)


def _kind_of(tree: Any) -> str:
    return "list" if isinstance(tree, list) else "single value"
