"""Commands that do everything that is known to keep a program from answering. No `__main__` guard, on purpose."""

import asyncio
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psutil

from shotclock import App

app = App("adversaries", default_timeout="700ms", grace="200ms")
FOR_EVER = 300.0

# --- those that only a clock ends ---------------------------------------------------------------------


@app.command
def sleeps() -> None:
    time.sleep(FOR_EVER)


@app.command
def holds_the_gil() -> None:
    ctypes.PyDLL(None).sleep(int(FOR_EVER))


@app.command
def swallows_everything() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try:
            time.sleep(FOR_EVER)
        except BaseException:
            pass


@app.command
def floods() -> None:
    while True:
        sys.stdout.write("{}" * 4000 + "\n")


@app.command
def stops_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@app.command
def closes_its_streams_and_sleeps() -> None:
    os.close(1)
    os.close(2)
    time.sleep(FOR_EVER)


@app.command
def has_a_child_that_holds_everything() -> None:
    subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 300 & setsid sleep 300 & wait"]).wait(FOR_EVER)


@app.command
def asks() -> str:
    return sys.stdin.readline() + input("your name? ")


@app.command
async def swallows_cancellation() -> None:
    while True:
        try:
            await asyncio.sleep(FOR_EVER)
        except BaseException:
            pass


# --- those that crash ---------------------------------------------------------------------------------


@app.command
def segfaults() -> None:
    faulthandler.disable()
    ctypes.string_at(0)


@app.command
def exits_at_once() -> None:
    print('{"ok":true,"data":null,"error":null,"warnings":[],"meta":{}}', flush=True)
    os._exit(0)


@app.command
def kills_its_group() -> None:
    os.killpg(0, signal.SIGKILL)


@app.command
def kills_its_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(FOR_EVER)


@app.command
def stops_its_guardians() -> None:
    """Stop the supervisor of this process, and the zygotes above it."""
    above = psutil.Process().parent()
    while above is not None and above.name() in ("shotclock-sup", "clock-zygote"):
        os.kill(above.pid, signal.SIGSTOP)
        above = above.parent()
    time.sleep(FOR_EVER)


@app.command
async def segfaults_async() -> None:
    ctypes.string_at(0)


# --- those that end, but not as they should -----------------------------------------------------------


@app.command
def leaves_with_sys_exit(code: int = 0) -> None:
    sys.exit(code)


@app.command
def raises_keyboard_interrupt() -> None:
    raise KeyboardInterrupt


@app.command
def recurses() -> None:
    recurses()


@app.command
def returns_what_is_no_json() -> Any:
    return threading.Lock()


# --- those that answer, and make a mess beside it -----------------------------------------------------


@app.command
def writes_everywhere() -> str:
    print("print")
    sys.__stdout__.write("dunder\n")
    os.write(1, b"write\n")
    subprocess.run(["echo", "child"], check=True, timeout=10)
    sys.stdout.write("left in the buffer")
    return "answer"


@app.command(timeout="20s")
def floods_and_returns(megabytes: int = 20) -> str:
    for _ in range(megabytes):
        os.write(1, b"x" * 1_000_000)
    return "answer"


@app.command
def closes_its_streams() -> str:
    os.close(0)
    os.close(1)
    os.close(2)
    return "answer"


@app.command
def leaves_a_daemon() -> str:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(FOR_EVER)
        os._exit(0)
    return "answer"


@app.command
def leaves_a_thread() -> str:
    threading.Thread(target=time.sleep, args=(FOR_EVER,)).start()
    return "answer"


@app.command
def changes_what_it_runs_in() -> str:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    os.chdir("/")
    os.environ.clear()
    sys.stdout = None  # type: ignore[assignment]
    sys.modules.clear()
    return "answer"


app()
