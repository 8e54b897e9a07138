"""JavaScript expressions of foreign files, such as `if` and `fail_if` of Visor, as expressions of our templates."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...core.value_types import record, replace
from .expression import (
    Code,
    NameScope,
    Unsayable,
    both,
    bounded,
    choice,
    either,
    is_missing,
    is_null,
    less_or_more,
    literal,
    same,
    truth,
)
from .javascript_syntax import SyntaxNode, parse_expression

_SIGNS = {"===": False, "!==": True, "==": False, "!=": True}
_TEXT_METHODS = {
    "toLowerCase": "lower",
    "toUpperCase": "upper",
    "trim": "strip",
    "startsWith": "startswith",
    "endsWith": "endswith",
}
_FALSE = "[none, false, 0, '']"


def condition(source: str, scope: NameScope) -> str:
    """Return a condition that holds where the JavaScript expression is true. Raises Unsayable."""
    return bounded(_Writer(scope).truth(parse_expression(source))).text


def expression(source: str, scope: NameScope) -> str:
    """Return an expression with the value of the JavaScript expression. Raises Unsayable."""
    return bounded(_Writer(scope).write(parse_expression(source))).as_value


@record
class _Writer:
    scope: NameScope

    def write(self, node: SyntaxNode) -> Code:
        write: Callable[[SyntaxNode], Code] = getattr(self, f"_{node.kind}")
        return bounded(write(node))

    def truth(self, node: SyntaxNode, *, is_negated: bool = False) -> Code:
        """Return whether a value is true, without its value: `a || b` is then `a or b`."""
        if node.kind == "unary" and node.parts[0] == "!":
            return self.truth(node.parts[1], is_negated=not is_negated)
        if node.kind == "binary" and node.parts[0] in ("&&", "||"):
            sign, left, right = node.parts
            join = both if sign == "&&" else either
            made = join(self.truth(left), self.truth(right))
            return Code(f"not ({made.text})", "boolean", is_tight=False) if is_negated else made
        return truth(self.write(node), is_negated=is_negated)

    # --- values

    def _literal(self, node: SyntaxNode) -> Code:
        return literal(node.parts[0])

    def _undefined(self, node: SyntaxNode) -> Code:
        return literal(None)

    def _name(self, node: SyntaxNode) -> Code:
        return self.scope.head(node.parts[0])

    def _let(self, node: SyntaxNode) -> Code:
        name, given, body = node.parts
        made = self.write(given)
        bound = {**self.scope.bound, name: made if made.is_tight else replace(made, text=made.operand, is_tight=True)}
        return _Writer(replace(self.scope, bound=bound)).write(body)

    def _choice(self, node: SyntaxNode) -> Code:
        condition, then, otherwise = node.parts
        return choice(self.truth(condition), self.write(then), self.write(otherwise))

    def _array(self, node: SyntaxNode) -> Code:
        return Code(f"[{', '.join(self.write(part).as_value for part in node.parts)}]", "list")

    def _object(self, node: SyntaxNode) -> Code:
        pairs = (f"{literal(name).text}: {self.write(part).as_value}" for name, part in node.parts)
        return Code(f"{{{', '.join(pairs)}}}")

    def _template(self, node: SyntaxNode) -> Code:
        parts: list[Code] = []
        for part in node.parts:
            code = literal(part) if isinstance(part, str) else self.write(part)
            if code.kind != "text":
                raise Unsayable(f"`{code.text}` in a text: it may be no text")
            if part != "":
                parts.append(code)
        if not parts:
            return literal("")
        return Code(" ~ ".join(part.operand for part in parts), "text", is_tight=len(parts) == 1)

    def _member(self, node: SyntaxNode) -> Code:
        base, name, is_optional = node.parts
        code = self.write(base)
        if name == "length":
            return self._length(code, is_optional=is_optional)
        return self.scope.member(code, name, is_optional=is_optional)

    def _length(self, code: Code, *, is_optional: bool) -> Code:
        if is_optional and not (code.kind == "list" or code.kind == "text"):
            # The length of nothing is nothing, and not 0.
            guard = f"{code.as_value} is not none"
            return Code(f"{code.operand} | length", "number", is_tight=False, is_filtered=True, guard=guard)
        return Code(f"{code.operand} | length", "number", is_tight=False, is_filtered=True)

    def _index(self, node: SyntaxNode) -> Code:
        base, index, is_optional = node.parts
        if index.kind == "literal" and isinstance(index.parts[0], str):
            return self._member(SyntaxNode("member", (base, index.parts[0], is_optional)))
        if index.kind == "literal" and isinstance(index.parts[0], int) and not isinstance(index.parts[0], bool):
            code = self.write(base)
            if code.path in (("outputs",), ("env",), ("inputs",)):
                raise Unsayable("a number as the name of a key")
            written = f"({code.operand} | default([], true))" if is_optional else code.operand
            return Code(f"{written}[{index.parts[0]}]", may_miss=True)
        raise Unsayable("a key that is computed")

    # --- operators

    def _unary(self, node: SyntaxNode) -> Code:
        sign, inner = node.parts
        if sign == "!":
            return self.truth(inner, is_negated=True)
        if sign == "-" and inner.kind == "literal" and isinstance(inner.parts[0], int | float):
            return literal(-inner.parts[0])
        raise Unsayable(f"`{sign}` before a value")

    def _binary(self, node: SyntaxNode) -> Code:
        sign, left, right = node.parts
        if sign in _SIGNS:
            return self._equality(sign, left, right)
        if sign in ("&&", "||"):
            if _is_boolean(left) and _is_boolean(right):
                return self.truth(node)
            first, second = self.write(left), self.write(right)
            if sign == "||" and right.kind in ("array", "object") and not right.parts:
                # Only an empty list and an empty object are exchanged for each other by this.
                return Code(f"({first.operand} | default({second.text}, true))", second.kind)
            holds = truth(first)
            return choice(holds, first, second) if sign == "||" else choice(holds, second, first)
        if sign == "??":
            first, second = self.write(left), self.write(right)
            if second.text == "none":
                return replace(first, text=first.as_value, may_miss=False, is_tight=False)
            return choice(is_null(first, is_negated=True), first, second)
        first, second = self.write(left), self.write(right)
        if sign in ("<", ">", "<=", ">="):
            return less_or_more(first, sign, second)
        return _arithmetic(sign, first, second)

    def _equality(self, sign: str, left: SyntaxNode, right: SyntaxNode) -> Code:
        is_negated = _SIGNS[sign]
        for one, other in ((left, right), (right, left)):
            if one.kind == "unary" and one.parts[0] == "typeof" and other.kind == "literal":
                return self._type_test(one.parts[1], other.parts[0], is_negated)
            if other.kind == "undefined":
                code = self.write(one)
                return (is_null if len(sign) == 2 else is_missing)(code, is_negated=is_negated)
            if len(sign) == 2 and other == SyntaxNode("literal", (None,)):
                return is_null(self.write(one), is_negated=is_negated)
        first, second = self.write(left), self.write(right)
        if len(sign) == 2 and not (first.kind == second.kind != "any"):
            for code in (first, second):
                if code.kind == "text" and isinstance(code.literal, str) and not _is_plain_word(code.literal):
                    raise Unsayable(f"`{sign}` between values of two types, which JavaScript converts")
                if code.kind != "text" and code.literal is not None:
                    raise Unsayable(f"`{sign}` between values of two types, which JavaScript converts: write `{sign}=`")
        return same(first, second, is_negated=is_negated)

    def _type_test(self, inner: SyntaxNode, name: object, is_negated: bool) -> Code:
        code = self.write(inner)
        if name == "undefined":
            return is_missing(code, is_negated=is_negated)
        tests = {"string": "string", "boolean": "boolean"}
        if code.printed or name not in tests:
            raise Unsayable(f"`typeof` that is {name}")
        return Code(f"{code.operand} is {'not ' if is_negated else ''}{tests[str(name)]}", "boolean", is_tight=False)

    # --- calls

    def _call(self, node: SyntaxNode) -> Code:
        called, given = node.parts
        if called.kind == "member":
            base, name, is_optional = called.parts
            if base.kind == "name" and base.parts[0] in ("Object", "Array", "JSON", "Math", "Number", "Date"):
                return self._of_class(base.parts[0], name, given)
            return self._method(self.write(base), name, given, is_optional=is_optional)
        if called.kind == "name":
            return self._function(called.parts[0], given)
        raise Unsayable("a call of a value")

    def _of_class(self, owner: str, name: str, given: tuple[SyntaxNode, ...]) -> Code:
        if len(given) == 1:
            code = self.write(given[0])
            match f"{owner}.{name}":
                case "Array.isArray":
                    test = f"{code.as_value} is sequence and {code.operand} is not string"
                    return Code(f"{test} and {code.operand} is not mapping", "boolean", is_tight=False)
                case "Object.keys":
                    return Code(f"({code.operand} | list)", "list")
                case "JSON.parse" if code.printed:  # an object or a list was read already
                    return Code(f"({code.operand} | fromjson if {code.operand} is string else {code.operand})")
                case "JSON.parse":
                    return Code(f"({code.operand} | fromjson)")
        raise Unsayable(f"`{owner}.{name}()`")

    def _function(self, name: str, given: tuple[SyntaxNode, ...]) -> Code:
        match name, len(given):
            case (("always" | "success"), 0):
                return literal(True)
            case "failure", 0:
                return literal(False)
            case "Boolean", 1:
                return self.truth(given[0])
            case (("Number" | "parseFloat"), 1):
                return Code(f"{self.write(given[0]).operand} | float", "number", is_tight=False, is_filtered=True)
            case "parseInt", (1 | 2):
                if len(given) == 2 and given[1] != SyntaxNode("literal", (10,)):
                    raise Unsayable("`parseInt` with another base than 10")
                return Code(f"{self.write(given[0]).operand} | int", "number", is_tight=False, is_filtered=True)
            case "length", 1:
                return self._length(self.write(given[0]), is_optional=False)
            case (("contains" | "startsWith" | "endsWith"), 2):
                return self._without_case(name, self.write(given[0]), self.write(given[1]))
            case (("hasIssue" | "hasIssueWith" | "countIssues"), 3):
                item = SyntaxNode("member", (SyntaxNode("name", ("i",)), self._plain_text(given[1]), False))
                arrow = SyntaxNode("arrow", ("i", SyntaxNode("binary", ("===", item, given[2]))))
                if name == "countIssues":
                    return self._length(self._method(self.write(given[0]), "filter", (arrow,)), is_optional=False)
                return self._method(self.write(given[0]), "some", (arrow,))
        raise Unsayable(f"the function `{name}()`")

    def _plain_text(self, node: SyntaxNode) -> str:
        if node.kind == "literal" and isinstance(node.parts[0], str):
            return node.parts[0]
        raise Unsayable("a name of a key that is computed")

    def _without_case(self, name: str, whole: Code, part: Code) -> Code:
        if part.literal is None or whole.kind == "list":
            raise Unsayable(f"`{name}()` with a part that is no plain text")
        lower = f"{whole.operand}.lower()"
        wanted = literal(str(part.literal).lower()).text
        if name == "contains":
            return Code(f"{wanted} in {lower}", "boolean", is_tight=False)
        return Code(f"{lower}.{name.lower()}({wanted})", "boolean")

    def _method(self, base: Code, name: str, given: tuple[SyntaxNode, ...], *, is_optional: bool = False) -> Code:
        if base.path in (("outputs",), ("env",), ("inputs",), ("outputs_raw",)):
            raise Unsayable(f"`{base.path[0]}.{name}()`")
        if name in ("some", "every", "filter", "find", "map") and len(given) == 1 and given[0].kind == "arrow":
            if is_optional:
                base = Code(f"({base.operand} | default([], true))", "list")
            return self._loop(base, name, given[0])
        if name == "includes" and len(given) == 1:
            part = self.write(given[0])
            if is_optional:
                base = Code(f"({base.operand} | default([], true))", "list")
            return Code(f"{part.operand} in {base.operand}", "boolean", is_tight=False)
        if name in _TEXT_METHODS and len(given) == (1 if name.endswith("With") else 0):
            if is_optional:
                base = Code(f"({base.operand} | default('', true))", "text")
            values = ", ".join(self.write(each).text for each in given)
            kind = "boolean" if given else "text"
            return Code(f"{base.operand}.{_TEXT_METHODS[name]}({values})", "boolean" if kind == "boolean" else "text")
        if name == "join" and len(given) == 1 and not is_optional:
            return Code(
                f"{base.operand} | join({literal(self._plain_text(given[0])).text})",
                "text",
                is_tight=False,
                is_filtered=True,
            )
        raise Unsayable(f"the method `.{name}()`")

    # --- functions over lists

    def _loop(self, base: Code, name: str, arrow: SyntaxNode) -> Code:
        variable, body = arrow.parts
        if base.kind == "text":
            raise Unsayable(f"`.{name}()` of a text")
        if name == "map":
            key = _key_of(body, variable)
            if key is None:
                raise Unsayable("`.map()` of other than one key")
            return Code(f"({base.operand} | map(attribute={literal(key).text}) | list)", "list")
        tests = list(self._tests(body, variable, is_negated=name == "every"))
        if len(tests) == 1 and name != "filter" and name != "find":
            found = f"{base.operand} | {self._count_one(tests[0])} | list | length"
            return Code(f"{found} {'==' if name == 'every' else '>'} 0", "boolean", is_tight=False)
        if name == "every":
            raise Unsayable("`.every()` with several conditions")
        picked = " | ".join(self._pick(test) for test in tests)
        if name == "some":
            return Code(f"{base.operand} | {picked} | list | length > 0", "boolean", is_tight=False)
        if name == "find":
            return Code(f"{base.operand} | {picked} | first", is_tight=False, may_miss=True)
        return Code(f"({base.operand} | {picked} | list)", "list")

    def _tests(self, body: SyntaxNode, variable: str, *, is_negated: bool) -> Iterator[_Test]:
        if body.kind == "unary" and body.parts[0] == "!":
            yield from self._tests(body.parts[1], variable, is_negated=not is_negated)
        elif body.kind == "binary" and body.parts[0] == ("||" if is_negated else "&&"):
            yield from self._tests(body.parts[1], variable, is_negated=is_negated)
            yield from self._tests(body.parts[2], variable, is_negated=is_negated)
        elif body.kind == "binary" and body.parts[0] in (*_SIGNS, "<", ">", "<=", ">="):
            sign, left, right = body.parts
            key = _key_of(left, variable)
            if key is None or right.kind not in ("literal",) or right.parts[0] is None:
                raise Unsayable("a comparison of an item with other than a literal")
            yield _Test(key, sign, literal(right.parts[0]), is_negated)
        elif (key := _key_of(body, variable)) is not None:
            yield _Test(key, "true", literal(True), is_negated)
        else:
            raise Unsayable("a condition on an item that cannot be said in a filter")

    def _count_one(self, test: _Test) -> str:
        """Return the filters that leave one value for each item of which the test holds."""
        name, given, holds = _filter_of(test)
        # A value that is missing is equal to nothing, and not true; `false` would be equal to 0.
        instead = "" if not test.key else f"map(attribute={literal(test.key).text}, default='') | "
        if test.sign in ("<", ">", "<=", ">="):
            if not holds:
                return self._pick(test)  # fails where the key is missing
            instead = "" if not test.key else f"selectattr({literal(test.key).text}, 'defined') | "
            return f"{instead}{self._pick(replace(test, is_checked=True))}"
        return f"{instead}{'select' if holds else 'reject'}({name}{given})"

    def _pick(self, test: _Test) -> str:
        name, given, holds = _filter_of(test)
        if not test.key:
            return f"{'select' if holds else 'reject'}({name}{given})"
        key = literal(test.key).text
        # Where the key is missing, an item is left out by a test that holds; else this fails.
        guard = f"selectattr({key}, 'defined') | " if _picks_present(test) and not test.is_checked else ""
        return f"{guard}{'selectattr' if holds else 'rejectattr'}({key}, {name}{given})"


@record
class _Test:
    key: str  # of the item; empty for the item itself
    sign: str
    value: Code
    is_negated: bool
    is_checked: bool = False


def _filter_of(test: _Test) -> tuple[str, str, bool]:
    """Return the name of a test of Jinja, its argument, and whether it has to hold."""
    negative = test.is_negated != (test.sign in ("!==", "!="))
    if test.sign == "true":
        return "'in'", f", {_FALSE}", test.is_negated
    if test.sign in _SIGNS:
        if test.value.text in ("true", "false"):
            return f"'{test.value.text}'", "", not negative
        if len(test.sign) == 2 and not (isinstance(test.value.literal, str) and _is_plain_word(test.value.literal)):
            raise Unsayable(f"`{test.sign}` between values of two types, which JavaScript converts")
        if test.value.literal in (0, 1):  # here true is equal to 1
            raise Unsayable("an equality of items with 0 or 1")
        return "'equalto'", f", {test.value.text}", not negative
    names = {"<": "'lt'", ">": "'gt'", "<=": "'le'", ">=": "'ge'"}
    return names[test.sign], f", {test.value.text}", not test.is_negated


def _picks_present(test: _Test) -> bool:
    if test.sign == "true":
        return not test.is_negated
    return test.is_negated == (test.sign in ("!==", "!="))


def _key_of(node: SyntaxNode, variable: str) -> str | None:
    """Return the key of the item that an expression is, empty for the item itself; None for others."""
    if node == SyntaxNode("name", (variable,)):
        return ""
    if node.kind == "member" and node.parts[0] == SyntaxNode("name", (variable,)):
        name = str(node.parts[1])
        if name in ("length",) or hasattr(dict, name) or hasattr(str, name) or hasattr(list, name):
            raise Unsayable(f"the key `{name}` of an item, which is a method here")
        return name
    return None


def _is_boolean(node: SyntaxNode) -> bool:
    if node.kind == "binary":
        sign, left, right = node.parts
        return sign in (*_SIGNS, "<", ">", "<=", ">=") or (
            sign in ("&&", "||") and _is_boolean(left) and _is_boolean(right)
        )
    if node.kind == "unary":
        return bool(node.parts[0] == "!")
    if node.kind == "call":
        called = node.parts[0]
        return called.kind == "member" and called.parts[1] in ("some", "every", "includes", "startsWith", "endsWith")
    return node.kind == "literal" and isinstance(node.parts[0], bool)


def _is_plain_word(text: str) -> bool:
    """Return whether no value of another type is converted to this text."""
    return text[:1].isalpha() and text not in ("true", "false", "null", "NaN", "Infinity")


def _arithmetic(sign: str, left: Code, right: Code) -> Code:
    """Return a sum of numbers or of texts. Where a value is of another type, it fails here."""
    kinds = {left.kind, right.kind}
    if left.printed or right.printed:
        raise Unsayable(f"`{sign}` with the output of a command, which may be text or a number")
    if sign == "+" and "text" in kinds and kinds <= {"text", "any"}:
        return Code(f"{left.operand} + {right.operand}", "text", is_tight=False)
    if sign in ("+", "-") and "number" in kinds and kinds <= {"number", "any"}:
        return Code(f"{left.operand} {sign} {right.operand}", "number", is_tight=False)
    if sign in ("*", "/") and kinds == {"number"}:
        return Code(f"{left.operand} {sign} {right.operand}", "number", is_tight=False)
    raise Unsayable(f"`{sign}` between values of unknown types")
