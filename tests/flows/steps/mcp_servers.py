"""MCP servers that misbehave, spoken by hand so that each does exactly one thing wrong.

`python -m tests.flows.steps.mcp_servers NAME [FOLDER]` is one on stdio. None lives longer than FOREVER_S.
"""

import json
import os
import signal
import sys
import threading
import time
from typing import Any

from tests.calls.work import mark, start_daemon

FOREVER_S = 40
TOOLS = [
    {"name": name, "inputSchema": {"type": "object"}}
    for name in ("echo", "fail", "text", "many", "picture", "envelope", "failing_envelope", "slow", "environment")
]

WARNINGS = [{"code": "ACME_LOW", "message": "low"}, {"code": "no code", "message": 1}, "nonsense"]


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": words}], **more}


def called(params: dict[str, Any]) -> dict[str, Any]:
    arguments = params.get("arguments") or {}
    match params["name"]:
        case "echo":
            return text("see structured", structuredContent={"arguments": arguments, "meta": params.get("_meta")})
        case "text":
            return text(arguments["words"])
        case "many":
            return {"content": [{"type": "text", "text": word} for word in arguments["words"]]}
        case "picture":
            return {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]}
        case "fail":
            return text("no such customer", isError=True)
        case "envelope":
            return text("…", structuredContent=envelope({"answer": 42}))
        case "failing_envelope":
            error = {"code": arguments["code"], "message": "out of stock", "retryable": False}
            return text("…", structuredContent=envelope(None, error), isError=True)
        case "environment":
            return text(json.dumps(dict(os.environ)))
        case _:
            time.sleep(FOREVER_S)
            return text("late")


def envelope(data: Any, error: Any = None) -> dict[str, Any]:
    meta = {"exit_code": 0 if error is None else 7, "ending": "killed", "side_effects": "partial"}
    return {
        "ok": error is None,
        "data": data,
        "error": error,
        "warnings": WARNINGS,
        "meta": meta,
    }


def answer(request: dict[str, Any]) -> None:
    match request.get("method"):
        case "initialize":
            result: Any = {
                "protocolVersion": request["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "by hand", "version": "1"},
            }
        case "tools/list":
            result = {"tools": TOOLS}
        case "tools/call":
            result = called(request["params"])
        case _:
            if "id" in request:
                send({"id": request["id"], "error": {"code": -32601, "message": "no such method"}})
            return
    send({"id": request["id"], "result": result})


def serve(until: str | None = None, then: Any = None) -> None:
    """Answer everything, until a method that `then` happens instead of."""
    for line in sys.stdin:
        request = json.loads(line)
        if until is not None and request.get("method") == until:
            then(request)
        else:
            answer(request)


def hang(request: Any = None) -> None:
    time.sleep(FOREVER_S)


def deaf(folder: str) -> None:
    """Nothing ends it but SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    mark(folder, "ready")


def garbage_for_ever(request: Any = None) -> None:
    give_up_at = time.monotonic() + FOREVER_S
    while time.monotonic() < give_up_at:
        sys.stdout.write("this is no JSON\n" * 1000)


def one_line_for_ever(request: Any = None) -> None:
    give_up_at = time.monotonic() + FOREVER_S
    while time.monotonic() < give_up_at:
        sys.stdout.write("x" * 65536)


def chatter(request: dict[str, Any], until: str | None = None) -> None:
    """Notifications for half a second, or until there is a file, then the answer."""
    for number in range(int(FOREVER_S / 0.05) if until else 10):
        if until is not None and os.path.exists(until):
            break
        token = request["params"]["_meta"]["progressToken"]
        send({"method": "notifications/progress", "params": {"progressToken": token, "progress": number}})
        time.sleep(0.05)
    answer(request)


def ask_back(request: dict[str, Any]) -> None:
    send({"id": "mine", "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}})
    answer_to_us = json.loads(sys.stdin.readline())
    assert "error" in answer_to_us, answer_to_us
    answer(request)


def pages_for_ever(request: dict[str, Any]) -> None:
    send({"id": request["id"], "result": {"tools": [], "nextCursor": "more"}})


def flood_stderr() -> None:
    give_up_at = time.monotonic() + FOREVER_S
    while time.monotonic() < give_up_at:
        os.write(2, b"complaint\n" * 1000)


def stop_gracefully() -> None:
    """Let `slow` run until `graceful_stop` is called, and answer then with what there is; say what was asked."""
    asked = threading.Event()

    def work(request: dict[str, Any]) -> None:
        asked.wait(FOREVER_S)
        send({"id": request["id"], "result": text("half of it")})

    def call(request: dict[str, Any]) -> None:
        if request["params"]["name"] == "graceful_stop":
            sys.stderr.write("asked to stop\n")
            asked.set()
            send({"id": request["id"], "result": text("stopping")})
        else:
            threading.Thread(target=work, args=[request], daemon=True).start()

    TOOLS.append({"name": "graceful_stop", "inputSchema": {"type": "object"}})
    serve("tools/call", call)


def main(name: str, folder: str = "") -> None:
    match name:
        case "good":
            serve()
        case "starts_slowly":
            time.sleep(float(folder))
            serve()
        case "never_initializes":
            hang()
        case "refuses_to_initialize":  # and does not say a word about what it does not know
            for line in sys.stdin:
                if json.loads(line).get("method") == "initialize":
                    send({"id": json.loads(line)["id"], "error": {"code": -32000, "message": "no licence"}})
        case "says_too_much":
            serve("tools/call", lambda r: send({"id": r["id"], "result": text("x" * 2_000_000)}))
        case "never_lists":
            serve("tools/list", hang)
        case "never_answers":
            serve("tools/call", hang)
        case "pages_for_ever":
            serve("tools/list", pages_for_ever)
        case "lists_twice":
            serve("tools/list", lambda request: send({"id": request["id"], "result": {"tools": TOOLS[:1] * 2}}))
        case "lists_nothing":
            serve("tools/list", lambda request: send({"id": request["id"], "error": {"code": -32601, "message": "no"}}))
        case "garbage":
            garbage_for_ever()
        case "garbage_in_between":
            sys.stdout.write("Welcome to the server!\n{not json}\n\n[1]\n")
            serve()
        case "one_line":
            serve("tools/call", one_line_for_ever)
        case "floods_stderr":
            threading.Thread(target=flood_stderr, daemon=True).start()
            serve()
        case "dies":
            serve("tools/call", lambda request: (sys.stderr.write("disk full\n"), sys.stderr.flush(), os._exit(3)))
        case "dies_at_once":
            sys.stderr.write("no such config\n")
            sys.exit(2)
        case "closes_stdout":
            serve("tools/call", lambda request: (os.close(1), hang()))
        case "daemon":
            start_daemon(folder)
            mark(folder, "server")
            serve()
        case "daemon_that_hangs":
            start_daemon(folder)
            serve("tools/call", hang)
        case "deaf":
            deaf(folder)
            serve()
            hang()
        case "deaf_that_hangs":
            deaf(folder)
            serve("tools/call", hang)
        case "chatters":
            serve("tools/call", chatter)
        case "chatters_until":
            serve("tools/call", lambda request: chatter(request, folder))
        case "silent_on_unknown":
            for line in sys.stdin:
                if json.loads(line).get("method") in ("initialize", "tools/list", "tools/call"):
                    answer(json.loads(line))
        case "refuses":
            serve("tools/call", lambda r: send({"id": r["id"], "error": {"code": -32602, "message": "bad words"}}))
        case "nonsense":
            serve("tools/call", lambda r: send({"id": r["id"], "result": {"content": "not a list"}}))
        case "asks_back":
            serve("tools/call", ask_back)
        case "stops_gracefully":
            stop_gracefully()
        case "reads_nothing":
            hang()


if __name__ == "__main__":
    main(*sys.argv[1:])
