"""A workflow file that is about to be run by another one: read and looked at again, because its name may have come from
a template that no linter could see through."""

from __future__ import annotations

import os
from pathlib import Path

from ..core.errors import Failure
from .lint import NESTING_LIMIT, lint
from .loading import load_file
from .schema import WorkflowFile


def identity(file: str | Path) -> str:
    """The same for every way to write its name."""
    return os.path.realpath(file)


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
        raise Failure("FILE_NOT_FOUND", f"{str(file)!r} is no name of a file: {error}") from None
    findings = lint(loaded, unattended=unattended) if loaded.workflow is not None else loaded.findings
    # Clocks that cannot fit were told when the outer file was looked at, and may have been wanted so.
    wrong = [found for found in findings if found.is_error and not found.rule.startswith("budget/")]
    if wrong or loaded.workflow is None:
        errors = [{"field": found.field, "message": loaded.told(found)} for found in wrong]
        count = "1 problem" if len(wrong) == 1 else f"{len(wrong)} problems"
        message = f"{loaded.source.name}: {count}, nothing ran: {errors[0]['message']}"
        raise Failure("WORKFLOW_INVALID", message, context={"errors": errors})
    return loaded.workflow
