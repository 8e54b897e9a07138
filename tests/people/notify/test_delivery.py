"""Messages on real servers: what arrives, and that no server and no command takes longer than five seconds."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.validation import Part, field
from shotclock.people.notify.delivery import LIMIT_MS, deliver
from shotclock.people.notify.entries import UserEntries
from tests.certificates import certificate
from tests.people.notify.servers import mail_server, web_server

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

EVENT = {
    "event": "failed", "title": "nightly failed", "run_id": "r1", "name": "nightly",
    "text": "nightly failed\n1 of 2 steps: <!channel> & größer", "link": "http://127.0.0.1:8766/#/p-1",
}  # fmt: skip
# The limit, and what starting some processes takes on a busy machine.
AT_MOST_S = LIMIT_MS / 1000 + 2.0


class File(Part):
    notify: UserEntries = field(default=[])


def send(*channels: dict[str, Any], folder: Path | None = None, **variables: str) -> list[str]:
    entries = File.model_validate({"notify": [{"on": ["failed"], **each} for each in channels]}).notify
    environment = {**os.environ, **variables}
    unsent = asyncio.run(deliver(entries, EVENT, environment, None if folder is None else str(folder)))
    return [f"{each.channel}: {each.reason}" for each in unsent]


def test_a_webhook_gets_the_event_with_headers_from_variables() -> None:
    with web_server() as taken:
        headers = {"Authorization": "Bearer ${HOOK_TOKEN}", "X-Plain": "yes"}
        assert send({"webhook": f"{taken.url}/a?b=c", "headers": headers}, HOOK_TOKEN="opensesame") == []
        [request] = taken.items
    assert request.path == "/a?b=c"
    assert json.loads(request.body) == EVENT
    assert request.headers["Content-Type"] == "application/json"
    assert (request.headers["Authorization"], request.headers["X-Plain"]) == ("Bearer opensesame", "yes")


def test_slack_gets_a_text_that_calls_nobody() -> None:
    with web_server() as taken:
        assert send({"slack": "${SLACK_URL}"}, SLACK_URL=f"{taken.url}/services/x") == []
        [request] = taken.items
    text = json.loads(request.body)["text"]
    assert text.splitlines()[1:] == ["1 of 2 steps: &lt;!channel&gt; &amp; größer", EVENT["link"]]


def test_ntfy_gets_the_text_with_a_title_and_a_link() -> None:
    with web_server() as taken:
        assert send({"ntfy": f"{taken.url}/topic"}) == []
        [request] = taken.items
    assert request.body == EVENT["text"]
    assert (request.headers["Title"], request.headers["Click"]) == (EVENT["title"], EVENT["link"])
    assert request.headers["Priority"] == "high"


def test_a_command_gets_the_event_on_stdin_and_in_variables_but_no_secrets(tmp_path: Path) -> None:
    script = 'cat > event; echo "$SHOTCLOCK_EVENT $SHOTCLOCK_RUN_ID $OWN [$OTHER_TOKEN]" > variables'
    command = {"command": ["sh", "-c", script], "env": {"OWN": "${MY_TOKEN}"}}
    assert send(command, folder=tmp_path, MY_TOKEN="mine-it-is", OTHER_TOKEN="not-for-it") == []
    assert json.loads((tmp_path / "event").read_text()) == EVENT
    assert (tmp_path / "variables").read_text().split() == ["failed", "r1", "mine-it-is", "[]"]


def test_a_mail_is_sent_encrypted_and_with_a_login(tmp_path: Path) -> None:
    certificate(tmp_path, "server", certificate(tmp_path, "authority", None))
    login = {"user": "me", "password": "${MAIL_WORD}"}
    with mail_server(tmp_path / "server.pem") as taken:
        smtp = {"host": "localhost", "port": taken.port, "from": "Shotclock <a@b.c>", "to": ["d@e.f", "g@h.i"], **login}
        assert send({"smtp": smtp}, MAIL_WORD="opensesame", SSL_CERT_FILE=str(tmp_path / "authority.pem")) == []
        [mail] = taken.items
        untrusted = send({"smtp": smtp}, MAIL_WORD="opensesame")
    assert (mail.to, mail.login, mail.is_encrypted) == (["d@e.f", "g@h.i"], "\0me\0opensesame", True)
    assert "Subject: nightly failed" in mail.text
    assert len(untrusted) == 1 and "certificate" in untrusted[0]


def test_a_refusal_is_reported_with_its_channel_and_without_secrets() -> None:
    with web_server() as web, mail_server() as mail:
        web.status, mail.status = 503, 550
        smtp = {"host": "127.0.0.1", "port": mail.port, "from": "a@b.c", "to": "d@e.f", "starttls": False}
        script = "echo first >&2; echo the word is $WORD >&2; exit 4"
        found = send(
            {"webhook": f"{web.url}/opensesame"},
            {"smtp": smtp},
            {"command": ["sh", "-c", script], "env": {"WORD": "${MY_WORD}"}},
            {"command": ["/nowhere/at-all"]},
            {"slack": "${NOT_SET}"},
            {"ntfy": "${MY_WORD}"},
            MY_WORD="opensesame",
        )
    assert not any("opensesame" in each for each in found)
    expected = (
        (f"webhook 127.0.0.1:{web.port}: ", "answered 503"),
        (f"smtp 127.0.0.1:{mail.port}: ", "refused d@e.f"),
        ("command sh: ", "ended with exit code 4: the word is ***"),
        ("command /nowhere/at-all: ", "was not found"),
        ("slack (address in a variable): ", "the variable NOT_SET is not set"),
        ("ntfy (address in a variable): ", ""),
    )
    for each, (label, reason) in zip(found, expected, strict=True):
        assert each.startswith(label) and reason in each, (each, label, reason)


def test_slow_servers_and_commands_are_left_after_five_seconds_all_at_once() -> None:
    with web_server() as web, mail_server() as mail:
        web.drips = mail.drips = True
        smtp = {"host": "127.0.0.1", "port": mail.port, "from": "a@b.c", "to": "d@e.f"}
        stubborn = "trap '' TERM; setsid sleep 60 & while true; do sleep 1; done"
        began = time.monotonic()
        found = send({"webhook": web.url}, {"smtp": smtp}, {"command": ["sh", "-c", stubborn]}, {"slack": web.url})
        elapsed_s = time.monotonic() - began
    assert [each.partition(": ")[2] for each in found] == ["did not end within 5s"] * 4
    assert elapsed_s < AT_MOST_S


def test_the_deadline_of_the_caller_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_REMAINING_MS", "1500")
    began = time.monotonic()
    [found] = send({"command": ["sleep", "60"]})
    assert time.monotonic() - began < LIMIT_MS / 1000 - 1
    assert "did not end within" in found and "5s" not in found.partition("within ")[2][:2]


def test_a_name_that_is_not_ascii_is_a_valid_header() -> None:
    with web_server() as taken:
        entries = File.model_validate({"notify": [{"on": ["failed"], "ntfy": taken.url}]}).notify
        assert asyncio.run(deliver(entries, {**EVENT, "title": "nächtlich failed"}, os.environ)) == []
        assert taken.items[0].headers["Title"].startswith("=?utf-8?")
