"""Declared shapes of data, checked strictly: every problem at once, each with its path.

    class Retry(Part):
        max: int = field(ge=0)
        backoff: Backoff = Backoff()

In place of pydantic, whose import and models took longer than running a step. A class is analysed when a file first
contains such a part. Problems and JSON Schemas are those that pydantic would write.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal, Self, dataclass_transform, get_args, get_origin

from .value_types import JsonObject, value

Problem = JsonObject
Problems = list[Problem]
Schema = JsonObject
Definitions = JsonObject
Loc = tuple[str | int, ...]

MISSING: Any = type("MISSING", (), {"__repr__": lambda self: "MISSING"})()
_WRONG: Any = object()
# A larger integer is not the same number as a float.
_EXACT_AS_FLOAT = 2**53


class ValidationError(ValueError):
    def __init__(self, name: str, problems: Problems) -> None:
        lines = [f"{'.'.join(map(str, each['loc']))}\n  {each['msg']}" for each in problems]
        super().__init__("\n".join([f"{len(problems)} problems with {name}", *lines]))
        self._problems = problems

    def errors(self, **_: object) -> Problems:
        return self._problems


@value
class FieldInfo:
    default: Any
    keys: tuple[str, ...]
    limits: Limits

    def is_required(self) -> bool:
        return self.default is MISSING


@value
class Limits:
    ge: int | None = None
    le: int | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None


@value
class Before:
    """Function that is called with the written value before its type is checked. Raises ValueError."""

    function: Callable[[Any], Any]
    written_as: Any = None  # the type in a file, for the JSON Schema


@value
class After:
    """Function that is called with a value of the right type. Raises ValueError."""

    function: Callable[[Any], Any]


def field(default: Any = MISSING, *, keys: tuple[str, ...] = (), **limits: Any) -> Any:
    """Declare a key: its names, the preferred one first, and its limits."""
    return FieldInfo(default, keys, Limits(**limits))


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
class Part:
    """An object of a file. An unknown key is a problem. The fields cannot be changed."""

    model_fields: ClassVar[dict[str, FieldInfo]] = {}
    _shape: ClassVar[_PartShape | None]

    def __init_subclass__(cls) -> None:
        cls.model_fields = dict(cls.model_fields)
        cls._shape = None
        for name in cls.__annotations__:
            written = cls.__dict__.get(name, MISSING)
            info = written if isinstance(written, FieldInfo) else FieldInfo(written, (), Limits())
            cls.model_fields[name] = FieldInfo(info.default, info.keys or (name,), info.limits)
            if name in cls.__dict__:
                delattr(cls, name)

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(type(self).model_validate(values).__dict__)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._values() == other._values()

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self._values().items())})"

    def _values(self) -> JsonObject:
        return {name: self.__dict__[name] for name in self.model_fields}

    @classmethod
    def keys_of(cls, name: str) -> list[str]:
        return list(cls.model_fields[name].keys)

    @classmethod
    def before_field(cls, name: str, written: Any) -> Any:
        """Check or convert a written value before its type is checked. Raises ValueError."""
        return written

    def check_together(self) -> None:
        """Check the combination of fields that are valid each by itself. Raises ValueError."""

    @classmethod
    def model_validate(cls, written: Any) -> Self:
        """Return the part of a written object. Raises ValidationError with all problems."""
        problems: Problems = []
        part: Any = _shape_of_part(cls).check(written, (), problems)
        if problems:
            raise ValidationError(cls.__name__, problems)
        return part  # type: ignore[no-any-return]

    def model_dump(self, *, exclude_unset: bool = False) -> JsonObject:
        """Return the part as a file could contain it."""
        written = self.__dict__["_written"]
        return {
            info.keys[0]: _dump(self.__dict__[name], exclude_unset)
            for name, info in self.model_fields.items()
            if not exclude_unset or name in written
        }


def _dump(value: Any, exclude_unset: bool) -> Any:
    if isinstance(value, Part):
        return value.model_dump(exclude_unset=exclude_unset)
    if type(value) is dict:
        return {key: _dump(item, exclude_unset) for key, item in value.items()}
    return [_dump(item, exclude_unset) for item in value] if type(value) is list else value


class Shape:
    """Shape of a value. `check` returns the value, or _WRONG after it has added a problem."""

    has_title = True  # a key of this shape has a title in the JSON Schema

    def check(self, value: object, loc: Loc, problems: Problems) -> object:
        raise NotImplementedError

    def schema(self, definitions: Definitions) -> Schema:
        raise NotImplementedError

    def limit(self, limits: Limits) -> Shape:
        return _Limited(self, limits)


def _note(problems: Problems, kind: str, loc: Loc, message: str, value: object, **context: object) -> Any:
    problems.append({"type": kind, "loc": loc, "msg": message, "input": value, "ctx": context})
    return _WRONG


class _Anything(Shape):
    def check(self, value: object, loc: Loc, problems: Problems) -> object:
        return value

    def schema(self, definitions: Definitions) -> Schema:
        return {}


_SCALARS: dict[type, tuple[str, str, str]] = {
    str: ("string", "string_type", "a valid string"),
    int: ("integer", "int_type", "a valid integer"),
    float: ("number", "float_type", "a valid number"),
    bool: ("boolean", "bool_type", "a valid boolean"),
    type(None): ("null", "none_required", "None"),
}


class _Scalar(Shape):
    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._name, self._problem, self._wanted = _SCALARS[kind]

    def check(self, value: object, loc: Loc, problems: Problems) -> object:
        if type(value) is self._kind:
            return value
        return _note(problems, self._problem, loc, f"Input should be {self._wanted}", value)

    def schema(self, definitions: Definitions) -> Schema:
        return {"type": self._name}


class _WholeText(_Scalar):
    """Text of a file, without half characters."""

    def check(self, value: object, loc: Loc, problems: Problems) -> object:
        try:
            if type(value) is str and not value.isascii():
                value.encode()
        except UnicodeEncodeError:
            message = "Input should be a valid string, unable to parse raw data as a unicode string"
            return _note(problems, "string_unicode", loc, message, value)
        return super().check(value, loc, problems)


class _PlainFloat(_Scalar):
    """Float of an argument, which may be written as an integer."""

    def check(self, value: object, loc: Loc, problems: Problems) -> object:
        if type(value) is int and abs(value) <= _EXACT_AS_FLOAT:
            return float(value)
        return super().check(value, loc, problems)


class _Choice(Shape):
    def __init__(self, choices: tuple[str, ...]) -> None:
        self._choices = choices

    def check(self, value: object, loc: Loc, problems: Problems) -> object:
        if type(value) is str and value in self._choices:
            return value
        quoted = [repr(choice) for choice in self._choices]
        expected = " or ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1])))
        return _note(problems, "literal_error", loc, f"Input should be {expected}", value, expected=expected)

    def schema(self, definitions: Definitions) -> Schema:
        words: JsonObject = {"enum": list(self._choices)}
        return {**({"const": self._choices[0]} if len(self._choices) == 1 else words), "type": "string"}


class _Nullable(Shape):
    def __init__(self, inside: Shape) -> None:
        self._inside = inside
        self.has_title = inside.has_title

    def check(self, value: object, loc: Loc, problems: Problems) -> object:
        return None if value is None else self._inside.check(value, loc, problems)

    def schema(self, definitions: Definitions) -> Schema:
        inside = self._inside.schema(definitions)
        return {"anyOf": [*inside.get("anyOf", [inside]), {"type": "null"}]}

    def limit(self, limits: Limits) -> Shape:
        return _Nullable(self._inside.limit(limits))


class _Either(Shape):
    """One of several shapes. A value with none of them has the problems of each."""

    def __init__(self, members: list[Shape]) -> None:
        self._members = members

    def check(self, value: object, loc: Loc, problems: Problems) -> object:
        noted: Problems = []
        for member in self._members:
            wrong: Problems = []
            found = member.check(value, loc, wrong)
            if not wrong:
                return found
            noted += wrong
        problems += noted
        return _WRONG

    def schema(self, definitions: Definitions) -> Schema:
        return {"anyOf": [member.schema(definitions) for member in self._members]}


class _ListOf(Shape):
    def __init__(self, item: Shape) -> None:
        self._item = item

    def check(self, value: object, loc: Loc, problems: Problems) -> object:
        if type(value) is not list:
            return _note(problems, "list_type", loc, "Input should be a valid list", value)
        return [self._item.check(item, (*loc, place), problems) for place, item in enumerate(value)]

    def schema(self, definitions: Definitions) -> Schema:
        return {"items": self._item.schema(definitions), "type": "array"}


class _DictOf(Shape):
    def __init__(self, key: Shape, item: Shape) -> None:
        self._key, self._item = key, item

    def check(self, value: object, loc: Loc, problems: Problems) -> object:
        if type(value) is not dict:
            return _note(problems, "dict_type", loc, "Input should be a valid dictionary", value)
        checked = {}
        for key, item in value.items():
            wrong: Problems = []
            self._key.check(key, (*loc, key), wrong)
            problems += [{**each, "type": "invalid_key"} for each in wrong]
            checked[key] = self._item.check(item, (*loc, key), problems)
        return checked

    def schema(self, definitions: Definitions) -> Schema:
        item = self._item.schema(definitions)
        key = self._key.schema(definitions)
        if "pattern" not in key:
            return {"additionalProperties": item or True, "type": "object"}
        others = {name: limit for name, limit in key.items() if name not in ("pattern", "type")}
        return {"patternProperties": {key["pattern"]: item}, "propertyNames": others, "type": "object"}


class _Limited(Shape):
    def __init__(self, inside: Shape, limits: Limits) -> None:
        self._inside, self._limits = inside, limits
        self._pattern = None if limits.pattern is None else re.compile(limits.pattern)

    def check(self, value: object, loc: Loc, problems: Problems) -> object:
        checked: Any = self._inside.check(value, loc, problems)
        if checked is _WRONG or (exceeded := self._find_exceeded(checked)) is None:
            return checked
        return _note(problems, exceeded[0], loc, exceeded[1], checked)

    def _find_exceeded(self, value: Any) -> tuple[str, str] | None:
        limits = self._limits
        if limits.ge is not None and value < limits.ge:
            return "greater_than_equal", f"Input should be greater than or equal to {limits.ge}"
        if limits.le is not None and value > limits.le:
            return "less_than_equal", f"Input should be less than or equal to {limits.le}"
        if limits.min_length is not None and len(value) < limits.min_length:
            kind = "string_too_short" if type(value) is str else "too_short"
            return kind, f"should have at least {limits.min_length}"
        if limits.max_length is not None and len(value) > limits.max_length:
            return "string_too_long", f"String should have at most {limits.max_length} characters"
        if self._pattern is not None and self._pattern.search(value) is None:
            return "string_pattern_mismatch", f"String should match pattern '{limits.pattern}'"
        return None

    def schema(self, definitions: Definitions) -> Schema:
        inside = self._inside.schema(definitions)
        lengths = ("minLength", "maxLength") if inside.get("type") == "string" else ("minProperties", "maxProperties")
        names = {"ge": "minimum", "le": "maximum", "pattern": "pattern"}
        names |= {"min_length": lengths[0], "max_length": lengths[1]}
        limits = {names[each]: limit for each in names if (limit := getattr(self._limits, each)) is not None}
        return {**inside, **limits}


class _Called(Shape):
    def __init__(self, inside: Shape, function: Before | After) -> None:
        self._inside, self._function = inside, function
        self.has_title = inside.has_title

    def check(self, value: object, loc: Loc, problems: Problems) -> object:
        called = self._function
        if isinstance(called, Before):
            value = _call(called.function, value, loc, problems)
            return value if value is _WRONG else self._inside.check(value, loc, problems)
        count = len(problems)
        checked = self._inside.check(value, loc, problems)
        return checked if len(problems) > count else _call(called.function, checked, loc, problems)

    def schema(self, definitions: Definitions) -> Schema:
        written_as = getattr(self._function, "written_as", None)
        return (self._inside if written_as is None else _shape(written_as)).schema(definitions)


def _call(function: Callable[[Any], Any], value: object, loc: Loc, problems: Problems) -> object:
    try:
        return function(value)
    except ValueError as error:
        return _note(problems, "value_error", loc, f"Value error, {error}", value)


class _Tagged(Shape):
    def __init__(self, key: str, parts: Mapping[str, type[Part]]) -> None:
        self._key, self._parts = key, parts

    def check(self, value: object, loc: Loc, problems: Problems) -> object:
        if type(value) is not dict:
            message = "Input should be a valid dictionary or object to extract fields from"
            return _note(problems, "model_attributes_type", loc, message, value)
        if self._key not in value:
            return _note(problems, "union_tag_not_found", loc, f"there is no {self._key!r}", value)
        tag = value[self._key]
        part = self._parts.get(tag) if type(tag) is str else None
        if part is None:
            return _note(problems, "union_tag_invalid", loc, f"{self._key!r} is none of {list(self._parts)}", value)
        return _shape_of_part(part).check(value, loc, problems)

    def schema(self, definitions: Definitions) -> Schema:
        found = {tag: _shape_of_part(part).schema(definitions) for tag, part in self._parts.items()}
        mapping = {tag: reference["$ref"] for tag, reference in found.items()}
        return {"discriminator": {"mapping": mapping, "propertyName": self._key}, "oneOf": list(found.values())}


@value
class OneOf:
    """One of several parts, chosen by the value of one of its keys."""

    key: str
    parts: Mapping[str, type[Part]]


read_hints: Callable[[type], JsonObject] = partial(typing.get_type_hints, include_extras=True)


class _PartShape(Shape):
    has_title = False

    def __init__(self, part: type[Part]) -> None:
        self.part = part

    @cached_property
    def _fields(self) -> dict[str, Shape]:
        """Analyse the keys when a file first contains the part."""
        hints = read_hints(self.part)
        shapes = {name: (_shape(hints[name]), info.limits) for name, info in self.part.model_fields.items()}
        return {name: shape if limits == Limits() else shape.limit(limits) for name, (shape, limits) in shapes.items()}

    def check(self, value: object, loc: Loc, problems: Problems) -> object:
        part = self.part
        if type(value) is part:
            return value
        if type(value) is not dict:
            message = f"Input should be a valid dictionary or instance of {part.__name__}"
            return _note(problems, "model_type", loc, message, value)
        count = len(problems)
        read: set[str] = set()
        values: JsonObject = {}
        for name, info in part.model_fields.items():
            key = next((key for key in info.keys if key in value), None)
            if key is None:
                if info.default is MISSING:
                    _note(problems, "missing", (*loc, info.keys[0]), "Field required", value)
                default = info.default
                values[name] = type(default)() if type(default) in (list, dict) and not default else default
                continue
            read.add(key)
            inside = (*loc, key)
            written = _call(partial(part.before_field, name), value[key], inside, problems)
            if written is not _WRONG:
                values[name] = self._fields[name].check(written, inside, problems)
        for key in value:
            if key not in read:
                message = "Extra inputs are not permitted"
                _note(problems, "extra_forbidden", (*loc, key), message, value[key], part=part)
        if len(problems) > count:
            return _WRONG
        made = object.__new__(part)
        made.__dict__.update(values, _written={name for name, info in part.model_fields.items() if read & {*info.keys}})
        try:
            made.check_together()
        except ValueError as error:
            return _note(problems, "value_error", loc, f"Value error, {error}", value)
        return made

    def schema(self, definitions: Definitions) -> Schema:
        name = self.part.__name__
        if name not in definitions:
            definitions[name] = {}  # ends the recursion of a part that contains itself
            definitions[name] = self.own_schema(definitions)
        return {"$ref": f"#/$defs/{name}"}

    def own_schema(self, definitions: Definitions) -> Schema:
        properties = {}
        for name, info in self.part.model_fields.items():
            default = () if info.default is MISSING else (_dump(info.default, False),)
            properties[info.keys[0]] = describe_key(self._fields[name], info.keys[0], definitions, *default)
        schema: JsonObject = {"additionalProperties": False, "properties": properties, "type": "object"}
        if doc := self.part.__dict__.get("__doc__"):
            schema["description"] = doc.strip()
        required = [info.keys[0] for info in self.part.model_fields.values() if info.is_required()]
        return {**schema, "required": required} if required else schema


def describe_key(shape: Shape, key: str, definitions: Definitions, *default: object) -> Schema:
    described = shape.schema(definitions)
    if default:
        described = {**described, "default": default[0]}
    return {**described, "title": key.title().replace("_", " ").strip()} if shape.has_title else described


def _shape_of_part(part: type[Part]) -> _PartShape:
    if part._shape is None:
        part._shape = _PartShape(part)
    return part._shape


def _shape(hint: Any) -> Shape:
    """Return the shape of an annotation in a part. Raises TypeError."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return _Anything()
    if hint is str:
        return _WholeText(str)
    if isinstance(hint, type) and hint in _SCALARS:
        return _Scalar(hint)
    if isinstance(hint, type) and issubclass(hint, Part):
        return _shape_of_part(hint)
    if origin is Annotated:
        tag = next((note for note in inside[1:] if isinstance(note, OneOf)), None)
        shape: Shape = _shape(inside[0]) if tag is None else _Tagged(tag.key, tag.parts)
        for note in inside[1:]:
            if isinstance(note, Limits):
                shape = _Limited(shape, note)
            elif isinstance(note, Before | After):
                shape = _Called(shape, note)
        return shape
    if origin is Literal:
        return _Choice(inside)
    if origin in (typing.Union, types.UnionType):
        members = [_shape(member) for member in inside if member is not type(None)]
        either = members[0] if len(members) == 1 else _Either(members)
        return _Nullable(either) if type(None) in inside else either
    if origin is list:
        return _ListOf(_shape(inside[0]))
    if origin is dict:
        return _DictOf(_shape(inside[0]), _shape(inside[1]))
    raise TypeError(f"{hint!r} cannot be the type of a key")


def plain_shape(hint: Any) -> Shape:
    """Return the shape of a type that needs no pydantic. Raises TypeError for others."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return _Anything()
    if isinstance(hint, type) and hint in _SCALARS:
        return _PlainFloat(float) if hint is float else _Scalar(hint)
    if hint is dict or (origin is dict and inside == (str, Any)):
        return _DictOf(_Scalar(str), _Anything())
    if origin is Literal and len(set(inside)) == len(inside) and all(type(choice) is str for choice in inside):
        return _Choice(inside)
    if origin in (typing.Union, types.UnionType) and len(inside) == 2 and inside[1] is type(None):
        return _Nullable(plain_shape(inside[0]))
    if origin is list:
        return _ListOf(plain_shape(inside[0]))
    raise TypeError(f"{hint!r} needs pydantic")


def json_schema_of(part: type[Part]) -> JsonObject:
    """Return the JSON Schema of a part, with the parts inside it in `$defs`."""
    definitions: JsonObject = {}
    schema = _shape_of_part(part).own_schema(definitions)
    return {**schema, "$defs": dict(sorted(definitions.items()))}
