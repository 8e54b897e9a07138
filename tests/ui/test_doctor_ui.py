"""`shotclock doctor ui`: which devices can be used, and what is missing for the others."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.ui import daemon
from tests.ui.pages import PAGES, serving
from tests.ui.scripted_phone import ADB_LIMIT_S, ScriptedPhone, adb_processes, private_adb

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

NONE = {"SHOTCLOCK_ADB": "/nonexistent/adb", "SHOTCLOCK_CHROMIUM": "/nonexistent/chromium"}
NO_SERVER = {"ADB_SERVER_SOCKET": "tcp:127.0.0.1:1"}


@pytest.fixture
def phone(tmp_path: Path) -> Iterator[ScriptedPhone]:
    phone = ScriptedPhone(tmp_path / "phone")
    try:
        yield phone
    finally:
        phone.close()


def checks(envelope: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in envelope["data"]["checks"]}


def connect(phone: ScriptedPhone, port: int) -> None:
    for words in (["-L", f"tcp:localhost:{port}", "start-server"], ["connect", phone.serial]):
        subprocess.run(["adb", *words], timeout=ADB_LIMIT_S, check=True, capture_output=True)


def test_a_phone_that_can_be_used_is_named(
    phone: ScriptedPhone, tmp_path: Path, shotclock: Any, validate_envelope: Any
) -> None:
    with private_adb(tmp_path / "adb") as port:
        connect(phone, port)
        ran = shotclock("doctor", "ui", env={**os.environ, "SHOTCLOCK_CHROMIUM": "/nonexistent/chromium"})
        envelope = validate_envelope(ran.json())
        assert ran.code == 0, envelope["error"]
        found = checks(envelope)
        assert found["adb"]["status"] == "ok" and found["adb_server"]["detail"].startswith("version 41 on")
        name = f"android:{phone.serial}"
        assert found[name] == {"name": name, "status": "ok", "detail": "Scripted One"}
        assert found["devices"] == {"name": "devices", "status": "ok", "detail": name}
        assert found["chromium"]["status"] == "warn" and "SHOTCLOCK_CHROMIUM" in found["chromium"]["detail"]
        assert {"name": name, "usable": True, "detail": "Scripted One"} in envelope["data"]["devices"]


def test_a_phone_that_was_not_allowed_is_a_warning_with_what_to_do(
    phone: ScriptedPhone, tmp_path: Path, shotclock: Any
) -> None:
    phone.greeting = "authorize"
    with private_adb(tmp_path / "adb") as port:
        connect(phone, port)
        found = checks(shotclock("doctor", "ui", env={**os.environ, "SHOTCLOCK_CHROMIUM": "/none"}).json())
        assert found[f"android:{phone.serial}"]["status"] == "warn"
        assert "allow USB debugging" in found[f"android:{phone.serial}"]["detail"]


def test_without_any_device_it_exits_4_and_says_what_to_install(shotclock: Any, validate_envelope: Any) -> None:
    ran = shotclock("doctor", "ui", env={**NONE, **NO_SERVER})
    envelope = validate_envelope(ran.json())
    assert ran.code == 4 and envelope["error"]["code"] == "MACHINE_UNFIT"
    found = checks(envelope)
    assert "apt install adb" in found["adb"]["detail"] and "apt install chromium" in found["chromium"]["detail"]
    assert found["devices"]["status"] == "fail"


def test_programs_that_hang_are_findings(shotclock: Any, tmp_path: Path) -> None:
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nsleep 60 & sleep 60\n")
    hanging.chmod(0o755)
    env = {"SHOTCLOCK_ADB": str(hanging), "SHOTCLOCK_CHROMIUM": str(hanging), **NO_SERVER}
    ran = shotclock("doctor", "ui", env=env)
    found = checks(ran.json())
    assert "no answer" in found["adb"]["detail"] and found["adb"]["status"] == "warn"
    assert "timed out" in found["chromium"]["detail"] and found["chromium"]["status"] == "warn"
    assert ran.json()["meta"]["survivors"] == []


def test_looking_leaves_no_server_of_adb(shotclock: Any, tmp_path: Path) -> None:
    with private_adb(tmp_path / "adb") as port:
        found = checks(shotclock("doctor", "ui", env={**os.environ, "SHOTCLOCK_CHROMIUM": "/none"}).json())
        assert found["adb_server"]["detail"].startswith("none on")
        assert found["android"]["status"] == "warn"
        assert adb_processes(port) == []


def test_a_terminal_gets_a_page(on_terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    env = {"TERM": "xterm", "COLUMNS": "100", **NONE, **NO_SERVER}
    seen = on_terminal("doctor", "ui", streams=("stdout", "stderr"), env=env)
    assert seen.code == 4 and "apt install adb" in seen.screen and "cannot catch" not in seen.screen


def test_what_makes_no_sense_is_refused(shotclock: Any) -> None:
    for words in (
        ("doctor", "everything"),
        ("doctor", "ui", "--sweep"),
        ("doctor", "ui", "--trace", "x"),
    ):
        ran = shotclock(*words)
        assert ran.code == 2 and ran.json()["error"]["code"] == "ARG_ERROR"


def test_what_listens_on_the_debugging_port_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as url:
        monkeypatch.setattr(daemon, "CDP_PORT", int(url.rpartition(":")[2]))
        status, detail = asyncio.run(daemon.check_cdp())
        assert status == "warn" and "no debugging port" in detail
        monkeypatch.setitem(PAGES, "/json/version", '{"Browser": "Chrome/150"}')
        status, detail = asyncio.run(daemon.check_cdp())
        assert status == "ok" and detail.startswith("Chrome/150: use it with --device cdp:")
