"""An MCP server that behaves as its tools are called. Started as a program; standard library only.

scripted_server.py [--id-last] [--strict] [--mute METHOD] [--exit-at-start CODE] [--record FILE] [--die-once FILE]
        [--started FILE [--mute-later METHOD] [--delay-later SECONDS]]

A strict server refuses every request before `initialize`. A server that finds FILE is not the first one to start, and
behaves as the last options say.
"""

import argparse
import json
import os
import sys
import time

options = argparse.ArgumentParser()
options.add_argument("--modern", action="store_true", help="results as in 2026-07-28")
options.add_argument("--id-last", action="store_true")
options.add_argument("--strict", action="store_true")
options.add_argument("--mute", default="")
options.add_argument("--exit-at-start", type=int)
options.add_argument("--record")
options.add_argument("--die-once")
options.add_argument("--started")
options.add_argument("--mute-later", default="")
options.add_argument("--delay-later", type=float, default=0)
given = options.parse_args()
is_later = given.started is not None and os.path.exists(given.started)
if given.started is not None:
    open(given.started, "w").close()

TOOLS = [
    {"name": "echo", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}},
    {"name": "die_once", "inputSchema": {"type": "object"}, "annotations": {"idempotentHint": True}},
    {"name": "hang", "inputSchema": {"type": "object"}},
    {"name": "block", "inputSchema": {"type": "object"}},
    {"name": "crash", "inputSchema": {"type": "object"}},
    {"name": "daemon", "inputSchema": {"type": "object"}},
]
asked: dict[int, object] = {}  # calls that wait for an answer of the client, by the ids of our requests
cancelled: list[object] = []
levels: list[object] = []
greetings: list[object] = []


def write(line: bytes) -> None:
    if given.record:
        with open(given.record, "ab") as file:
            file.write(line)
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def say(content: dict[str, object]) -> None:
    whole = {**content, "jsonrpc": "2.0"} if given.id_last else {"jsonrpc": "2.0", **content}
    if given.id_last and "id" in whole:
        whole["id"] = whole.pop("id")
    write(json.dumps(whole, separators=(",", ":") if given.id_last else None).encode() + b"\n")


def answer(id: object, text: str, **more: object) -> None:
    kind = {"resultType": "complete"} if given.modern else {}
    say({"id": id, "result": {"content": [{"type": "text", "text": text}], **more, **kind}})


def daemonise() -> int:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        child = os.fork()
        if child == 0:
            for fd in (0, 1, 2, reader, writer):
                os.close(fd)
            time.sleep(600)
        os.write(writer, str(child).encode())
        os._exit(0)
    return int(os.read(reader, 20))


def call(id: object, name: str, arguments: dict[str, object], meta: dict[str, object]) -> None:
    match name:
        case "echo":
            answer(id, str(arguments.get("text", "")))
        case "pid":
            answer(id, str(os.getpid()))
        case "hang" | "ignore":
            pass
        case "block":
            time.sleep(600)
        case "crash":
            print("about to crash", file=sys.stderr, flush=True)
            os._exit(3)
        case "die_once" if given.die_once and not os.path.exists(given.die_once):
            open(given.die_once, "w").close()
            os._exit(4)
        case "die_once":
            answer(id, "alive")
        case "big":
            fields: dict[str, object] = {"isError": True} if arguments.get("fails") else {}
            if arguments.get("structured"):
                fields["structuredContent"] = {"result": "x" * int(str(arguments["size"]))}
            answer(id, "x" * int(str(arguments["size"])), **fields)
        case "half":
            write(b'{"jsonrpc":"2.0","id":' + json.dumps(id).encode() + b',"result":{"text":"' + b"y" * 200_000)
            os._exit(5)
        case "garbage":
            for line in (b"Debugger listening\n", b"[1,2]\n", b"42\n", b'"text"\n', b"{}\n", b"\xff\xfe\n", b"\n"):
                write(line)
            answer(id, "ok")
        case "twice":
            answer(id, "first")
            answer(id, "second")
        case "other_id":
            answer("nobody-asked", "wrong")
            answer(id, "right")
        case "flood":
            for number in range(int(str(arguments["count"]))):
                say({"method": "notifications/message", "params": {"level": "info", "data": number}})
            answer(id, "done")
        case "daemon":
            answer(id, str(daemonise()))
        case "ask":
            number = len(asked)
            asked[number] = id
            say({"id": number, "method": "sampling/createMessage", "params": {"messages": []}})
        case "progress":
            for number in range(1, int(str(arguments["count"])) + 1):
                time.sleep(float(str(arguments["every"])))
                progress = {"progressToken": meta["progressToken"], "progress": number}
                say({"method": "notifications/progress", "params": progress})
            answer(id, "finished")
        case "cancelled":
            answer(id, json.dumps(cancelled))
        case "levels":
            answer(id, json.dumps(levels))
        case _:
            say({"id": id, "error": {"code": -32602, "message": f"unknown tool {name}"}})


def handle(message: dict[str, object]) -> None:
    id, method = message.get("id"), message.get("method")
    params = message.get("params") or {}
    assert isinstance(params, dict)
    if method == given.mute or (is_later and method == given.mute_later):
        return
    if given.strict and id is not None and method != "initialize" and not greetings:
        say({"id": id, "error": {"code": -32602, "message": "Invalid request parameters"}})
        return
    match method:
        case "initialize":
            greetings.append(params)
            capabilities = {"tools": {"listChanged": True}, "logging": {}}
            info = {"name": "scripted", "version": "1"}
            result = {"protocolVersion": "2025-06-18", "capabilities": capabilities, "serverInfo": info}
            say({"id": id, "result": result})
        case "ping":
            say({"id": id, "result": {}})
        case "tools/list":
            say({"id": id, "result": {"tools": TOOLS}})
        case "tools/call":
            call(id, str(params["name"]), params.get("arguments") or {}, params.get("_meta") or {})
        case "logging/setLevel":
            levels.append(params["level"])
            say({"id": id, "result": {}})
        case "notifications/cancelled":
            cancelled.append(params["requestId"])
        case None:
            waiting = asked.pop(int(str(id)))  # fails if this is the answer to another process's request
            answer(waiting, json.dumps(message.get("result")))
        case _ if id is not None:
            say({"id": id, "error": {"code": -32601, "message": "Method not found"}})


if is_later:
    time.sleep(given.delay_later)
if given.exit_at_start is not None:
    print("cannot start", file=sys.stderr, flush=True)
    sys.exit(given.exit_at_start)
for line in sys.stdin.buffer:
    try:
        handle(json.loads(line))
    except ValueError:
        say({"id": None, "error": {"code": -32700, "message": "Parse error"}})
