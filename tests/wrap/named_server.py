"""An MCP server with prompts, resources and a template of its name, on pages of one object each.

named_server.py NAME [--tasks] [--crash-at-list]

Every request but the lists is answered with the name of the server and its parameters.
"""

import json
import os
import sys

name, flags = sys.argv[1], sys.argv[2:]
LISTS = {
    "tools/list": ("tools", [{"name": tool, "inputSchema": {"type": "object"}} for tool in ("same", f"only_{name}")]),
    "prompts/list": ("prompts", [{"name": "hello", "title": "Hello"}, {"name": f"bye_{name}"}]),
    "resources/list": ("resources", [{"name": "r", "uri": f"{name}://one"}, {"name": "s", "uri": "shared://one"}]),
    "resources/templates/list": ("resourceTemplates", [{"name": "t", "uriTemplate": f"{name}://by/{{id}}/x"}]),
}


def say(content: dict[str, object]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **content}), flush=True)


for line in sys.stdin:
    message = json.loads(line)
    id, method, params = message.get("id"), message.get("method"), message.get("params") or {}
    if method == "initialize":
        capabilities = {"tools": {}, "prompts": {}, "resources": {"subscribe": True}, "completions": {}}
        say(
            {
                "id": id,
                "result": {
                    "protocolVersion": "2025-03-26" if name == "old" else "2025-06-18",
                    "capabilities": capabilities,
                    "serverInfo": {"name": name, "version": "1"},
                    "instructions": f"Use {name}.",
                },
            }
        )
    elif method in LISTS:
        if "--crash-at-list" in flags:
            os._exit(3)
        key, objects = LISTS[method]
        start = int(params.get("cursor", 0))
        more = {"nextCursor": str(start + 1)} if start + 1 < len(objects) else {}
        say({"id": id, "result": {key: objects[start : start + 1], **more}})
    elif method == "tools/call" and "task" in params:
        say({"id": id, "result": {"task": {"taskId": f"task-of-{name}"}}})
    elif method == "server/discover":
        say({"id": id, "error": {"code": -32601, "message": "Method not found"}})
    elif id is not None and method is not None:
        say({"id": id, "result": {"server": name, "method": method, "params": params, "content": []}})
