"""The command line: one module per subcommand, imported when it is used. Only this package prints."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable

from .supervise import spans
from .supervise.foreground import die_of, fill_standard_descriptors, restore_locale
from .terminal.output import flush_quietly, is_terminal, say_line

GARBAGE_THRESHOLD = 10_000  # imported modules stay, and Python's own 700 new objects per search cost a tenth of a start


def run_program() -> None:
    """Run the console script `shotclock`."""
    _run_and_leave(main, keeps_stderr=sys.argv[1:2] == ["exec"])


def run_shell() -> None:
    """Run the console script `shotclock-sh`."""
    from .commands.shell import main as shell_main

    _run_and_leave(shell_main, keeps_stderr=True)


def _run_and_leave(run: Callable[[], int], *, keeps_stderr: bool) -> None:
    """Run a program and leave by `os._exit`: the interpreter's own end takes as long as a command.

    `keeps_stderr`: off a terminal nothing is added to stderr, which is the command's.
    """
    gc.set_threshold(GARBAGE_THRESHOLD, 20, 10)
    # Until a subcommand listens, Ctrl-C just ends us, without a traceback of our imports.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as for a background job of a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    fill_standard_descriptors()
    restore_locale()
    if spans.are_wanted():
        from .calls.telemetry import begin_if_wanted

        begin_if_wanted()
    code = run()
    for stream in (sys.stdout, sys.stderr):
        flush_quietly(stream)
    if spans.recorder is not None:  # after the answer
        _send_spans(keeps_stderr)
    if code < 0:
        die_of(-code)
    os._exit(code)


def _send_spans(keeps_stderr: bool) -> None:
    from .calls.telemetry import finish

    note = finish()
    if note is not None and (is_terminal(sys.stderr) or not keeps_stderr):
        say_line(f"shotclock: {note}")


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand, most of them by the index. A negative exit code is the signal to die of."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["exec"]:  # before every command of an agent, so it does without the index
        from .commands.exec import main as exec_main

        return exec_main(words[1:])
    if words[:1] == ["timeout"]:
        from .commands.timeout import main as timeout_main

        return timeout_main(words[1:])
    if words[:1] == ["wrap"]:  # in front of every MCP server of a client, so it stays small
        from .wrap import cli as wrap

        if not wrap.names_verb(words[1:]):
            return wrap.main(words[1:])
    if words[:2] == ["agent", "hook"]:  # before every command of an agent
        from .agents.hook import main as hook_main

        return hook_main(words[2:])
    if words[:1] != ["run"]:
        return _run_subcommand(words)
    from .supervise import zygote

    zygote.start_zygote_early()  # beside our imports, which take as long
    try:
        return _run_subcommand(words)
    finally:
        zygote.stop_early_zygote()


def _run_subcommand(words: list[str]) -> int:
    from .terminal.subcommand import TABLE, run_table

    return run_table(TABLE, words or ["--help"])
