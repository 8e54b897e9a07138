"""Clients of several servers behind one `shotclock wrap --config`."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.wrap.client import SERVER, RawClient, connected

NAMED = [sys.executable, str(Path(__file__).with_name("named_server.py"))]


def entry(argv: list[str], **options: Any) -> dict[str, Any]:
    return {"command": argv[0], "args": argv[1:], **options}


def scripted(*flags: str, **options: Any) -> dict[str, Any]:
    return entry([*SERVER, *flags], **options)


def named(name: str, *flags: str, **options: Any) -> dict[str, Any]:
    return entry([*NAMED, name, *flags], **options)


def wrap_of(file: Path, servers: dict[str, Any], *words: str, **more: Any) -> list[str]:
    """Write the file, which is YAML because JSON is, and return the command."""
    file.write_text(json.dumps({"servers": servers, **more}))
    return [sys.executable, "-m", "shotclock", "wrap", "--config", str(file), *words]


@contextmanager
def several(folder: Path, *, greets: bool = True, stderr: Any = None, **servers: Any) -> Iterator[RawClient]:
    """A client of several servers of a wrap.yaml."""
    with connected(wrap_of(folder / "wrap.yaml", servers), stderr) as client:
        if greets:
            client.greet()
        yield client
