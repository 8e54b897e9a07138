"""An MCP server that writes the lines of a file. Started as a program; standard library only.

lying_server.py FILE

FILE holds {"METHOD": ["LINE", …]}. In a line, $ID is the id of the request, and $LONG a text of 200 kB. A request of
ours, and one without lines of its own, gets a plain answer with one tool, `good`.
"""

import json
import sys

TOOL = {"name": "good", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}
GREETING = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {"listChanged": True}},
    "serverInfo": {"name": "lying", "version": "1"},
}
ANSWERS = {"initialize": GREETING, "tools/list": {"tools": [TOOL]}}

for line in sys.stdin.buffer:
    request = json.loads(line)
    id, method = request.get("id"), request.get("method")
    with open(sys.argv[1]) as file:
        lines = json.load(file).get(method, [])
    if id is None:
        continue
    if str(id).startswith("shotclock-") or not lines:
        lines = [json.dumps({"jsonrpc": "2.0", "id": id, "result": ANSWERS.get(method, {"content": []})})]
    for each in lines:
        whole = each.replace("$ID", json.dumps(id)).replace("$LONG", "x" * 200_000)
        sys.stdout.buffer.write(whole.encode() + b"\n")
        sys.stdout.buffer.flush()
