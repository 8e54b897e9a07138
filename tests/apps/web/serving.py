"""A real server in a process of its own, and what agents and operators do to it over HTTP."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shotclock.calls.principal import Principal, Role
from shotclock.core.limits import WallTime
from shotclock.people.access import Access
from shotclock.store.store import Store
from tests.warm import WarmStart

ROOT = Path(__file__).resolve().parents[3]
# An interpreter, the SDK and an app, on a machine that has other things to do.
STARTED_WITHIN_S = 30.0
ENDED_WITHIN_S = 10.0
ANSWER_WITHIN_S = 30.0


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def envelope(self) -> Any:
        said = self.json
        return said.get("envelope", said)

    @property
    def code(self) -> Any:
        return self.envelope["error"]["code"]

    @property
    def data(self) -> Any:
        assert self.envelope["ok"], self.envelope
        return self.envelope["data"]


@dataclass
class Served:
    """One server, which may be killed and started again at the same place."""

    home: Path
    log: Path
    host: str = "127.0.0.1"
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    environment: dict[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ("serve", "tests.apps.web.shop:app")
    options: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{self.port}"

    def start(self) -> None:
        words = [*self.words, "--http", f"{self.host}:{self.port}", *self.options]
        environment = {**os.environ, "SHOTCLOCK_HOME": str(self.home), **self.environment}
        already = len(self.said())
        with open(self.log, "ab") as log:
            self.process = WarmStart(
                [sys.executable, "-m", "shotclock", *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=ROOT, env=environment,
            )  # fmt: skip
        give_up_at = time.monotonic() + STARTED_WITHIN_S
        while not (found := re.search(r"decide at http://[^/]+:(\d+)/", self.said()[already:])):
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < give_up_at, self.said()
            time.sleep(0.01)
        self.port = int(found[1])

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(ENDED_WITHIN_S)

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(ENDED_WITHIN_S)
        finally:
            self.process.kill()

    def said(self) -> str:
        return self.log.read_text("utf-8", "replace") if self.log.exists() else ""

    @property
    def link(self) -> str:
        """The last one it printed: each works once."""
        return re.findall(r"decide at (\S+)", self.said())[-1]

    # --- over HTTP --------------------------------------------------------------------------------

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = None,
        raw: bytes | None = None,
        **headers: str,
    ) -> Answer:
        """Header names are written with underscores."""
        connection = http.client.HTTPConnection(*self.url.removeprefix("http://").split(":"), timeout=ANSWER_WITHIN_S)
        said = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            said["Authorization"] = f"Bearer {token}"
        content = raw if raw is not None else None if body is None else json.dumps(body).encode()
        if content is not None:
            said.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, path, content, said)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def propose(self, token: str | None = None, **ask: Any) -> str:
        answer = self.ask("POST", "/api/inbox", ask, token=token)
        return str(answer.data["proposal_id"])

    def result(self, id: str, token: str | None = None) -> Any:
        return self.ask("GET", f"/api/inbox/{id}/result", token=token).data

    def whole(self, id: str, token: str | None = None) -> Any:
        return self.ask("GET", f"/api/inbox/{id}", token=token).data["proposal"]

    # --- tokens -----------------------------------------------------------------------------------

    def token(self, name: str, role: Role, ttl_ms: int | None = None) -> str:
        with Store.open(self.home) as store:
            return Access(store).issue(name, role, Principal.local(), now(), ttl_ms=ttl_ms).text

    def revoke(self, name: str) -> None:
        with Store.open(self.home) as store:
            assert Access(store).revoke(name, Principal.local(), now())


def now() -> WallTime:
    return WallTime.of_ns(time.time_ns())


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[Served]:
    served = Served(folder / "home", folder / "log", **options)
    served.start()
    try:
        yield served
    finally:
        code = served.stop()
    assert code == 143, served.said()
    assert "Traceback" not in served.said(), served.said()
