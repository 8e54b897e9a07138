"""Targets of `shotclock serve`: the place of an App, and its catalogue, read without importing it here."""

from __future__ import annotations

import os
import sys
from typing import Any

from ..core.catalogue import Catalogue, HandlerReference, Operation
from ..core.clocks import Clocks, format_duration
from ..core.envelope import Envelope
from ..core.errors import Failure
from ..core.value_types import value
from ..process.worker_main import MAIN_ALIAS
from ..runtime.call import Tool
from ..runtime.preloaded_zygote import Program
from ..runtime.runtime import Runtime

# How long the program may take to be imported: the heaviest libraries on a cold disk.
IMPORT_LIMIT_MS = 60_000
TRACEBACK_SHOWN = 8000


@value
class Target:
    """Place of an App: a module or a file, and its name in there."""

    attribute: str
    module: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.attribute}"

    @property
    def program(self) -> Program:
        """Return how a process imports the target, from where `python FILE` and `python -m MODULE` would."""
        ours = [entry for entry in sys.path if entry]
        folder = os.path.dirname(self.file) if self.file else os.getcwd()
        return Program(file=self.file, imports=(self.module,) if self.module else (), path=(folder, *ours))


def parse_attribute(text: str) -> str:
    return text.partition(":")[2] or "app"


def parse_target(text: str) -> Target:
    """Read `package.module:app` or `path/to/file.py:app`. Raises Failure."""
    place, attribute = text.partition(":")[0], parse_attribute(text)
    if not all(part.isidentifier() for part in attribute.split(".")):
        raise Failure("TARGET_UNUSABLE", f"{attribute!r} cannot be the name of an App in {place!r}")
    if place.endswith(".py") or os.sep in place:
        if not os.path.isfile(place):
            raise Failure("TARGET_NOT_FOUND", f"there is no file {place!r}")
        # A link may lead elsewhere by the time it is imported again.
        return Target(attribute, file=os.path.realpath(place))
    if place and all(part.isidentifier() for part in place.split(".")):
        return Target(attribute, module=place)
    raise Failure("TARGET_UNUSABLE", f"{text!r} is neither package.module:app nor path/to/file.py:app")


async def learn(runtime: Runtime, target: Target) -> Catalogue:
    """Read the App's catalogue in a worker that imports it. Raises Failure with the reason."""
    runtime.tool = Tool(debug=True)  # the operator may see where the program fails to import
    module = MAIN_ALIAS if target.file else target.module
    describe = _asking("describe", "shotclock.app", "describe")
    described = await runtime.call(describe, {"attribute": target.attribute, "module": module})
    if described.ok and isinstance(described.data, dict):
        return Catalogue.from_plain(described.data)
    if described.code == "MACHINE_UNFIT":  # nothing was imported, and nothing is to blame but the machine
        raise Failure("MACHINE_UNFIT", str((described.error or {}).get("message")))
    if described.ending == "not_started":
        limit = format_duration(int(str(described.meta["timeout_ms"])))
        cause = (described.error or {}).get("message")
        message = f"importing {target} took longer than {limit}, or ended the process that did it"
        raise Failure("TIMEOUT", message, context={"cause": cause}, suggestion="import less, or inside of functions")
    raise await _why_not(runtime, target, described)


async def _why_not(runtime: Runtime, target: Target, described: Envelope) -> Failure:
    """Import it once more, for the traceback of the failure."""
    if target.file:
        again = _asking("import", "runpy", "run_path")
        imported = await runtime.call(again, {"path_name": target.file, "run_name": MAIN_ALIAS})
    else:
        again = _asking("import", "importlib", "import_module")
        imported = await runtime.call(again, {"name": target.module})
    if imported.ok or imported.code == "RESULT_NOT_SERIALIZABLE":  # a module is no data; it is there
        return _not_an_app(target, described)
    return _import_failure(target, imported)


def _not_an_app(target: Target, described: Envelope) -> Failure:
    message = (described.error or {}).get("message")
    if described.code == "TARGET_NOT_FOUND":
        return Failure("TARGET_NOT_FOUND", f"{message} in {target.file or target.module}")
    return Failure("TARGET_UNUSABLE", f"{target}: {message}", context=_shorten_context(_context(described)))


def _import_failure(target: Target, imported: Envelope) -> Failure:
    context, message = _context(imported), (imported.error or {}).get("message")
    missing = f"No module named {target.module!r}"
    if context.get("exception") == "ModuleNotFoundError" and target.module and missing in str(message):
        return Failure("TARGET_NOT_FOUND", f"there is no module {target.module!r} on the path or in this directory")
    return Failure("TARGET_UNUSABLE", f"importing {target} failed: {message}", context=_shorten_context(context))


def _asking(name: str, module: str, function: str) -> Operation:
    return Operation(
        name,
        HandlerReference(module, function),
        isolation="process",
        mutates=False,
        idempotent=True,
        clocks=Clocks(timeout_ms=IMPORT_LIMIT_MS, grace_ms=0),
    )


def _context(envelope: Envelope) -> dict[str, Any]:
    context = (envelope.error or {}).get("context")
    return context if isinstance(context, dict) else {}


def _shorten_context(context: dict[str, Any]) -> dict[str, object]:
    return {key: value[-TRACEBACK_SHOWN:] if isinstance(value, str) else value for key, value in context.items()}
