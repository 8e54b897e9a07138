"""`shotclock inbox`, by real processes: who asks is answered in time, who decides is asked once, nothing is lost."""

import asyncio
import json
import locale
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from jsonschema import Draft7Validator

from shotclock.calls.principal import Principal, Role
from shotclock.core.proposal import Decision, Kind, Policy, Proposal, ProposalRequest, ProposalStatus, ProposedFile
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store
from tests.warm import WarmStart, own_terminal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

# What a test waits for happens within a second; a machine on its knees exhausts this.
SOON_S = 20.0
ME = Principal.local()
AGENT = Principal("builder", Role.AGENT)
DESCRIPTOR = Draft7Validator(
    json.loads((Path(__file__).parents[1] / "spec" / "job-descriptor.derived.json").read_text("utf-8"))
)
INCOMPLETE = Draft7Validator(
    json.loads((Path(__file__).parent.parent / "spec" / "incomplete-data.derived.json").read_text("utf-8"))
)
T = TypeVar("T")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CI", "NO_COLOR", "VISUAL", "EDITOR", "SHOTCLOCK_RESPONSE_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("SUPERVISE_RESPONSE_TIMEOUT_SECONDS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    if locale.getencoding().upper() != "UTF-8":  # otherwise it would only keep programs from starting warm
        monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def inside(work: Callable[[Inbox], Coroutine[Any, Any, T]]) -> T:
    """What another process of this user would do with the inbox."""

    async def perform() -> T:
        with Store.open() as store:
            inbox = Inbox(store)
            try:
                return await asyncio.wait_for(work(inbox), SOON_S)
            finally:
                await inbox.close()

    return asyncio.run(perform())


def proposed(title: str = "Open port 443", *, by: Principal = AGENT, **more: Any) -> Proposal:
    policy = more.pop("policy", Policy())
    kind = Kind.FILE if "file" in more else Kind.OPERATION if "operation" in more else Kind.QUESTION
    return inside(lambda inbox: inbox.propose(ProposalRequest(kind, title, policy=policy, **more), by))


def operation(title: str = "Drop the table", **more: Any) -> Proposal:
    return proposed(title, operation="db/drop", arguments={"table": "users"}, **more)


def now(proposal: Proposal) -> Proposal:
    found = inside(lambda inbox: inbox.get(proposal.id))
    assert found is not None
    return found


def decide(proposal: Proposal, status: ProposalStatus = ProposalStatus.APPROVED, **more: Any) -> Proposal:
    return inside(lambda inbox: inbox.decide(proposal.id, Decision(status, **more), ME))


# --- a terminal ---------------------------------------------------------------------------------------------------


class Terminal:
    """`shotclock …` with a terminal of its own, as in a window: all three streams, and signals from its keys."""

    def __init__(self, *words: str, env: dict[str, str] | None = None, program: str | None = None) -> None:
        self._ours, theirs = pty.openpty()
        self.process = WarmStart(
            [sys.executable, *(["-m", "shotclock"] if program is None else ["-c", program]), *words],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=own_terminal,
            env={**os.environ, **(env or {})},
        )  # fmt: skip
        os.close(theirs)
        self.raw = ""

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", self.raw).replace("\r\n", "\n")

    def shows(self, text: str) -> None:
        give_up_at = time.monotonic() + SOON_S
        while text not in self.text:
            assert time.monotonic() < give_up_at, f"{text!r} never came: {self.raw!r}"
            assert self._read() or text in self.text, f"it ended without {text!r}: {self.raw!r}"

    def types(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def ends(self) -> int:
        give_up_at = time.monotonic() + SOON_S
        while self._read():
            assert time.monotonic() < give_up_at, f"still there: {self.raw!r}"
        return self.process.wait(SOON_S)

    def _read(self) -> bool:
        """Whether there may be more."""
        if select.select([self._ours], [], [], 0.05)[0]:
            try:
                self.raw += os.read(self._ours, 65536).decode(errors="replace")
            except OSError:  # how Linux says that nobody holds the other side any more
                return False
        return True

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(SOON_S)
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def run(*words: str, env: dict[str, str] | None = None, program: str | None = None) -> Terminal:
        opened.append(Terminal(*words, env=env, program=program))
        return opened[-1]

    yield run
    for each in opened:
        each.close()


def editor(folder: Path, script: str) -> dict[str, str]:
    """An editor that does this to the file it is given as $1."""
    (folder / "my editor").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "my editor").chmod(0o700)
    return {"EDITOR": f"'{folder / 'my editor'}'"}


def wait_for(condition: Callable[[], T], what: str) -> T:
    give_up_at = time.monotonic() + SOON_S
    while not (answer := condition()):
        assert time.monotonic() < give_up_at, f"waited in vain for {what}"
        time.sleep(0.02)
    return answer


def pending() -> list[Proposal]:
    async def work(inbox: Inbox) -> list[Proposal]:
        listed = await inbox.list(status=ProposalStatus.PENDING)
        return [whole for each in listed if (whole := await inbox.get(each.id))]

    return inside(work)


# --- asking -------------------------------------------------------------------------------------------------------


def test_what_nobody_answers_is_exit_14_stays_queued_and_the_identical_call_attaches_to_it(
    shotclock: Any, validate_envelope: Any
) -> None:
    words = ("inbox", "propose", "--title", "May I?", "--justification", "I must", "--wait", "200ms")
    first, second = shotclock(*words), shotclock(*words)
    envelope = validate_envelope(first.json())
    assert first.code == second.code == 14
    assert envelope["error"]["code"] == "INCOMPLETE"
    assert envelope["meta"]["budget_ms"] == 200
    data = envelope["data"]
    INCOMPLETE.validate(data)
    assert data["status"] == "pending"
    assert data["notes"] == "operator response timed out; proposal remains queued"
    assert data["continue_command"] == f"shotclock inbox check {data['proposal_id']}"
    assert second.json()["data"]["proposal_id"] == data["proposal_id"]
    [left] = pending()
    assert (left.id, left.asked_by, left.ask.justification) == (data["proposal_id"], ME.name, "I must")


def test_the_job_id_of_a_pending_proposal_is_known_to_the_job_commands(shotclock: Any, validate_envelope: Any) -> None:
    first, second = (
        shotclock("inbox", "propose", "--title", title, "--wait", "0").json()["data"] for title in ("One?", "Two?")
    )

    def job(verb: str, *words: str, code: int = 0) -> Any:
        ran = shotclock("job", verb, *words)
        assert ran.code == code, ran.stdout
        return validate_envelope(ran.json())

    shown = job("status", first["job_id"])["data"]
    DESCRIPTOR.validate(shown)
    assert (shown["status"], shown["terminal"], shown["proposal_id"]) == ("running", False, first["proposal_id"])
    waited = job("wait", first["job_id"], "--budget", "200ms", code=14)
    assert waited["error"]["code"] == "INCOMPLETE" and waited["data"]["proposal_id"] == first["proposal_id"]
    assert shotclock("inbox", "approve", first["proposal_id"]).code == 0
    assert job("wait", first["job_id"])["data"]["status"] == "approved"
    assert job("status", first["job_id"])["data"]["status"] == "complete"
    cancelled = job("cancel", second["job_id"])["data"]
    assert (cancelled["status"], cancelled["proposal_status"], cancelled["terminal"]) == (
        "cancelled",
        "withdrawn",
        True,
    )
    assert pending() == []
    assert job("status", "p-none", code=5)["error"]["code"] == "JOB_NOT_FOUND"


def test_a_late_approval_is_picked_up_by_the_identical_call_and_by_check(
    shotclock: Any, validate_envelope: Any, tmp_path: Path
) -> None:
    (tmp_path / "new").write_text("allow: [a, b]\n")
    (tmp_path / "old").write_text("allow: [a]\n")
    words = ["inbox", "propose", "--title", "Allow b", "--file", tmp_path / "new", "--current", tmp_path / "old"]
    id = shotclock(*words, "--wait", "0").json()["data"]["proposal_id"]
    assert shotclock("inbox", "approve", id, "--notes", "fine").code == 0
    for later in (words, ["inbox", "check", id]):
        ran = shotclock(*later)
        data = validate_envelope(ran.json())["data"]
        assert ran.code == 0
        assert (data["status"], data["proposal_id"], data["notes"]) == ("approved", id, "fine")
        assert data["file"] == {"path": str(tmp_path / "old"), "text": "allow: [a, b]\n"}
        assert data["decided_by"] == ME.name
    assert (tmp_path / "old").read_text() == "allow: [a]\n", "nothing is written by asking"


def test_a_decision_ends_the_wait_at_once(start: Any, validate_envelope: Any) -> None:
    running = start("inbox", "propose", "--title", "Which?", "--choice", "eu", "--choice", "us", "--wait", "5m")
    [proposal] = wait_for(pending, "the proposal")
    decide(proposal, answer="eu")
    assert running.ends(SOON_S) == 0
    data = validate_envelope(running.envelope())["data"]
    assert (data["status"], data["answer"]) == ("approved", "eu")


@pytest.mark.parametrize(
    ("end", "code", "exit_code"),
    [("rejected", "PROPOSAL_REJECTED", 7), ("expired", "PROPOSAL_EXPIRED", 6), ("withdrawn", "PROPOSAL_WITHDRAWN", 6)],
)
def test_whatever_is_no_yes_is_no_exit_0_and_says_what_it_was(
    end: str, code: str, exit_code: int, shotclock: Any, validate_envelope: Any
) -> None:
    if end == "expired":
        proposal = proposed(policy=Policy(ttl_ms=1))
    else:
        proposal = proposed()
        if end == "rejected":
            decide(proposal, ProposalStatus.REJECTED, notes="not on a Friday")
        else:
            assert shotclock("inbox", "withdraw", proposal.id).code == 7, "somebody else's"
            cancel = shotclock("inbox", "check", proposal.id, "--wait", "0").json()["data"]["cancel_command"]
            assert shotclock(*cancel.split()[1:]).code == 0
    ran = shotclock("inbox", "check", proposal.id)
    envelope = validate_envelope(ran.json())
    assert ran.code == exit_code
    assert envelope["error"]["code"] == code
    assert envelope["data"]["status"] == end
    if end == "rejected":
        assert envelope["data"]["notes"] == "not on a Friday"
        assert "not on a Friday" in envelope["error"]["message"]
    assert "file" not in envelope["data"] and "answer" not in envelope["data"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_waiting_and_not_the_proposal(number: int, start: Any, validate_envelope: Any) -> None:
    running = start("inbox", "propose", "--title", "May I?", "--wait", "5m")
    [proposal] = wait_for(pending, "the proposal")
    running.signal(number)
    assert running.ends() == 128 + number
    envelope = validate_envelope(running.envelope())
    assert envelope["error"]["code"] == "CANCELLED"
    assert "remains queued" in envelope["error"]["message"]
    assert envelope["data"]["proposal_id"] == proposal.id
    assert envelope["data"]["continue_command"].endswith(proposal.id)
    assert now(proposal).is_open


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SHOTCLOCK_RESPONSE_TIMEOUT", "-1s"),
        ("SUPERVISE_RESPONSE_TIMEOUT_SECONDS", "nan"),
        ("SHOTCLOCK_INBOX_LIMIT_EACH", "0"),
    ],
)
def test_nonsense_in_the_environment_is_refused_before_anything_is_proposed(
    name: str, value: str, shotclock: Any, validate_envelope: Any
) -> None:
    ran = shotclock("inbox", "propose", "--title", "May I?", "--wait", "0", env={name: value})
    envelope = validate_envelope(ran.json())
    assert ran.code == 2
    assert envelope["error"]["errors"][0]["field"] == name
    assert pending() == []


def test_an_inherited_deadline_is_never_outwaited(shotclock: Any, validate_envelope: Any) -> None:
    ran = shotclock("inbox", "propose", "--title", "A", "--wait", "5m", env={"SHOTCLOCK_REMAINING_MS": "3000"})
    assert validate_envelope(ran.json())["data"]["status"] == "pending"
    assert ran.code == 14
    assert ran.json()["meta"]["budget_ms"] < 3000


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["propose", "--current", "x"], {"title", "current"}),
        (["propose", "--title", "A", "--wait", "soon", "--ttl", "-1s", "--as", "a b"], {"wait", "ttl", "as"}),
        (
            ["propose", "--title", "A" * 201, "--justification", "j" * 30_000, "--wait", "0", "--remind", "48h"],
            {"title", "justification", "policy.remind_ms"},
        ),
        (["list", "--all", "--status", "pending", "--limit", "0"], {"status", "limit"}),
        (["extend"], {"proposal-id", "by"}),
        (["approve", "--titel", "x"], {"--titel", "proposal-id"}),
        (["aprove"], {"verb"}),
    ],
)
def test_every_mistake_is_told_and_nothing_is_proposed(
    words: list[str], fields: set[str], shotclock: Any, validate_envelope: Any
) -> None:
    ran = shotclock("inbox", *words)
    envelope = validate_envelope(ran.json())
    assert ran.code == 2
    assert {each["field"] for each in envelope["error"]["errors"]} == fields
    assert envelope["meta"]["ending"] == "not_started"


def test_propose_says_that_it_has_finished_and_what_it_did(shotclock: Any, validate_envelope: Any) -> None:
    envelope = validate_envelope(shotclock("inbox", "propose", "--title", "A", "--wait", "0").json())
    assert envelope["error"]["code"] == "INCOMPLETE" and envelope["meta"]["exit_code"] == 14
    assert (envelope["meta"]["ending"], envelope["meta"]["side_effects"]) == ("finished", "complete")


@pytest.mark.parametrize("id", ["x", "../../etc/passwd", "p-\x1b[31m" * 300])
def test_an_id_that_nobody_has_is_not_found(id: str, shotclock: Any, validate_envelope: Any) -> None:
    for verb in ("check", "approve") if id == "x" else ("show",):
        ran = shotclock("inbox", verb, id)
        assert validate_envelope(ran.json())["error"]["code"] == "PROPOSAL_NOT_FOUND"
        assert ran.code == 5


def test_a_file_that_cannot_be_proposed_is_refused_and_never_waited_for(
    shotclock: Any, validate_envelope: Any, tmp_path: Path
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large").write_bytes(b"x" * (1024 * 1024 + 1))
    os.mkfifo(tmp_path / "pipe")
    expected = {
        "missing": "FILE_NOT_FOUND",
        "binary": "ARG_ERROR",
        "large": "ARG_ERROR",
        "pipe": "FILE_UNREADABLE",
        ".": "FILE_UNREADABLE",
    }
    for name, code in expected.items():
        ran = shotclock("inbox", "propose", "--title", "A", "--file", tmp_path / name, "--wait", "0")
        assert validate_envelope(ran.json())["error"]["code"] == code, name
    assert pending() == []


# --- deciding -----------------------------------------------------------------------------------------------------


def test_a_question_is_answered_with_one_of_its_choices_or_with_yes(shotclock: Any, validate_envelope: Any) -> None:
    choice, free = proposed("Which?", choices=("eu", "us")), proposed("May I?")
    for words in ((), ("--answer", "asia")):
        ran = shotclock("inbox", "approve", choice.id, *words)
        assert (ran.code, validate_envelope(ran.json())["error"]["errors"][0]["field"]) == (2, "answer")
    assert shotclock("inbox", "approve", free.id).code == 0
    decision = now(free).decision
    assert decision is not None and decision.answer == "yes"
    ran = shotclock("inbox", "modify", free.id, "--file", "/dev/null")
    assert ran.code == 6, "it was decided"
    ran = shotclock("inbox", "modify", choice.id, "--file", "/dev/null")
    assert ran.code == 2 and "--answer" in ran.json()["error"]["message"]


def test_what_is_destructive_is_not_approved_without_a_person(shotclock: Any, validate_envelope: Any) -> None:
    proposal = operation(policy=Policy(destructive=True))
    for words in (["approve"], ["modify", "--file", "/dev/stdin"], ["approve", "--answer", "db/drop"]):
        ran = shotclock("inbox", words[0], proposal.id, *words[1:], input=b"db/drop\n")
        assert ran.code in (2, 4, 7)
    ran = shotclock("inbox", "approve", proposal.id, input=b"db/drop\n")
    assert (ran.code, validate_envelope(ran.json())["error"]["code"]) == (4, "PERSON_REQUIRED")
    assert now(proposal).is_open
    assert shotclock("inbox", "reject", proposal.id).code == 0, "no is always free"


def test_what_is_destructive_is_approved_by_typing_its_name(terminal: Any) -> None:
    proposal = operation(policy=Policy(destructive=True), justification="nobody needs it")
    wrong = terminal("inbox", "approve", proposal.id)
    wrong.shows("Type 'db/drop' to continue:")
    assert "nobody needs it" in wrong.text and 'table: "users"' in wrong.text
    wrong.types("yes\n")
    assert wrong.ends() == 4
    assert "'yes' is not 'db/drop'; nothing was done" in wrong.text and "type 'db/drop'" in wrong.text
    assert "ask a person" not in wrong.text
    assert now(proposal).is_open
    right = terminal("inbox", "approve", proposal.id)
    right.shows("to continue:")
    right.types("db/drop\n")
    assert right.ends() == 0, right.text
    assert now(proposal).status is ProposalStatus.APPROVED


def test_a_person_who_takes_their_time_does_not_use_up_the_time_of_the_decision(terminal: Any) -> None:
    proposal = operation(policy=Policy(destructive=True))
    program = "import shotclock.apps.cli_inbox as i, shotclock.main as c; i.TIMEOUT_MS = 2_000; c.run_program()"
    asked = terminal("inbox", "approve", proposal.id, program=program)
    asked.shows("to continue:")
    time.sleep(2.1)  # the person
    asked.types("db/drop\n")
    assert asked.ends() == 0, asked.text


def test_ctrl_c_at_the_question_decides_nothing(terminal: Any) -> None:
    proposal = operation(policy=Policy(destructive=True))
    asked = terminal("inbox", "approve", proposal.id)
    asked.shows("to continue:")
    asked.types("\x03")
    assert asked.ends() == 130
    assert "Traceback" not in asked.text
    assert now(proposal).is_open


def test_below_the_mark_of_a_coding_agent_nothing_is_decided(shotclock: Any, validate_envelope: Any) -> None:
    proposal = proposed()
    program = shlex.join([sys.executable, "-m", "shotclock"])
    ways = {
        "CLAUDECODE": "exec",  # as an agent starts it
        "GEMINI_CLI": "env -u GEMINI_CLI",  # the shell above it has the mark
        "COPILOT_CLI": "env -i HOME=$HOME SHOTCLOCK_HOME=$SHOTCLOCK_HOME setsid -w sh -c 'exec \"$@\"' sh",
    }
    for mark, how in ways.items():
        for verb in ("approve", "reject", "modify"):
            more = "--file /dev/null " if verb == "modify" else ""
            script = f"{how} {program} inbox {verb} {proposal.id} {more}--json; exit $?"
            ran = subprocess.run(
                ["sh", "-c", script], env={**os.environ, mark: "1"}, capture_output=True, timeout=SOON_S, text=True
            )
            error = validate_envelope(json.loads(ran.stdout))["error"]
            assert (ran.returncode, error["code"]) == (7, "NOT_ALLOWED"), (mark, verb, ran)
            assert mark in error["message"] and "inbox serve" in error["suggestion"]
    assert now(proposal).is_open
    assert shotclock("inbox", "approve", proposal.id).code == 0, "a terminal of the person's own decides"


# --- modifying ----------------------------------------------------------------------------------------------------


def a_file(**more: Any) -> Proposal:
    file = ProposedFile("/etc/egress.yaml", "allow: [a, b]\n", "allow: [a]\n")
    return proposed("Allow b", file=file, **more)


def test_without_a_terminal_a_modification_comes_from_a_file(
    shotclock: Any, validate_envelope: Any, tmp_path: Path
) -> None:
    proposal = a_file()
    ran = shotclock("inbox", "modify", proposal.id, env={"EDITOR": "touch /tmp/never"})
    assert (ran.code, validate_envelope(ran.json())["error"]["code"]) == (4, "INPUT_REQUIRED")
    (tmp_path / "same").write_text("allow: [a, b]\n")
    ran = shotclock("inbox", "modify", proposal.id, "--file", tmp_path / "same")
    assert ran.code == 2 and "approve" in ran.json()["error"]["message"]
    (tmp_path / "other").write_text("allow: [a, c]\n")
    ran = shotclock("inbox", "modify", proposal.id, "--file", tmp_path / "other", "--notes", "c, not b")
    assert ran.code == 0, ran.stdout
    ran = shotclock("inbox", "check", proposal.id)
    data = validate_envelope(ran.json())["data"]
    assert ran.code == 0
    assert (data["status"], data["notes"]) == ("modified", "c, not b")
    assert data["file"] == {"path": "/etc/egress.yaml", "text": "allow: [a, c]\n"}


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("{", "not JSON"),
        ("[1]", "JSON object"),
        ('{"table": NaN}', "not JSON"),
        ('{"table": 5}', "arguments.table"),
        ("[" * 100_000, "not JSON"),
        ('{"table": "users"}', "the text is unchanged"),
    ],
)
def test_arguments_are_looked_over_before_they_are_approved(
    written: str, told: str, shotclock: Any, validate_envelope: Any, tmp_path: Path
) -> None:
    schema = {"properties": {"table": {"type": "string"}}, "required": ["table"]}
    proposal = operation(input_schema=schema)
    (tmp_path / "written").write_text(written)
    ran = shotclock("inbox", "modify", proposal.id, "--file", tmp_path / "written")
    assert ran.code == 2
    assert told in validate_envelope(ran.json())["error"]["message"]
    assert now(proposal).is_open


def test_the_editor_gets_the_text_and_what_it_writes_is_approved(terminal: Any, tmp_path: Path, home: Path) -> None:
    proposal = a_file()
    env = editor(
        tmp_path, 'cp "$1" seen; case "$1" in *.yaml) sed -i s/b/z/ "$1";; esac'.replace("seen", f"{tmp_path}/seen")
    )
    ran = terminal("inbox", "modify", proposal.id, env=env)
    assert ran.ends() == 0, ran.text
    assert (tmp_path / "seen").read_text() == "allow: [a, b]\n"
    assert now(proposal).file_text == "allow: [a, z]\n"
    assert list((home / "edits").iterdir()) == [], "the copy is gone"


def test_a_mistake_in_the_editor_is_told_and_the_edit_is_there_again(terminal: Any, tmp_path: Path) -> None:
    proposal = operation()
    # The first time it breaks the JSON, the second time it mends it: what was written before must be there.
    mend = """printf '{"table": "%s"}' "$(grep -o kept "$1")" > "$1" """
    script = f"""if grep -q BROKEN "$1"; then {mend}; else echo 'BROKEN kept' > "$1"; fi"""
    ran = terminal("inbox", "modify", proposal.id, env=editor(tmp_path, script))
    ran.shows("this is not JSON")
    ran.shows("Enter opens the editor again")
    ran.types("\n")
    assert ran.ends() == 0, ran.text
    assert now(proposal).arguments == {"table": "kept"}


def test_leaving_after_a_mistake_keeps_what_was_written_and_names_it(terminal: Any, tmp_path: Path, home: Path) -> None:
    proposal = operation()
    ran = terminal("inbox", "modify", proposal.id, env=editor(tmp_path, 'echo "{half" > "$1"'))
    ran.shows("Enter opens")
    ran.types("q\n")
    assert ran.ends() == 2
    [copy] = (home / "edits").iterdir()
    assert copy.read_text() == "{half\n"
    assert str(copy) in ran.text.replace("\n", "")
    assert copy.stat().st_mode & 0o777 == 0o600
    assert now(proposal).is_open


def test_who_decides_while_another_edits_wins_and_the_edit_is_kept(terminal: Any, tmp_path: Path, home: Path) -> None:
    proposal = a_file()
    script = f'echo mine > "$1"; touch {tmp_path}/open; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done'
    ran = terminal("inbox", "modify", proposal.id, env=editor(tmp_path, script))
    wait_for((tmp_path / "open").exists, "the editor")
    decide(proposal, ProposalStatus.REJECTED)
    (tmp_path / "go").touch()
    assert ran.ends() == 6
    assert "ALREADY_DECIDED" in ran.text
    late = terminal("inbox", "approve", proposal.id)
    assert late.ends() == 6 and f"was rejected by {ME.name}" in late.text
    assert "the first decision counts" in late.text and "error.context" not in late.text
    [copy] = (home / "edits").iterdir()
    assert copy.read_text() == "mine\n"
    assert str(copy) in ran.text.replace("\n", "")


@pytest.mark.parametrize(
    ("script", "code", "told"),
    [
        ("exit 3", 1, "exit code 3"),
        ("true", 2, "the text is unchanged"),
        ("printf '\\377' > \"$1\"; kill -INT $$", 1, "SIGINT"),
    ],
)
def test_an_editor_that_does_not_end_well_or_changes_nothing_decides_nothing(
    script: str, code: int, told: str, terminal: Any, tmp_path: Path
) -> None:
    proposal = a_file()
    ran = terminal("inbox", "modify", proposal.id, env=editor(tmp_path, script))
    assert ran.ends() == code, ran.text
    assert told in ran.text
    assert now(proposal).is_open


def test_an_editor_that_is_not_there_is_named(terminal: Any) -> None:
    proposal = a_file()
    ran = terminal("inbox", "modify", proposal.id, env={"VISUAL": "no-such-editor --wait"})
    assert ran.ends() == 5
    assert "'no-such-editor'" in ran.text
    assert now(proposal).is_open


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_editor_is_stopped_when_we_are(number: int, terminal: Any, tmp_path: Path, no_survivors: Any) -> None:
    proposal = a_file()
    script = f"trap '' HUP; echo $$ > {tmp_path}/pid; exec sleep 600"
    ran = terminal("inbox", "modify", proposal.id, env=editor(tmp_path, script))
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), "the editor")
    ran.process.send_signal(number)
    assert ran.ends() == (-9 if number == signal.SIGKILL else 143)
    wait_for(lambda: no_survivors.alive() == [], "the editor to be gone")
    assert now(proposal).is_open


def test_the_editor_is_stopped_when_the_proposal_expires(terminal: Any, tmp_path: Path, home: Path) -> None:
    proposal = a_file(policy=Policy(ttl_ms=4_000))
    ran = terminal("inbox", "modify", proposal.id, env=editor(tmp_path, 'echo half > "$1"; exec sleep 600'))
    assert ran.ends() == 6, ran.text
    assert "PROPOSAL_EXPIRED" in ran.text
    [copy] = (home / "edits").iterdir()
    assert copy.read_text() == "half\n"


def test_the_editor_has_the_terminal_and_ctrl_c_is_its_own(terminal: Any, tmp_path: Path) -> None:
    proposal = a_file()
    script = (
        """trap 'echo interrupted > "$1"' INT; test -t 0 && echo ready > /dev/tty; read line; echo "$line" >> "$1" """
    )
    ran = terminal("inbox", "modify", proposal.id, env=editor(tmp_path, script))
    ran.shows("ready")
    ran.types("\x03")
    ran.types("typed\n")
    assert ran.ends() == 0, ran.text
    assert "interrupted" in (now(proposal).file_text or "")


# --- looking ------------------------------------------------------------------------------------------------------


def test_a_list_off_a_terminal_is_an_envelope_and_says_when_there_are_more(
    shotclock: Any, validate_envelope: Any
) -> None:
    made = [proposed(f"number {count}") for count in range(3)]
    decide(made[0], ProposalStatus.REJECTED)
    data = validate_envelope(shotclock("inbox", "list").json())["data"]
    assert [each["id"] for each in data["proposals"]] == [made[2].id, made[1].id]
    assert data["more"] is False
    data = validate_envelope(shotclock("inbox", "list", "--all", "--limit", "2").json())["data"]
    assert [each["id"] for each in data["proposals"]] == [made[0].id, made[2].id]
    assert data["more"] is True
    data = validate_envelope(shotclock("inbox", "list", "--status", "rejected").json())["data"]
    assert [each["status"] for each in data["proposals"]] == ["rejected"]


def test_a_list_on_a_terminal_is_a_table(terminal: Any) -> None:
    assert "no proposal waits" in (empty := terminal("inbox", "list"), empty.ends())[0].text
    proposal = a_file(policy=Policy(ttl_ms=7_200_000, destructive=True))
    ran = terminal("inbox", "list")
    assert ran.ends() == 0
    [line] = [line for line in ran.text.splitlines() if proposal.id in line]
    for part in ("destructive Allow b", "file", "builder", "1h59m"):
        assert part in line
    assert '{"ok"' not in ran.text


def test_a_long_title_gives_way_to_the_id_that_is_to_be_typed(terminal: Any) -> None:
    proposal = proposed("word " * 39)
    for columns in ("100", "40"):
        ran = terminal("inbox", "list", env={"COLUMNS": columns})
        assert ran.ends() == 0
        assert re.search(rf"^{proposal.id}  word word.*…  .*23h59m", ran.text, re.MULTILINE), ran.text


def test_one_is_shown_with_its_reason_its_difference_in_colour_and_its_history(
    terminal: Any, shotclock: Any, validate_envelope: Any
) -> None:
    proposal = a_file(justification="the build\nneeds it")
    assert shotclock("inbox", "extend", proposal.id, "1h").code == 0
    ran = terminal("inbox", "show", proposal.id)
    assert ran.ends() == 0
    assert "  the build\n  needs it\n" in ran.text
    assert "\x1b[31m-allow: [a]" in ran.raw
    assert "\x1b[32m+allow: [a, b]" in ran.raw
    assert re.search(r"proposed +builder", ran.text) and re.search(rf"extended +{ME.name}", ran.text)
    data = validate_envelope(shotclock("inbox", "show", proposal.id).json())["data"]
    assert data["diff"].splitlines()[-2:] == ["-allow: [a]", "+allow: [a, b]"]
    assert [entry["action"] for entry in data["history"]] == ["proposed", "extended"]
    assert data["_trusted"] is False
    decide(proposal)
    ran = terminal("inbox", "show", proposal.id)
    assert ran.ends() == 0 and "the file itself is read only while a proposal waits" in ran.text


def test_without_a_claim_nothing_is_contradicted_and_the_whole_text_is_shown(
    terminal: Any, shotclock: Any, tmp_path: Path
) -> None:
    new = tmp_path / "new.yaml"
    new.write_text("allow: [a, b]\n")
    words = ["inbox", "propose", "--title", "Allow b", "--file", new, "--wait", "0"]
    ran = terminal("inbox", "show", shotclock(*words).json()["data"]["proposal_id"])
    assert ran.ends() == 0 and "the file already holds this text: all lines are shown as new" in ran.text
    assert "+allow: [a, b]" in ran.text and "claims" not in ran.text and "nothing would change" not in ran.text
    new.write_text("allow: [a]\n")
    ran = terminal("inbox", "show", pending()[0].id)
    assert ran.ends() == 0 and "-allow: [a]\n+allow: [a, b]" in ran.text and "claims" not in ran.text


def test_a_line_without_end_does_not_fill_the_terminal(terminal: Any) -> None:
    proposal = proposed("One line", file=ProposedFile("/x", "y" * 500_000))
    ran = terminal("inbox", "show", proposal.id)
    ran.ends()
    assert len(ran.raw) < 10_000 and "more characters" in ran.text


EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b1m\u202e[bold]x[/bold]\r\b"


def test_no_escape_sequence_of_a_proposal_reaches_the_terminal(terminal: Any) -> None:
    file = ProposedFile(f"/x{EVIL}", f"{EVIL}\n", f"{EVIL}{EVIL}\n")
    by = Principal(f"agent{EVIL}", Role.AGENT)
    made = [
        proposed(f"title {EVIL}", by=by, justification=f"why {EVIL}\n{EVIL}", file=file),
        proposed(f"op {EVIL}", by=by, operation=f"do {EVIL}", arguments={EVIL: EVIL}, policy=Policy(deciders=(EVIL,))),
        proposed(f"question {EVIL}", by=by, choices=(EVIL, "b")),
    ]
    decide(made[2], answer=EVIL, notes=EVIL)
    views = [["show", each.id] for each in made]
    views += [["list", "--all"], ["audit"], ["approve", made[1].id], ["watch", "--for", "1s"]]
    views += [["check", made[0].id, "--wait", "0"], ["withdraw", made[0].id], ["approve", made[2].id]]
    for words in views:
        ran = terminal("inbox", *words)
        ran.ends()
        kept = re.sub(r"\x1b\[[0-9;]*m", "", ran.raw)  # our own colours
        assert not re.search("[\x00-\x06\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e]", kept), (words, ran.raw)
        assert "\x1b[2J" not in ran.raw and "\x1b]0" not in ran.raw, words
        assert "<U+001B>]0;owned" in ran.text or words[0] == "approve", (words, ran.text)


# --- watching -----------------------------------------------------------------------------------------------------


def lines_of(output: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def test_watching_tells_what_waits_every_change_and_every_reminder(start: Any, validate_envelope: Any) -> None:
    old = proposed("old")
    running = start("inbox", "watch")
    wait_for(lambda: old.id.encode() in running.stdout, "what waits")
    new = proposed("new", policy=Policy(ttl_ms=60_000, remind_ms=59_900))
    wait_for(lambda: b'"type":"reminder"' in running.stdout, "the reminder")
    decide(old, answer="yes")
    wait_for(lambda: b'"status":"approved"' in running.stdout, "the decision")
    running.signal(signal.SIGINT)
    assert running.ends() == 130
    *events, envelope = lines_of(running.stdout)
    told = [(event["type"], event["proposal"]["id"], event["proposal"]["status"]) for event in events]
    assert told[0] == ("proposal", old.id, "pending")
    assert told[-1] == ("proposal", old.id, "approved")
    assert ("reminder", new.id, "pending") in told
    assert len(told) == len(set(told)) == envelope["data"]["changes"], "nothing twice"
    assert validate_envelope(envelope)["error"]["code"] == "CANCELLED"


def test_watching_for_a_time_ends_by_itself(shotclock: Any, validate_envelope: Any) -> None:
    ran = shotclock("inbox", "watch", "--for", "200ms")
    assert ran.code == 0
    assert validate_envelope(ran.json())["data"] == {"changes": 0}


def test_watching_on_a_terminal_rings_for_what_is_new(terminal: Any) -> None:
    ran = terminal("inbox", "watch")
    ran.shows("watching; Ctrl-C ends it")
    proposed("look here")
    ran.shows("look here")
    ran.shows("\a")
    ran.types("\x03")
    assert ran.ends() == 130
    assert "CANCELLED" not in ran.text and "Traceback" not in ran.text


def test_watching_ends_when_nobody_reads(start: Any) -> None:
    proposed()
    reading, writing = os.pipe()
    running = start("inbox", "watch", stdout=writing)
    os.close(writing)
    assert select.select([reading], [], [], SOON_S)[0]
    os.close(reading)
    proposed("another")
    assert running.ends(SOON_S) == 0
    with open("/dev/full", "wb") as full:
        assert start("inbox", "watch", stdout=full).ends(SOON_S) == 7, "a full disk is no reader who left"


# --- the audit trail ----------------------------------------------------------------------------------------------


def test_a_whole_trail_is_said_to_be_whole_and_a_changed_one_is_named(
    shotclock: Any, validate_envelope: Any, terminal: Any, home: Path
) -> None:
    proposal = proposed()
    decide(proposal, ProposalStatus.REJECTED)
    ran = shotclock("inbox", "audit", "--verify")
    assert (ran.code, validate_envelope(ran.json())["data"]) == (0, {"whole": True, "problems": []})
    entries = validate_envelope(shotclock("inbox", "audit").json())["data"]["entries"]
    assert [entry["action"] for entry in entries] == ["proposed", "rejected"]
    assert validate_envelope(shotclock("inbox", "audit", proposal.id).json())["data"]["entries"] == entries
    assert [entry["seq"] for entry in shotclock("inbox", "audit", "--limit", "1").json()["data"]["entries"]] == [2]
    trail = home / "audit.jsonl"
    trail.write_bytes(trail.read_bytes().replace(b'"rejected"', b'"approved"'))
    ran = shotclock("inbox", "audit", "--verify")
    envelope = validate_envelope(ran.json())
    assert (ran.code, envelope["error"]["code"]) == (1, "AUDIT_BROKEN")
    assert envelope["data"]["whole"] is False
    assert [(problem["seq"], problem["line"]) for problem in envelope["data"]["problems"]] == [(2, 2)]
    seen = terminal("inbox", "audit", "--verify")
    assert seen.ends() == 1
    assert "✗ entry 2 (line 2) was changed" in seen.text


# --- help ---------------------------------------------------------------------------------------------------------


def test_help_names_every_verb(shotclock: Any) -> None:
    from shotclock.apps.cli_inbox import COMMANDS

    ran = shotclock("inbox", "--help")
    assert (ran.code, ran.stderr) == (0, b"")
    for verb in COMMANDS["inbox"].names:
        assert f"\n  {verb} ".encode() in ran.stdout
    assert shotclock("help", "inbox").stdout == ran.stdout
    assert b"Usage: shotclock inbox propose --title TEXT" in shotclock("inbox", "propose", "--help").stdout
