"""Values between steps: sandboxed Jinja templates, and JSON Schemas of outputs.

A template may loop for ever, so it is rendered in a worker, on the clock, unless it holds only plain names (`{{
outputs.fetch.items }}`). So is a JSON Schema checked: its regular expressions may take for ever, and each of many
misfits keeps a copy of the value.
"""

from __future__ import annotations

import contextlib
import math
import re
import resource
from collections.abc import Callable, Container, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from ...core.errors import Failure
from ...core.json_values import as_plain, as_text, is_true, read_json, write_json
from ...core.value_types import JsonObject
from .schema import is_template
from .shell_quoting import has_marks, mark

# The timeout of the call does not bound memory, which could be used up before it fires.

# Beyond the memory of the worker: a few outputs several times over. `'a' * 9999999999` fails.
MEMORY_LIMIT = 512 * 1024 * 1024
TOO_MUCH = f"it takes more than {MEMORY_LIMIT >> 20} MB of memory"


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Make more memory raise MemoryError in this process. A worker has one call at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm") as statm:
            limit = int(statm.read().split()[0]) * resource.getpagesize() + MEMORY_LIMIT
    except OSError:  # macOS has neither this file nor a limit that works
        limit = 0
    if not limit or (soft != resource.RLIM_INFINITY and soft <= limit):
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def find_misfit(schema: JsonObject, value: Any) -> str | None:
    """Return why a value does not fit a JSON Schema, or None. Raises Failure if that takes too much memory."""
    from jsonschema import Draft202012Validator, SchemaError
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        with bounded_memory():
            Draft202012Validator.check_schema(schema)
            # With an empty registry, nothing is fetched.
            errors = Draft202012Validator(schema, registry=Registry()).iter_errors(value)
            return next((f"{problem.json_path}: {problem.message[:200]}" for problem in errors), None)
    except SchemaError as error:
        return f"it is not a JSON Schema: {error.message[:200]}"
    except Unresolvable as error:
        return f"its $ref cannot be followed: {str(error)[:200]}"
    except MemoryError:
        raise Failure("OUTPUT_INVALID", TOO_MUCH) from None


# Characters that one template may build. A template of one plain name returns the value itself.
OUTPUT_LIMIT = 10_000_000

_PLACEHOLDER = re.compile(r"\{\{-?\s*([A-Za-z_][\w-]*(?:\.[\w-]+|\[\d+\]|\['[^']*'\]|\[\"[^\"]*\"\])*)\s*-?\}\}")
# The last alternative is a tag without an end. It takes the rest, so that the search stays linear.
_TAG = re.compile(
    r"""(?P<expression>\{\{(?:[^'"}]|'[^']*'|"[^"]*"|\}(?!\}))*\}\})"""
    r"""|(?P<block>\{%(?:[^'"%]|'[^']*'|"[^"]*"|%(?!\}))*%\})"""
    r"""|\{[{%](?s:.*)"""
)
_PART = re.compile(r"\.([\w-]+)|\[(\d+)\]|\['([^']*)'\]|\[\"([^\"]*)\"\]")
_MENTIONED = re.compile(r"\b(?<![.\w'\"])(outputs|steps)(?:\.([\w-]+)|\[['\"]([^'\"]+)['\"]\])")
_DASHED = re.compile(r"""'[^']*'|"[^"]*"|\b(outputs|steps|inputs)\.([A-Za-z_][\w]*(?:-[\w]+)+)""")

Scope = Mapping[str, Any]


class TemplateError(Failure):
    def __init__(self, message: str) -> None:
        super().__init__("TEMPLATE_FAILED", message)


class Rendered(NamedTuple):
    text: str
    values: list[str]  # the values of the marks in the text


def is_simple(text: str) -> bool:
    """Return whether a template holds only plain names, which need no worker."""
    return "{%" not in text and "{{" not in _PLACEHOLDER.sub("", text)


def names_in(text: str) -> list[list[str]]:
    """Return the plain names, each as its head and the names behind it, up to a number."""
    found = []
    for name in _PLACEHOLDER.findall(text):
        head = _head_of(name)
        parts, at = [head], len(head)
        while (part := _PART.match(name, at)) is not None and part[2] is None:
            parts.append(part[1] or part[3] or part[4] or "")
            at = part.end()
        found.append(parts)
    return found


def render_simple(text: str, scope: Scope, *, marked: bool = False) -> Rendered:
    """Render plain names. Raises TemplateError for a missing one."""
    values: list[str] = []

    def replaced(found: re.Match[str]) -> str:
        value = as_text(look_up(found.group(1), scope))
        if not marked:
            return value
        values.append(value)
        return mark(len(values) - 1)

    _refuse_marks(text)
    made = _PLACEHOLDER.sub(replaced, text)
    if len(made) > OUTPUT_LIMIT:
        raise TemplateError(f"a template made more than {OUTPUT_LIMIT} characters")
    return Rendered(made, values)


def with_marks(template: str) -> str:
    """Return a command before it is rendered: with marks for its values, and without its blocks."""
    made = {"expression": mark(0), "block": ""}
    return _TAG.sub(lambda tag: made.get(tag.lastgroup or "", tag[0]), template)


def sole_name(text: str) -> str | None:
    """Return the name, if the whole template is one: its value keeps its type."""
    found = _PLACEHOLDER.fullmatch(text.strip())
    return None if found is None else found.group(1)


def _head_of(name: str) -> str:
    return re.split(r"[.\[]", name, maxsplit=1)[0]


def look_up(name: str, scope: Scope) -> Any:
    head = _head_of(name)
    if head not in scope:
        raise TemplateError(f"{name!r}: there is no {head!r}")
    value: Any = scope[head]
    for part in _PART.finditer(name, len(head)):
        key: Any = next(group for group in part.groups() if group is not None)
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, TypeError, ValueError):
            raise TemplateError(f"{name!r}: there is no {key!r} in it") from None
    return value


class Mention(NamedTuple):
    kind: str  # `outputs` or `steps`
    name: str


def mentions(template: str) -> list[Mention]:
    return [Mention(kind, dotted or quoted) for kind, dotted, quoted in _MENTIONED.findall(template)]


def uses_mapping(kind: str, template: str, steps: Container[str]) -> bool:
    """Return whether a template uses `outputs` or `steps` as a whole, perhaps by a method: `steps.items()`."""
    is_whole = re.search(rf"\b{kind}\b(?!\.|\[['\"])", template) is not None
    return is_whole or any(found.kind == kind and found.name not in steps for found in mentions(template))


@contextlib.contextmanager
def _computing(template: str) -> Iterator[None]:
    """Bound the memory of a computation. Every error in it becomes a TemplateError."""
    try:
        with bounded_memory():
            yield
    except TemplateError:
        raise
    except Exception as error:
        raise TemplateError(_why(template, error)) from None


def render_text(template: str, scope: JsonObject, marked: bool = False) -> list[Any]:
    """Return the text of a template and the values of its marks. Runs in a worker; raises TemplateError."""
    _refuse_marks(template)
    environment = environment_for(marked)
    environment.marked_values = []
    with _computing(template):
        tree = environment.parse(with_subscripts_in_tags(template))
        if marked and (refusal := refuse_text_block(tree)) is not None:
            raise TemplateError(f"{template[:100]!r}: {refusal}")
        parts, size = [], 0
        for part in environment.from_string(tree).generate(**scope):
            size += len(part)
            if size > OUTPUT_LIMIT:
                raise TemplateError(f"a template made more than {OUTPUT_LIMIT} characters")
            parts.append(part)
        return ["".join(parts), environment.marked_values]


def render_value(template: str, scope: JsonObject) -> Any:
    """Return the value of one expression, the text of any other template. Runs in a worker; raises TemplateError."""
    expression = sole_expression(template)
    if expression is None:
        return render_text(template, scope)[0]
    with _computing(template):
        value = _require_json(_evaluate_expression(expression, scope, undefined_to_none=False))
        if len(as_text(value)) > OUTPUT_LIMIT:
            raise ValueError(f"a template made more than {OUTPUT_LIMIT} characters")
        return value


def evaluate(template: str, scope: JsonObject) -> bool:
    """Return whether a condition holds, with or without braces. Runs in a worker; raises TemplateError."""
    expression = condition_expression(template)
    if expression is None:
        return is_true(render_text(template.strip(), scope)[0])
    with _computing(template):
        value = _evaluate_expression(expression, scope, undefined_to_none=True)
        return is_true(list(value) if isinstance(value, Iterator) else value)


def sole_expression(template: str) -> str | None:
    """Return the expression, if the whole template is one pair of braces."""
    written = template.strip()
    if not (written.startswith("{{") and written.endswith("}}")):
        return None
    from jinja2 import TemplateSyntaxError

    try:
        kinds = [kind for _, kind, _ in environment_for(False).lex(written)]
    except TemplateSyntaxError:
        return None  # reported when it is rendered
    if kinds.count("variable_begin") != 1 or kinds[-1] != "variable_end":
        return None
    # `{{-` and `-}}` only remove the spaces around them.
    return written[2:-2].removeprefix("-").removesuffix("-").strip()


def condition_expression(condition: str) -> str | None:
    """Return the expression of a condition; None if it is text with templates."""
    return sole_expression(condition) if is_template(condition) else condition.strip()


def _evaluate_expression(expression: str, scope: JsonObject, *, undefined_to_none: bool) -> Any:
    written = with_subscripts(expression)
    return environment_for(False).compile_expression(written, undefined_to_none=undefined_to_none)(**scope)


def _require_json(value: Any) -> Any:
    plain, kept = as_plain(value)
    if kept:
        raise ValueError(f"{kept[0][:40]} is not a number that JSON can hold")
    return plain


def _why(template: str, error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"{template[:100]!r}: {TOO_MUCH}"
    why = f"{template[:100]!r}: {type(error).__name__}: {error}"
    if isinstance(error, TypeError) and "str" in str(error) and re.search(r"\b(int|float)\b", str(error)):
        why += "; the output of a command is text: write `| int` or `| float` after it, or `output_format: json`"
    return why


def refuse_text_block(tree: Any) -> str | None:
    """Return why a command is refused: a block makes text of other text, in which values would lose their marks."""
    from jinja2 import nodes

    blocks = {
        nodes.Macro: "macro",
        nodes.CallBlock: "call",
        nodes.FilterBlock: "filter",
        nodes.AssignBlock: "set … %}…{% endset",
        nodes.Block: "block",
    }
    found = [blocks[type(node)] for node in tree.find_all(tuple(blocks))]
    found += ["for … recursive" for loop in tree.find_all(nodes.For) if loop.recursive]
    if not found:
        return None
    return f"a command cannot use {{% {found[0]} %}}: write the command out, and filter each value itself"


@lru_cache(maxsize=2)
def environment_for(marked: bool) -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def finalize(value: Any) -> Any:
        if isinstance(value, StrictUndefined):
            return value  # its use raises an error that names it
        if not marked:
            return as_text(value)
        environment.marked_values.append(as_text(value))
        return mark(len(environment.marked_values) - 1)

    class Environment(ImmutableSandboxedEnvironment):
        marked_values: list[str]

        def getattr(self, obj: Any, attribute: str) -> Any:
            if isinstance(obj, dict) and attribute in obj:  # `.items` of JSON is the key, not the method
                return obj[attribute]
            return super().getattr(obj, attribute)

    environment = Environment(
        # The default `{#` would make a comment of everything behind the shell's `${#name}`.
        comment_start_string="\ue002",
        comment_end_string="\ue003",
        undefined=StrictUndefined,
        finalize=finalize,
        autoescape=False,
        keep_trailing_newline=True,
    )
    environment.filters["tojson"] = lambda value, indent=None: write_json(_require_json(value), indent)
    environment.filters["fromjson"] = lambda text: read_json(text).value
    environment.filters["bool"] = is_true
    for name, parse in (("int", _to_int), ("float", float)):
        environment.filters[name] = _number_filter(name, parse, environment.filters[name])
    return environment


def _number_filter(name: str, parse: Callable[[Any], int | float], with_default: Callable[..., Any]) -> Any:
    """Return Jinja's `int` or `float` with an error in place of its silent 0, unless there is a default."""

    def convert(value: Any, *default: Any, **named: Any) -> Any:
        if default or named:
            return with_default(value, *default, **named)
        try:
            number = parse(value)
            if abs(number) != math.inf and number == number:
                return number
        except (TypeError, ValueError, OverflowError):
            pass
        raise ValueError(f"{str(value)[:40]!r} is not a number that `| {name}` can make; `| {name}(0)` has a default")

    return convert


def _to_int(value: Any) -> int:
    try:
        return int(value)
    except ValueError:
        return int(float(value))  # "2.5" becomes 2, as in Jinja


def with_subscripts(expression: str) -> str:
    """Write step ids with dashes as subscripts: Jinja would read a minus."""
    return _DASHED.sub(lambda found: f"{found[1]}['{found[2]}']" if found[1] else found[0], expression)


def with_subscripts_in_tags(template: str) -> str:
    return _TAG.sub(lambda tag: with_subscripts(tag[0]), template)


def _refuse_marks(template: str) -> None:
    if has_marks(template):
        raise TemplateError("a template must not hold the characters U+E000 to U+E003")
