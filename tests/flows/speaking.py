"""An MCP server that speaks without the SDK, so that it can say what no SDK would: `python speaking.py FILE` answers
every call of the tool `say` with the JSON text in FILE, and with the arguments of the call in it for ARGUMENTS."""

import json
import sys
from pathlib import Path


def main() -> None:
    result = Path(sys.argv[1]).read_text(encoding="utf-8", errors="surrogatepass")
    for line in sys.stdin:
        message = json.loads(line)
        answer = None
        match message.get("method"):
            case "initialize":
                info = {"name": "speaking", "version": "1"}
                version = message["params"]["protocolVersion"]
                answer = json.dumps({"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
                answer = sys.argv[2] if len(sys.argv) > 2 else answer
            case "tools/list":
                answer = json.dumps({"tools": [{"name": "say", "inputSchema": {"type": "object"}}]})
            case "tools/call":
                answer = result.replace("ARGUMENTS", json.dumps(json.dumps(message["params"]["arguments"])))
        if answer is not None and "id" in message:
            kind = "error" if answer.startswith('{"code"') else "result"
            print(f'{{"jsonrpc": "2.0", "id": {json.dumps(message["id"])}, "{kind}": {answer}}}', flush=True)


main()
