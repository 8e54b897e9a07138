"""The files that a program was imported from, as seen in a process that has imported it."""

from __future__ import annotations

import os
import sys
import sysconfig

MOST_FILES = 2_000


def source_files() -> list[str]:
    """Return the Python files of the imported modules that are neither installed nor ours."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    foreign = tuple(os.path.join(folder, "") for folder in (*installed, os.path.dirname(os.path.dirname(__file__))))
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    paths = {os.path.realpath(file) for file in files if isinstance(file, str) and file.endswith(".py")}
    return sorted(path for path in paths if not path.startswith(foreign))[:MOST_FILES]
