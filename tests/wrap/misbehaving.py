"""A filter in front of an MCP server that misbehaves: `misbehaving.py [--mute METHOD --once FILE] -- COMMAND…`.

Requests of METHOD are dropped until FILE exists. A call misbehaves as `_meta.mischief` says; all else passes unchanged.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

BIG = 60_000_000
FLOOD = 20_000
DEAF_S = 600.0
GARBAGE = (b"Debugger listening\n", b"[1,2]\n", b"42\n", b"{}\n", b"\xff\xfe\n", b"\n", b'{"jsonrpc":"1.0"}\n')
DAEMON = "setsid sleep 600 >/dev/null 2>&1 </dev/null &"

options = argparse.ArgumentParser()
options.add_argument("--mute", default="")
options.add_argument("--once", default="")
options.add_argument("command", nargs="+")
given = options.parse_args()
server = subprocess.Popen(given.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
mischiefs: dict[Any, str] = {}
"""The mischief for each call that is open."""
late: list[bytes] = []
"""Answers that are sent when the next call arrives."""
lock = threading.Lock()


def write(*lines: bytes) -> None:
    with lock:
        for line in lines:
            sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def answer(line: bytes) -> None:
    """Pass a line of the server on, with the mischief of its call."""
    message = json.loads(line)
    match mischiefs.pop(message.get("id"), "") if "method" not in message else "":
        case "big":
            message["result"]["content"] = [{"type": "text", "text": "x" * BIG}]
            message["result"].pop("structuredContent", None)
            write(encoded(message))
        case "flood":
            notice = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "flood"}}
            write(*[encoded(notice)] * FLOOD, line)
        case "garbage":
            write(*GARBAGE, line)
        case "twice":
            write(line, line)
        case "other id":
            write(encoded({**message, "id": "nobody-asked"}), line)
        case "late":
            late.append(line)
        case _:
            write(line)


def pass_answers() -> None:
    assert server.stdout is not None
    for line in server.stdout:
        answer(line)
    os._exit(server.wait(DEAF_S))


def is_dropped(message: dict[str, Any]) -> bool:
    """Return whether the server must not see this message, after its mischief."""
    if message.get("method") == given.mute and not os.path.exists(given.once):
        open(given.once, "w").close()
        return True
    if message.get("method") != "tools/call":
        return False
    write(*late)
    late.clear()
    mischief = message["params"].get("_meta", {}).get("mischief", "")
    if mischief == "deaf":
        time.sleep(DEAF_S)
    if mischief == "daemon":
        subprocess.run(["sh", "-c", DAEMON], check=True, timeout=DEAF_S)
    mischiefs[message["id"]] = mischief
    return bool(mischief == "hang")


threading.Thread(target=pass_answers, daemon=True).start()
assert server.stdin is not None
for line in sys.stdin.buffer:
    if not is_dropped(json.loads(line)):
        server.stdin.write(line)
        server.stdin.flush()
server.stdin.close()
sys.exit(server.wait(DEAF_S))
