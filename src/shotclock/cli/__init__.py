"""The command line. One file per subcommand, imported only when used; only this room prints."""

from __future__ import annotations

import sys

# New objects after which garbage is looked for; Python's own 700 is meant for programs that make less at once.
GARBAGE_THRESHOLD = 10_000


def run_program() -> None:
    """Run the console script. Everything is flushed at its end, and tearing the interpreter down takes as long as a
    short command, so it is left out."""
    import gc
    import os
    import signal

    # What is imported stays: to look through it again and again for garbage is a tenth of the time of a command.
    gc.set_threshold(GARBAGE_THRESHOLD, 20, 10)
    # Until somebody listens, Ctrl-C just ends us: half of our imports make no traceback worth reading.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    from ..process.foreground import fill_standard_descriptors

    fill_standard_descriptors()
    from ..process import spans

    if spans.are_wanted():
        from ..runtime.telemetry import begin_if_wanted

        begin_if_wanted()
    code = main()
    from .output import flush_quietly

    for stream in (sys.stdout, sys.stderr):
        flush_quietly(stream)
    if spans.recorder is not None:  # the answer is out by now
        _send_spans()
    os._exit(code)


def _send_spans() -> None:
    """Send what is left, for as long as that may take. Whoever reads stderr as data has the envelope in its last
    line."""
    from ..runtime.telemetry import finish
    from .output import is_terminal, say_line

    note = finish()
    if note is not None and (is_terminal(sys.stderr) or sys.argv[1:2] != ["exec"]):
        say_line(f"shotclock: {note}")


def main(argv: list[str] | None = None) -> int:
    """Run `exec`, or the subcommand that is named. Returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["exec"]:  # stands before every command an agent runs: no parser library, no event loop
        from .exec import main as exec_main

        return exec_main(words[1:])
    if words[:1] == ["ui"]:  # a message to a daemon: it needs the table of no other subcommand
        from .ui import main as ui_main

        return ui_main(words[1:])
    from .subcommand_options import main as subcommand_main

    return subcommand_main(words)
