"""Search of commands' code for module globals that calls change: each worker process has its own.

Only the code is read, and the values that the globals have now. Functions, modules and classes of the user's own
program are followed, others are not. Found are assignments (`global counted`), changes of containers, databases of
sqlite3 in memory, and methods that change their object. Not found is all that a third party's object keeps.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, MutableSet, Sequence, Set
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from ..core.state_use import codes_of

_CONTAINERS = (list, dict, set, bytearray, deque)
_CHANGING = frozenset(
    {
        *(set(dir(MutableSequence)) - set(dir(Sequence))),
        *(set(dir(MutableMapping)) - set(dir(Mapping))),
        *(set(dir(MutableSet)) - set(dir(Set))),
        *("appendleft", "extendleft", "popleft", "rotate", "sort", "subtract"),  # of deques, lists and Counters
        *("difference_update", "intersection_update", "symmetric_difference_update"),
    }
)
_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_STORES = ("STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR")
_BETWEEN = ("TO_BOOL", "COPY", "CACHE", "NOT_TAKEN")
_Globals = dict[str, Any]


class Variable(NamedTuple):
    """A module global, by the module's variables and its name there."""

    module: int
    name: str


def find_changed_globals(commands: Mapping[str, Sequence[Callable[..., Any]]]) -> dict[str, list[str]]:
    """Return the globals that each command uses and that some command changes, by the name of the command."""
    search = _Search()
    used = {name: search.follow(functions) for name, functions in commands.items()}
    found = {name: [each.name for each in variables if each in search.changed] for name, variables in used.items()}
    return {name: list(dict.fromkeys(names)) for name, names in found.items() if names}


def note_changed_globals(app: str, commands: Mapping[str, Sequence[Callable[..., Any]]]) -> tuple[str, ...]:
    """Return one line for the author of an App whose commands in worker processes change module globals."""
    found = find_changed_globals(commands)
    if not found:
        return ()
    uses = "; ".join(f"{name} uses {', '.join(names)}" for name, names in found.items())
    remedy = "keep it in @app.lifespan and read ctx.state, or declare isolation='shared'"
    silence = "isolation='process' says that it is meant so"
    return (f"{app}: every worker process has module globals of its own ({uses}): {remedy}; {silence}",)


class _Search:
    def __init__(self) -> None:
        self.changed: set[Variable] = set()
        self._found: dict[FunctionType, list[Variable | FunctionType]] = {}

    def follow(self, functions: Sequence[Callable[..., Any]]) -> list[Variable]:
        """Return the globals that functions use, also in functions that they call."""
        waiting: list[Any] = [inspect.unwrap(each) for each in reversed(functions)]
        used, seen = [], set()
        while waiting:
            each = waiting.pop()
            if isinstance(each, Variable):
                used.append(each)
            elif isinstance(each, FunctionType) and each not in seen and _is_own(each.__module__):
                seen.add(each)
                if each not in self._found:
                    codes = codes_of(each.__code__)
                    found = [self._look_at(list(dis.get_instructions(code)), each.__globals__) for code in codes]
                    self._found[each] = [one for part in found for one in part]
                waiting += reversed(self._found[each])
        return used

    def _look_at(self, instructions: list[dis.Instruction], variables: _Globals) -> Iterator[Variable | FunctionType]:
        for at, each in enumerate(instructions):
            if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                yield Variable(id(variables), each.argval)
                if not (variables.get(each.argval) is None and _is_tested(instructions, "LOAD_GLOBAL", each.argval)):
                    self.changed.add(Variable(id(variables), each.argval))
            elif each.opname == "LOAD_GLOBAL":
                yield from self._look_at_use(each.argval, variables, _chain(instructions, at))

    def _look_at_use(
        self, name: str, variables: _Globals, chain: list[dis.Instruction]
    ) -> Iterator[Variable | FunctionType]:
        value = variables.get(name)
        if isinstance(value, ModuleType):
            if _is_own(value.__name__) and chain and chain[0].opname in _LOADS:
                yield from self._look_at_use(chain[0].argval, vars(value), chain[1:])
            return
        variable = Variable(id(variables), name)
        yield variable
        if isinstance(value, FunctionType):
            yield _innermost(value)
        elif isinstance(value, _CONTAINERS):
            if _changes(chain):
                self.changed.add(variable)
        elif _is_memory_database(value):
            self.changed.add(variable)
        elif not isinstance(value, type) and _is_own(type(value).__module__) and chain:
            method = _method(value, chain[0].argval)
            if _changes(chain) if method is None else _changes_itself(method, value, set()):
                self.changed.add(variable)
            if method is not None:
                yield method


def _chain(instructions: list[dis.Instruction], at: int) -> list[dis.Instruction]:
    """Return what is done with a loaded value: instructions whose expression begins where that of the value does."""
    start = _start(instructions[at])
    return [
        each
        for each in instructions[at + 1 :]
        if (each.opname in _LOADS or each.opname in _STORES) and start is not None and _start(each) == start
    ]


def _start(instruction: dis.Instruction) -> tuple[int, int] | None:
    positions = instruction.positions
    if positions is None or positions.lineno is None or positions.col_offset is None:
        return None
    return positions.lineno, positions.col_offset


def _changes(chain: list[dis.Instruction]) -> bool:
    """Return whether a value, or what it holds, is changed in place."""
    for each in chain:
        if each.opname in _STORES or each.argval in _CHANGING:
            return True
        if each.argval == "copy":
            break
    return False


def _changes_itself(method: FunctionType, value: object, seen: set[CodeType]) -> bool:
    """Return whether a method changes its object. An attribute that is None until it is first needed may be set."""
    code = method.__code__
    if code in seen or not code.co_argcount:
        return False
    seen.add(code)
    own = code.co_varnames[0]
    instructions = list(dis.get_instructions(code))
    for at, each in enumerate(instructions):
        if not each.opname.startswith("LOAD_FAST") or each.argval != own or not (chain := _chain(instructions, at)):
            continue
        first = chain[0]
        if first.opname in ("STORE_ATTR", "DELETE_ATTR"):
            is_late = getattr(value, first.argval, value) is None and _is_tested(instructions, _LOADS[0], first.argval)
            if not is_late:
                return True
            continue
        inner = _method(value, first.argval)
        if _changes(chain) if inner is None else _changes_itself(inner, value, seen):
            return True
    return False


def _method(value: object, name: object) -> FunctionType | None:
    found = getattr(type(value), str(name), None)
    return _innermost(found) if isinstance(found, FunctionType) else None


def _innermost(function: FunctionType) -> FunctionType:
    """Return the function that decorators have wrapped. Only functions are asked: other objects may answer anything."""
    while isinstance(inner := vars(function).get("__wrapped__"), FunctionType) and inner is not function:
        function = inner
    return function


def _is_tested(instructions: list[dis.Instruction], load: str, name: str) -> bool:
    """Return whether the code asks if a variable has a value: one that is set when it is first needed is no state."""
    for at, each in enumerate(instructions):
        if each.opname == load and each.argval == name:
            following = next((after for after in instructions[at + 1 :] if after.opname not in _BETWEEN), None)
            if following is not None and "JUMP" in following.opname and "_IF_" in following.opname:
                return True
    return False


def _is_own(module: str | None) -> bool:
    """Return whether a module belongs to the user's program: not to Python, to us, or to an installed package."""
    top = (module or "").partition(".")[0]
    if not top or top in sys.stdlib_module_names or top == __name__.partition(".")[0]:
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


def _is_memory_database(value: object) -> bool:
    if not any(each.__module__ == "sqlite3" and each.__name__ == "Connection" for each in type(value).__mro__):
        return False
    try:
        files = [row[2] for row in value.execute("PRAGMA database_list")]  # type: ignore[attr-defined]
    except Exception:  # closed, or of another thread
        return False
    return not any(files)
