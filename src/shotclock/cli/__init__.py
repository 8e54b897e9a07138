"""The command line. One file per subcommand, imported only when used; only this room prints."""

from __future__ import annotations

import sys


def run() -> None:
    """The console script. Everything is flushed by then, and tearing the interpreter down takes as long as a
    short command, so it is left out."""
    import os
    import signal

    # Until somebody listens, Ctrl-C just ends us: half of our imports make no traceback worth reading.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    from ..enforce.foreground import fill_standard_descriptors

    fill_standard_descriptors()
    code = main()
    from .output import flush_quietly

    for stream in (sys.stdout, sys.stderr):
        flush_quietly(stream)
    os._exit(code)


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["exec"]:  # stands before every command an agent runs: no parser library, no event loop
        from .exec import main as exec_main

        return exec_main(words[1:])
    from .commands import main as commands_main

    return commands_main(words)
