"""Local pages for a real browser, some of which freeze it, and the sessions that look at them."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.errors import Failure, error_entry
from shotclock.ui import client

SHOP = """<!doctype html><title>Shop</title><h1>Shop</h1>
<button id="buy" onclick="document.getElementById('said').textContent = 'bought'">Buy</button>
<p id="said" data-testid="answer">nothing yet</p>
<label>Name <input id="name"></label> <input id="fixed" readonly aria-label="Fixed" value="set">
<form onsubmit="document.title = 'sent ' + q.value; return false"><input id="q" aria-label="Search"></form>
<dl><dt>Price</dt><dd>5 EUR</dd></dl> <table><tr><th>Colour</th><td>red</td></tr></table>
<ul><li class="item">one</li><li class="item">two</li><li class="item" hidden>three</li></ul>
<a href="/details">Details</a> <a href="/details" target="_blank">New window</a>
<button onclick="setTimeout(() => document.body.append(Object.assign(document.createElement('b'), {textContent: 'Late'})), 300)">Later</button>
<button onclick="confirm('Sure?')">Ask</button> <button disabled>Closed</button>
<div style="height: 5000px"></div><p>Bottom</p>"""  # noqa: E501

PAGES = {
    "/": SHOP,
    "/details": "<title>Details</title><h1>Details</h1><p>all of them</p>",
    "/spin": "<h1>Spin</h1><button onclick='while (true) {}'>Go</button>",
    "/spin-at-once": "<h1>Spin</h1><script>while (true) {}</script>",
    "/dialogs": "<h1>Dialogs</h1><button onclick='while (true) alert(1)'>Go</button>",
    "/confirms": "<h1>Confirms</h1><button onclick='while (true) confirm(1)'>Go</button>",
    "/flood": "<h1>Flood</h1><button onclick='go()'>Go</button><script>function go() {"
    "const source = 'const big = new Array(2000).fill({a: 1}); while (true) postMessage(big)';"
    "const worker = new Worker(URL.createObjectURL(new Blob([source])));"
    "worker.onmessage = () => { const end = performance.now() + 20; while (performance.now() < end); } }</script>",
    "/links": "<h1>Links</h1><label>Name <input id='name'></label> <a href='/slow'>Slow</a> <a href='/never'>Never</a>"
    "<form action='/slow'><input id='q' aria-label='Search'></form>",
    "/slow": "<title>Slow</title><h1>Slow page</h1>",
    "/opens": "<title>Opens</title><h1>Opens</h1><a href='/details' target='_blank'>Blank</a> "
    "<a href='/slow' target='_blank'>Slow</a> <button onclick=\"window.open('/details')\">Window</button> "
    "<a href='/endless' download='a.bin'>Download</a> <a href='/details'>Same</a>",
    "/asks": "<title>Asks</title><p id='said'></p><button onclick=\"said.textContent = confirm('Sure?')\">Ask</button> "
    "<button onclick=\"said.textContent = prompt('Name?', 'Bob')\">Prompt</button> "
    "<button onclick=\"alert('Hello'); said.textContent = 'greeted'\">Greet</button> "
    "<button onclick=\"setTimeout(() => said.textContent = confirm('Later?'), 200)\">Later</button> "
    "<button onclick=\"said.textContent = [confirm('One?'), confirm('Two?')]\">Both</button> "
    "<a href='/details'>Leave</a> <button onclick='onbeforeunload = event => event.preventDefault()'>Guard</button>",
    "/inputs": "<title>Inputs</title><select aria-label='Colour' multiple><option value='r'>Red</option>"
    "<option value='b'>Blue</option></select> <select id='size'><option>S</option><option>L</option></select> "
    "<b onmouseenter='menu.hidden = false'>Menu</b> <i id='menu' hidden>Open me</i> "
    "<input type='file' id='file' onchange='got.textContent = [...this.files].map(f => f.name)'> "
    "<input type='file' id='secret' hidden multiple onchange='got.textContent = [...this.files].map(f => f.name)'> "
    "<button onclick='secret.click()'>Choose</button> <p id='got'></p>",
    "/slow-input": "<title>Slow input</title><p id='said'></p>"
    "<button onclick=\"said.textContent = 'clicked'\">Go</button>"
    "<textarea oninput=\"said.textContent = 'typed'; const end = performance.now() + 30;"
    'while (performance.now() < end);"></textarea><select disabled><option>a</option></select>',
    "/frames": "<title>Frames</title><button>Main</button><iframe src='/outer'></iframe><script>document.write("
    "`<iframe name='other' src='http://localhost:${location.port}/foreign'></iframe>`)</script>",
    "/outer": "<button onclick=\"this.textContent = 'Pressed'\">Outer</button><iframe src='/inner'></iframe>",
    "/inner": "<button onclick=\"this.textContent = 'Deep'\">Inner</button><label>Deep name <input></label>",
    "/foreign": "<button onclick=\"this.textContent = 'Done'\">Foreign</button><button>Main</button>"
    "<button onclick='while (true) {}'>Hang</button>",
    "/rows": "<title>Rows</title><h1>Rows</h1><table>"
    + "".join(f"<tr><td><a href='#'>link {row}</a><td><button>b {row}</button></tr>" for row in range(12_500))
    + "</table>",
    "/deep": "<title>Deep</title>" + "<section aria-label='s'>" * 400 + f"<p>{'long ' * 100_000}</p>",
    "/hanging-download": "<h1>Download</h1><a href='/endless' download>Go</a>",
}
# How long /slow takes to answer.
SLOW_S = 2.0
# A connection that a test leaves behind is closed by the server then.
HANG_LIMIT_S = 30.0


class _Pages(BaseHTTPRequestHandler):
    ending = threading.Event()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/never":
            self.ending.wait(HANG_LIMIT_S)
            return
        if path == "/endless":
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(b"x" * 1000)
            self.wfile.flush()
            self.ending.wait(HANG_LIMIT_S)
            return
        if path == "/slow":
            self.ending.wait(SLOW_S)
        body = PAGES.get(path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write((body or "nothing").encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server of these pages."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Pages)
    server.daemon_threads = True
    _Pages.ending.clear()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        _Pages.ending.set()
        server.shutdown()
        server.server_close()


def needs_browser() -> None:
    pytest.importorskip("playwright")
    from shotclock.ui._browser import find_chromium

    if find_chromium() is None:
        pytest.skip("no Chromium on this machine")


class Session:
    """A device with a store of its own, and pages for it."""

    def __init__(self, home: Path, url: str, device: str = "browser") -> None:
        self.home, self.url, self.device = home, url, device

    def run(self, *actions: Any, timeout_ms: int = 15000, mode: str = "direct", **options: Any) -> dict[str, Any]:
        """The envelope of an execution; its `elapsed_ms` is measured here."""
        payload = {"commandId": f"c-{time.monotonic_ns()}", "taskId": "t", "source": "test", "mode": mode}
        payload |= {"expectedFormat": "android-ui-automator", "timeoutMs": timeout_ms, "actions": list(actions)}
        return self.send(payload, **options)

    def send(self, payload: dict[str, Any], **options: Any) -> dict[str, Any]:
        began = time.monotonic()
        try:
            told = client.execute(self.device, payload, **options).to_dict()
        except Failure as failure:
            error = {"code": failure.code, "message": str(failure), "context": failure.context}
            told = {"ok": False, "data": failure.data, "error": error, "meta": {}}
        if told["error"] is not None:
            error_entry(told["error"]["code"])  # or it is not registered
        return {**told, "elapsed_ms": (time.monotonic() - began) * 1000}

    def open(self, path: str = "/", **more: Any) -> dict[str, Any]:
        return {"id": "open", "type": "open_uri", "params": {"uri": self.url + path, **more}}

    def status(self) -> dict[str, Any] | None:
        told = client.find_status(self.device)
        return None if told is None else told.data  # type: ignore[return-value]

    def stop(self) -> None:
        client.stop(self.device)

    def processes(self, *words: str) -> list[int]:
        """Pids with these words whose environment or words have the daemon's temporary folder, and pids below those:
        what Chromium forks from its zygote writes its name over its environment."""
        scratch = Path(f"{client.stem_of(self.device)}.tmp").read_text()
        lines: dict[int, str] = {}
        children: dict[int, list[int]] = {}
        ours: list[int] = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
                environ = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            lines[pid] = line
            children.setdefault(parent, []).append(pid)
            if f"TMPDIR={scratch}" in environ or scratch in line:
                ours.append(pid)
        for pid in ours:  # grows meanwhile
            ours += [child for child in children.get(pid, ()) if child not in ours]
        return [pid for pid in ours if lines[pid] and all(word in lines[pid] for word in words)]


@contextmanager
def session_in(folder: Path, device: str = "browser") -> Iterator[Session]:
    """A session whose daemon, and all below it, is gone afterwards, whatever the test did."""
    needs_browser()
    before = os.environ.get("SHOTCLOCK_HOME")
    os.environ["SHOTCLOCK_HOME"] = str(folder)
    try:
        with serving() as url:
            session = Session(folder, url, device)
            try:
                yield session
            finally:
                status = session.status()
                if status is not None:
                    session.stop()
                    assert not is_alive(status["pid"]), "the daemon is still there"
                left = [pid for pid in pids_with("shotclock.ui.daemon", str(folder)) if is_alive(pid)]
                kill(left)
                assert not left, "a daemon is still there"
    finally:
        if before is None:
            os.environ.pop("SHOTCLOCK_HOME", None)
        else:
            os.environ["SHOTCLOCK_HOME"] = before
        shutil.rmtree(folder, ignore_errors=True)


def is_alive(pid: int, within_s: float = 5.0) -> bool:
    """Whether a process is there after a while, in which it may leave."""
    give_up_at = time.monotonic() + within_s
    while time.monotonic() < give_up_at:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return False
        except OSError:
            return False
        time.sleep(0.02)
    return True


def pids_with(word: str, home: str) -> list[int]:
    """Pids of programs with this word, that know this home of the store."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{name}/cmdline").read_bytes().decode("utf-8", "replace")
            environ = Path(f"/proc/{name}/environ").read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        if word in line and f"SHOTCLOCK_HOME={home}" in environ:
            found.append(int(name))
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
