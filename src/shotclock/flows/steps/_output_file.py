"""The file that a command may write its output to as named values: $SHOTCLOCK_OUTPUT, one for each attempt.

version=1.4.2
notes<<EOF
several lines
EOF
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator

from ...supervise.command_task import make_private_directory, spill_path

VARIABLE = "SHOTCLOCK_OUTPUT"
FILE_LIMIT = 1 << 20  # bytes

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@contextlib.contextmanager
def output_file(request_id: str) -> Iterator[str]:
    """Yield the path of an empty file, which is removed afterwards."""
    path = spill_path(f"{request_id}.outputs")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileNotFoundError:
            make_private_directory(os.path.dirname(path))
            descriptor = os.open(path, flags, 0o600)
        os.close(descriptor)
    except OSError:
        pass  # a command that writes to it fails with the reason
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def read_output_file(path: str) -> dict[str, str]:
    """Return the values that a command has written. Raises ValueError for content that is not whole."""
    try:
        flags = os.O_NONBLOCK | os.O_NOFOLLOW  # the command may have put anything there
        with open(path, "rb", opener=lambda path, mode: os.open(path, mode | flags)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"${VARIABLE} is not a file any more")
            data = file.read(FILE_LIMIT + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"${VARIABLE} cannot be read: {error.strerror}") from None
    if len(data) > FILE_LIMIT:
        raise ValueError(f"${VARIABLE} is larger than {FILE_LIMIT} bytes")
    try:
        return _parse(data.decode())
    except UnicodeDecodeError:
        raise ValueError(f"${VARIABLE} is not UTF-8") from None


def _parse(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        line, number = lines[at], at + 1
        at += 1
        if not line:
            continue
        name, sign, rest = line.partition("=")
        if "<<" in name or not sign:
            name, sign, rest = line.partition("<<")
        if not sign or _NAME.fullmatch(name) is None or (sign == "<<" and not rest):
            raise ValueError(f"${VARIABLE}, line {number} is not NAME=value or NAME<<END, with letters, digits and `_`")
        if sign == "<<":
            try:
                end = lines.index(rest, at)
            except ValueError:
                raise ValueError(f"${VARIABLE}, line {number}: the value of {name} has no end") from None
            rest, at = "\n".join(lines[at:end]), end + 1
        values[name] = rest
    return values
