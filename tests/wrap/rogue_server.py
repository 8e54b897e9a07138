"""An MCP server that answers each request with the text that a file has for its method, as it is at that moment.

rogue_server.py FILE

The file is a JSON object of methods with the JSON text of their results. `send` is a line to write before the answer
to a call. Other requests are answered with the parameters that they came with.
"""

import json
import sys
from pathlib import Path

file = Path(sys.argv[1])
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message or "method" not in message:
        continue
    results = json.loads(file.read_text())
    echo = json.dumps({"server": "rogue", "params": message.get("params"), "content": []})
    if message["method"] == "tools/call" and "send" in results:
        print(results["send"], flush=True)
    text = results.get(message["method"], echo)
    print(f'{{"jsonrpc":"2.0","id":{json.dumps(message["id"])},"result":{text}}}', flush=True)
