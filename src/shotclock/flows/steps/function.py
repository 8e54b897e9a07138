"""`function` steps: a command of an App. The provider is in `function_calls`, which is slow to import."""

from __future__ import annotations

import ast
import contextlib
import os
from importlib import import_module
from pathlib import Path
from typing import Literal

from ...core.validation import field
from ...core.value_types import JsonObject
from .provider import Provider, RunServices, StepPart, StepType


class FunctionStep(StepPart):
    type: Literal["function"]
    target: str = field(min_length=1)  # package.module:app or path/to/file.py:app
    command: str = field(min_length=1)
    arguments: JsonObject = field(default={}, keys=("arguments", "args"))


def _make_provider(services: RunServices) -> Provider:
    provider: Provider = import_module("._function_calls", __package__).FunctionProvider(services.inbox)
    return provider


FUNCTION = StepType(
    "function",
    "a command of an App",
    FunctionStep,
    _make_provider,
    default_ms=30_000,
    has_typed_output=True,
    waits_when_approved=True,
    asks_before_start=True,
    value_keys=frozenset({"arguments"}),
    rules={
        "QUEUE_TIMEOUT": "timeout",
        "UNKNOWN_OPERATION": "unknown_command",
        "ARG_ERROR": "arguments",
        "HANDLER_NOT_IMPORTABLE": "import_error",
        "PROPOSAL_REJECTED": "approval/rejected",
        "PROPOSAL_EXPIRED": "approval/expired",
        "PROPOSAL_WITHDRAWN": "approval/withdrawn",
        "ACTION_CHANGED": "approval/failed",
    },
)
STEP_TYPES = (FUNCTION,)


def locate_target(written: str, folder: Path) -> str:
    """Return a target with the real path of its file."""
    file, colon, attribute = written.partition(":")
    if file.endswith(".py") or os.sep in file:
        with contextlib.suppress(ValueError):  # a NUL, which is reported when the file is opened
            file = os.path.realpath(folder / file)
    return f"{file}{colon}{attribute}"


def names_in(program: bytes) -> set[str]:
    """Return the names that a program may bind; `*`: unknown. Raises SyntaxError or ValueError."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            found.add("*" if node.id in ("globals", "exec") else node.id if isinstance(node.ctx, ast.Store) else "")
    return found - {""}
