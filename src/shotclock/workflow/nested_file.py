"""A workflow file that is about to be run by another one: read and looked at again, because its name may have come from
a template that no linter could see through."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType

from ..core.errors import Failure
from ..providers.workflow import WorkflowStep
from .lint import NESTED_FILES_LIMIT, NESTING_LIMIT, lint
from .loader import load_file
from .schema import WorkflowFile

# What somebody said yes to, by the name that it is opened under: where a link leads to may change as well.
approved_files: ContextVar[Mapping[str, str]] = ContextVar("shotclock_approved_files", default=MappingProxyType({}))
BY_TEMPLATE = "named by a template when it runs, and not covered"


def identity(file: str | Path) -> str:
    """The same for every way to write its name."""
    return os.path.realpath(file)


def digests_of(file: Path) -> dict[str, str]:
    """Return the digest of a file and of each that it runs, and those that it runs, or why there is none."""
    found: dict[str, str] = {}
    left = [file.absolute()]
    while left:
        file = left.pop()
        name = str(file)
        if name in found:
            continue
        if len(found) >= NESTED_FILES_LIMIT:  # which fails the step a moment later
            found["more files"] = "not looked at"
            break
        try:
            loaded = load_file(file)
        except OSError as error:
            found[name] = f"cannot be read: {error.strerror}"
            continue
        except ValueError as error:  # a NUL in its name
            found[name] = f"cannot be the name of a file: {error}"
            continue
        found[name] = f"sha256 {loaded.source.sha256}"
        for step_id, step in loaded.workflow.steps.items() if loaded.workflow is not None else ():
            if not isinstance(step, WorkflowStep):
                continue
            if "{{" in step.workflow:
                found[f"{name}, step {step_id}"] = BY_TEMPLATE
            else:
                left.append(file.parent / step.workflow)
    return found


def inner_workflow(file: Path, above: tuple[str, ...], *, unattended: bool) -> WorkflowFile:
    """`above` are the files that run each other down to this one. Raises Failure if it cannot be run."""
    own = identity(file)
    if own in above:
        names = " → ".join(os.path.basename(name) for name in (*above[above.index(own) :], own))
        raise Failure("DEPTH_EXCEEDED", f"files run each other: {names}", suggestion="break the circle")
    if len(above) >= NESTING_LIMIT:
        raise Failure("DEPTH_EXCEEDED", f"workflows in workflows, more than {NESTING_LIMIT} deep")
    try:
        loaded = load_file(file)
    except FileNotFoundError:
        raise Failure("FILE_NOT_FOUND", f"there is no file {str(file)!r}") from None
    except OSError as error:
        raise Failure("FILE_UNREADABLE", f"{str(file)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:  # a NUL in its name
        raise Failure("FILE_NOT_FOUND", f"{str(file)!r} cannot be the name of a file: {error}") from None
    approved = approved_files.get().get(str(file.absolute()))
    if approved is not None and approved != f"sha256 {loaded.source.sha256}":
        message = f"{str(file)!r} is not what was approved: it has changed since it was proposed"
        raise Failure("ACTION_CHANGED", message, suggestion="run the workflow again, which asks anew")
    findings = lint(loaded, unattended=unattended) if loaded.workflow is not None else loaded.findings
    # Clocks that cannot fit were told when the outer file was looked at, and may have been wanted so.
    wrong = [found for found in findings if found.is_error and not found.rule.startswith("budget/")]
    if wrong or loaded.workflow is None:
        errors = [{"field": found.field, "message": loaded.told(found)} for found in wrong]
        count = "1 problem" if len(wrong) == 1 else f"{len(wrong)} problems"
        message = f"{loaded.source.name}: {count}, nothing ran: {errors[0]['message']}"
        raise Failure("WORKFLOW_INVALID", message, context={"errors": errors})
    return loaded.workflow
