"""An MCP server whose lists come from a file, and which records the calls that reach it.

catalogue_server.py FILE [--page N] [--id-last] [--record FILE]

FILE holds {"tools": […], "prompts": […], "resourceTemplates": […], "instructions": "…"} and is read for each list and
greeting. The tool `announce` sends list_changed.
"""

import argparse
import json
import sys

options = argparse.ArgumentParser()
options.add_argument("file")
options.add_argument("--page", type=int, default=100)
options.add_argument("--id-last", action="store_true")
options.add_argument("--record")
given = options.parse_args()
LISTS = {"tools/list": "tools", "prompts/list": "prompts", "resources/templates/list": "resourceTemplates"}


def say(content: dict[str, object]) -> None:
    whole = {**content, "jsonrpc": "2.0"} if given.id_last else {"jsonrpc": "2.0", **content}
    if given.id_last and "id" in whole:
        whole["id"] = whole.pop("id")
    print(json.dumps(whole), flush=True)


def read_file() -> dict[str, list[object]]:
    with open(given.file) as file:
        content: dict[str, list[object]] = json.load(file)
    return content


def page_of(name: str, cursor: object) -> dict[str, object]:
    objects = read_file().get(name, [])
    start = int(str(cursor or 0))
    end = start + given.page
    more = {"nextCursor": str(end)} if end < len(objects) else {}
    return {name: objects[start:end], **more}


def record(text: str) -> None:
    if given.record:
        with open(given.record, "a") as file:
            file.write(text + "\n")


for line in sys.stdin:
    message = json.loads(line)
    id, method, params = message.get("id"), message.get("method"), message.get("params") or {}
    record(line.strip())
    if method in ("initialize", "server/discover"):
        capabilities = {"tools": {"listChanged": True}, "prompts": {}, "resources": {}}
        info = {"name": "catalogue", "version": "1"}
        greeting = {"protocolVersion": "2025-06-18", "capabilities": capabilities, "serverInfo": info}
        greeting |= {name: text for name, text in read_file().items() if name == "instructions"}
        say({"id": id, "result": greeting})
    elif method in LISTS:
        say({"id": id, "result": page_of(LISTS[method], params.get("cursor"))})
    elif method == "tools/call" and params["name"] == "announce":
        say({"method": "notifications/tools/list_changed"})
        say({"id": id, "result": {"content": [{"type": "text", "text": "announced"}]}})
    elif method == "tools/call":
        text = json.dumps([params["name"], params.get("arguments")])
        say({"id": id, "result": {"content": [{"type": "text", "text": text}]}})
    elif id is not None:
        say({"id": id, "result": {}})
