"""An MCP server over HTTP that misbehaves on demand: each tool is a way to answer a request. Prints its port."""

import json
import ssl
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGE = 60_000_000
PIECE = b"x" * 100_000
HANG_S = 60.0

requests: list[dict[str, Any]] = []
"""Every request: its method, its headers, its message."""
lost_sessions: set[str] = set()
deaf_sessions: set[str] = set()
stop = threading.Event()
late: dict[str, Any] = {}


def result(id: Any, text: str) -> bytes:
    result = {"content": [{"type": "text", "text": text}], "resultType": "complete"}  # of both generations
    return json.dumps({"jsonrpc": "2.0", "id": id, "result": result}).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, body: bytes, *, status: int = 200, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(body)

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def note(self, message: Any = None) -> None:
        requests.append({"http": self.command, "headers": dict(self.headers), "message": message, "path": self.path})

    def do_GET(self) -> None:
        self.note()
        last = self.headers.get("Last-Event-ID")
        if last is None or last not in late:
            self.answer(b"no stream here", status=405, kind="text/plain")
            return
        self.begin_stream()
        self.chunk(b"id: e9\ndata: " + late.pop(last) + b"\n\n")
        self.chunk(b"")

    def do_DELETE(self) -> None:
        self.note()
        self.answer(b"")

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.note(message)
        method, id = message.get("method"), message.get("id")
        session = self.headers.get("Mcp-Session-Id")
        if self.path == "/slash":
            self.answer(b"", status=307, Location="/mcp")
        elif self.path == "/elsewhere":
            self.answer(b"", status=307, Location="http://127.0.0.2:9/mcp?token=secret")
        elif self.path == "/closed":
            self.answer(f"who are you, {self.headers.get('Authorization')}?".encode(), status=401, kind="text/plain")
        elif session in lost_sessions:
            self.answer(b"no such session", status=404, kind="text/plain")
        elif session in deaf_sessions:
            stop.wait(HANG_S)
        elif id is None or method is None:
            self.answer(b"", status=202)
        elif method == "initialize":
            info = {"name": "bad", "version": "1"}
            greeting = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
            body = json.dumps({"jsonrpc": "2.0", "id": id, "result": greeting}, indent=2).encode()
            self.answer(body, Mcp_Session_Id=f"session-{len(requests)}")
        elif method == "tools/call":
            getattr(self, "call_" + message["params"]["name"])(id, message["params"].get("arguments", {}))
        else:
            names = [name.removeprefix("call_") for name in vars(Handler) if name.startswith("call_")]
            tools = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
            self.answer(json.dumps({"jsonrpc": "2.0", "id": id, "result": {"tools": tools}}).encode())

    # --- tools ---------------------------------------------------------------------------------------------------

    def call_echo(self, id: Any, arguments: Any) -> None:
        self.answer(result(id, arguments.get("text", "")))

    def call_requests(self, id: Any, arguments: Any) -> None:
        self.answer(result(id, json.dumps(requests)))

    def call_forget(self, id: Any, arguments: Any) -> None:
        """Forget the session after this answer."""
        lost_sessions.add(str(self.headers.get("Mcp-Session-Id")))
        self.answer(result(id, "forgotten"))

    def call_deafen(self, id: Any, arguments: Any) -> None:
        """Answer nothing in this session after this answer."""
        deaf_sessions.add(str(self.headers.get("Mcp-Session-Id")))
        self.answer(result(id, "deaf"))

    def call_hang(self, id: Any, arguments: Any) -> None:
        stop.wait(HANG_S)

    def call_fail(self, id: Any, arguments: Any) -> None:
        self.answer(b"<html>\nout of order " + b"y" * 1000, status=500, kind="text/html")

    def call_refuse(self, id: Any, arguments: Any) -> None:
        error = {"code": -32602, "message": "bad arguments", "data": {"field": "a"}}
        self.answer(json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode(), status=400)

    def call_accept(self, id: Any, arguments: Any) -> None:
        self.answer(b"", status=202)

    def call_garbage(self, id: Any, arguments: Any) -> None:
        self.answer(b"\x1eshotclock [1]\n[1, 2]")

    def call_wrong_id(self, id: Any, arguments: Any) -> None:
        self.answer(result("another", "text"))

    def call_not_http(self, id: Any, arguments: Any) -> None:
        self.wfile.write(b"220 smtp.example.org\r\n\r\n")
        self.close_connection = True

    def call_drop(self, id: Any, arguments: Any) -> None:
        self.close_connection = True

    def call_cut_json(self, id: Any, arguments: Any) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "100000")
        self.end_headers()
        self.wfile.write(result(id, "cut"))
        self.close_connection = True

    def call_cut_stream(self, id: Any, arguments: Any) -> None:
        self.begin_stream()
        self.chunk(b": hello\n\ndata: " + result(id, "cut")[:20])
        self.close_connection = True

    def call_resume(self, id: Any, arguments: Any) -> None:
        """End the stream before the answer, which another stream has."""
        self.begin_stream()
        self.chunk(b"id: e8\nretry: 50\ndata:\n\n")
        late["e8"] = result(id, "resumed")
        self.chunk(b"")

    def call_lose_stream(self, id: Any, arguments: Any) -> None:
        self.begin_stream()
        self.chunk(b"id: never\nretry: 50\ndata:\n\n")
        self.chunk(b"")

    def call_odd_stream(self, id: Any, arguments: Any) -> None:
        """Use every freedom that the format leaves, in pieces of one byte."""
        self.begin_stream()
        first, second = result(id, "odd").split(b", ", 1)
        text = (
            b": comment\r\revent: other\rdata: {}\r\n\r\nid: 1\r\ndata:" + first + b",\r\ndata: " + second + b"\r\n\r\n"
        )
        for number in range(len(text)):
            self.chunk(text[number : number + 1])
        self.chunk(b"")

    def call_large(self, id: Any, arguments: Any) -> None:
        head, tail = result(id, "CUT").split(b"CUT")
        if arguments.get("stream"):
            self.begin_stream()
            self.chunk(b"data: " + head)
            for _ in range(LARGE // len(PIECE)):
                self.chunk(PIECE)
            self.chunk(tail + b"\n\n")
            self.chunk(b"")
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(head) + LARGE + len(tail)))
        self.end_headers()
        self.wfile.write(head)
        for _ in range(LARGE // len(PIECE)):
            self.wfile.write(PIECE)
        self.wfile.write(tail)

    def call_slow(self, id: Any, arguments: Any) -> None:
        """Begin a large answer and never end it."""
        self.begin_stream()
        self.chunk(b"data: " + result(id, "").split(b'""')[0] + b'"' + PIECE * 2)
        stop.wait(HANG_S)

    def call_size(self, id: Any, arguments: Any) -> None:
        self.answer(result(id, str(len(arguments["text"]))))


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    server = Server(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 0), Handler)
    if len(sys.argv) > 2:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(sys.argv[2])
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()  # until the test closes it
