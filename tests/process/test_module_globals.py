"""Which module globals are found to differ between worker processes, and which are not."""

from collections.abc import Callable
from typing import Any

from shotclock.process.module_globals import find_changed_globals
from tests.process import globals_program as program

FOUND: dict[Callable[..., Any], list[str]] = {
    program.append: ["NOTES"],
    program.subscript: ["BY_NAME"],
    program.augmented: ["COUNTS"],
    program.nested: ["GROUPS"],
    program.deleted: ["SEEN", "RECENT"],
    program.assigned: ["total"],
    program.remembered: ["last"],
    program.by_helper: ["NOTES"],
    program.inside: ["NOTES"],
    program.query: ["db"],
    program.method: ["STORE"],
    program.method_on_container: ["PUSHED"],
    program.attribute: ["DIRECT"],
    program.elsewhere: ["KEPT"],
    program.elsewhere_directly: ["KEPT"],
}


def test_globals_that_a_command_changes_are_found() -> None:
    wrong = {}
    for function, names in FOUND.items():
        found = find_changed_globals({function.__name__: [function]}).get(function.__name__, [])
        if sorted(found) != sorted(names):
            wrong[function.__name__] = found
    assert not wrong


def test_a_command_that_only_reads_a_global_is_named_where_another_changes_it() -> None:
    assert find_changed_globals({"read": [program.reader]}) == {}
    both = find_changed_globals({"read": [program.reader], "add": [program.by_helper]})
    assert both == {"read": ["NOTES"], "add": ["NOTES"]}


def test_constants_locks_loggers_and_what_is_made_when_it_is_first_needed_are_not_found() -> None:
    assert find_changed_globals({"quiet": [program.quiet], "shadowed": [program.shadowed]}) == {}
