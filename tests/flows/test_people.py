"""Runs that need a person: they wait for a while, are parked in the store, and go on with what was decided."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from shotclock.apps._inbox_drawing import draw_inbox
from shotclock.calls.principal import Principal
from shotclock.core.proposal import Decision, Proposal, ProposalStatus
from shotclock.people.inbox import Inbox
from shotclock.people.person_wait import outcome_of, run_of
from shotclock.people.proposal_json import summary
from shotclock.store.store import Store
from shotclock.terminal.drawing import draw

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

WITHIN_S = 30.0
INCOMPLETE = json.loads((Path(__file__).parents[1] / "spec" / "incomplete-data.derived.json").read_text("utf-8"))
YES = Decision(ProposalStatus.APPROVED, "fine")
NO = Decision(ProposalStatus.REJECTED, "not today")


class Runs:
    """`shotclock run` off a terminal, in a folder and with a store of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SHOTCLOCK_HOME": str(folder / "home"), "SHOTCLOCK_RESPONSE_TIMEOUT": "500ms"}

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "shotclock", "run", *words],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def __call__(self, *words: str, code: int) -> Any:
        process = self.start(*words)
        out, _ = process.communicate(timeout=WITHIN_S)
        envelope = json.loads(out)
        assert process.returncode == code, envelope
        return envelope

    def flow(self, text: str, name: str = "flow.yaml") -> str:
        (self.folder / name).write_text(text)
        return name

    def done(self) -> list[str]:
        file = self.folder / "done"
        return file.read_text().split() if file.exists() else []

    def decide(self, decision: Decision | Callable[[Proposal], Decision]) -> Proposal:
        """The one question that is open, once there is one."""

        async def work() -> Proposal:
            with Store.open(self.folder / "home") as store:
                inbox = Inbox(store)
                give_up_at = time.monotonic() + WITHIN_S
                while not (found := await inbox.list(status=ProposalStatus.PENDING)):
                    assert time.monotonic() < give_up_at, "nobody asks anything"
                    await asyncio.sleep(0.02)
                [listed] = found
                proposal = await inbox.get(listed.id)
                assert proposal is not None
                said = decision(proposal) if callable(decision) else decision
                decided = await inbox.decide(proposal.id, said, Principal.local())
                await inbox.close()
                return decided

        return asyncio.run(asyncio.wait_for(work(), WITHIN_S))


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


QUESTION = """
steps:
  before: {exec: echo before >> done}
  ask: {type: human-input, prompt: Which way?, depends_on: before}
  after: {exec: 'echo {{ outputs.ask }} >> done', depends_on: ask}
  beside: {exec: sleep 1; echo beside >> done}
"""


def test_a_run_that_only_waits_for_a_person_is_parked_and_goes_on_later(runs: Runs, validate_envelope: Any) -> None:
    parked = validate_envelope(runs(runs.flow(QUESTION), "--run-id", "r1", code=14))
    jsonschema.validate(parked["data"], INCOMPLETE)
    statuses = {name: step["status"] for name, step in parked["data"]["steps"].items()}
    # The caller waits for what works, however small its budget for people is.
    assert statuses == {"before": "succeeded", "ask": "pending", "after": "pending", "beside": "succeeded"}
    assert parked["data"]["continue_command"] == "shotclock run --resume r1"
    assert [waits["title"] for waits in parked["data"]["waiting"]] == ["Which way?"]

    still = runs("--resume", "r1", code=14)
    assert still["data"]["waiting"][0]["proposal_id"] == parked["data"]["waiting"][0]["proposal_id"]
    runs.decide(Decision(ProposalStatus.APPROVED, answer="west"))
    ended = validate_envelope(runs("--resume", "r1", code=0))
    assert ended["data"]["steps"]["ask"]["output"] == "west"
    assert sorted(runs.done()) == ["before", "beside", "west"]


def test_what_is_answered_within_the_budget_needs_no_parking(runs: Runs) -> None:
    runs.env["SHOTCLOCK_RESPONSE_TIMEOUT"] = "25s"
    process = runs.start(runs.flow(QUESTION))
    runs.decide(Decision(ProposalStatus.APPROVED, answer="east"))
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0 and "east" in runs.done()


def test_a_killed_run_finds_its_question_again(runs: Runs) -> None:
    runs.env["SHOTCLOCK_RESPONSE_TIMEOUT"] = "25s"
    process = runs.start(runs.flow(QUESTION), "--run-id", "r1")
    asked = runs.decide(lambda _: Decision(ProposalStatus.APPROVED, answer="west")).id
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=WITHIN_S)
    # Whether it had heard the answer or not: it counts, and nobody is asked twice.
    runs.env["SHOTCLOCK_RESPONSE_TIMEOUT"] = "5s"
    resumed = runs.start("--resume", "r1")
    out, _ = resumed.communicate(timeout=WITHIN_S)
    envelope = json.loads(out)
    if envelope["data"]["steps"]["beside"]["status"] != "interrupted":
        assert resumed.returncode == 0, envelope
    assert envelope["data"]["steps"]["ask"]["output"] == "west"
    with Store.open(runs.folder / "home") as store:
        assert [proposal.id for proposal in store.proposals.list()] == [asked]


def test_a_run_inside_another_is_parked_with_it(runs: Runs) -> None:
    runs.flow(QUESTION, "inner.yaml")
    outer = """
steps:
  first: {exec: echo first >> done}
  inside: {type: workflow, workflow: inner.yaml, depends_on: first}
  last: {exec: echo last >> done, depends_on: inside}
"""
    parked = runs(runs.flow(outer), "--run-id", "r1", code=14)
    assert parked["data"]["steps"]["inside"]["status"] == "pending"
    runs.decide(Decision(ProposalStatus.APPROVED, answer="west"))
    assert runs("--resume", "r1", code=0)["data"]["steps"]["last"]["status"] == "succeeded"
    assert sorted(runs.done()) == ["before", "beside", "first", "last", "west"]


GATED = """
steps:
  build: {exec: echo build >> done}
  ship:
    exec: 'echo ship {{ outputs.build }}$EXTRA >> done'
    depends_on: build
    description: Ship it
    approval: {ttl: 1h}
  tell: {exec: echo tell >> done, depends_on: ship}
"""


def test_a_step_with_approval_is_shown_as_it_would_run_and_runs_once_after_a_yes(runs: Runs) -> None:
    parked = runs(runs.flow(GATED), "--run-id", "r1", code=14)
    assert parked["data"]["steps"]["ship"]["status"] == "pending" and runs.done() == ["build"]
    proposal = runs.decide(YES)
    assert proposal.ask.title == "ship of flow: Ship it" and "echo ship" in (proposal.ask.arguments or {})["exec"]
    runs("--resume", "r1", code=0)
    assert runs.done() == ["build", "ship", "tell"]
    runs("--resume", "r1", code=0)
    assert runs.done() == ["build", "ship", "tell"]


SHIPPING = """
inputs: {place: {type: string}}
steps:
  who: {exec: echo prod-db}
  ship:
    exec: 'echo "$TARGET $TOKEN" {{ outputs.who }} in "$(basename "$PWD")" >> ../done; test "$(wc -l < ../done)" = 3'
    env: {TARGET: "{{ outputs.who }}", TOKEN: "${MY_TOKEN}", PATH: "/opt/odd:/usr/bin:/bin"}
    cwd: "{{ inputs.place }}"
    on_fail: {retry: {max: 2, backoff: {delay_ms: 1}}}
    depends_on: who
    approval: true
"""


def test_a_steps_approval_shows_and_binds_its_environment_its_directory_and_its_tries(runs: Runs) -> None:
    (runs.folder / "here").mkdir()
    runs.env["MY_TOKEN"] = "sekret-one"
    runs(runs.flow(SHIPPING), "--run-id", "r1", "--input", "place=here", code=14)
    proposal = runs.decide(YES)
    text = proposal.ask.text
    assert f'directory: "{runs.folder}/here"' in text and 'TARGET: "prod-db"' in text
    assert 'PATH: "/opt/odd:/usr/bin:/bin"' in text and 'TOKEN: "***"' in text and "sekret-one" not in text
    assert '"up to 3: one approval covers all of them"' in text
    assert re.search('- "environment.TOKEN: [0-9a-f]{16}"', text), text
    assert "prod-db" in text.partition("values:")[2], "what is interpolated into the command"
    assert proposal.outcome is None
    runs("--resume", "r1", code=0)
    assert (runs.folder / "done").read_text().splitlines() == ["prod-db sekret-one prod-db in here"] * 3
    with Store.open(runs.folder / "home") as store:
        ran = store.proposals.get(proposal.id)
        assert ran is not None and ran.outcome is not None and ran.outcome.ok


def test_the_approval_of_an_agent_shows_what_the_tools_of_the_file_would_run(runs: Runs) -> None:
    runs.env["OPENAI_API_KEY"] = "of nobody"
    text = """
    tools:
      wipe: {exec: "rm -rf {{ args.folder }}", shell: bash, env: {DB_PASSWORD: sekret-two}}
      other: {exec: "true"}
    steps:
      agent: {type: ai, prompt: Tidy up, ai: {model: gpt-5.5, tools: wipe}, approval: true}
    """
    runs(runs.flow(text), "--run-id", "r1", code=14)
    shown = runs.decide(YES).ask.text
    assert 'exec: "rm -rf {{ args.folder }}"' in shown and "bash" in shown and 'DB_PASSWORD: "***"' in shown
    assert "sekret-two" not in shown and "other" not in shown


def test_a_secret_header_of_the_file_is_neither_shown_nor_kept_with_an_approval(runs: Runs) -> None:
    def asked(token: str, run_id: str) -> str:
        headers = f'{{Authorization: "Bearer {token}", X-Plain: plain}}'
        step = f"{{type: http_client, url: 'http://127.0.0.1:9/', headers: {headers}, approval: true}}"
        runs(runs.flow(f"steps: {{ask: {step}}}"), "--run-id", run_id, code=14)
        return runs.decide(YES).ask.text

    one, other = asked("sekret-one", "r1"), asked("sekret-two", "r2")
    assert 'Authorization: "***"' in one and 'X-Plain: "plain"' in one
    bound = [re.search('- "with.headers.Authorization: [0-9a-f]{16}"', text) for text in (one, other)]
    assert bound[0] and bound[1] and bound[0][0] != bound[1][0], "another one is another action"
    kept = b"".join(file.read_bytes() for file in (runs.folder / "home").glob("shotclock.db*"))
    assert b"sekret" not in kept


def test_the_approval_of_a_step_that_failed_says_so(runs: Runs) -> None:
    runs(runs.flow("steps: {ship: {exec: echo no >&2; exit 7, approval: true}}"), "--run-id", "r1", code=14)
    proposal = runs.decide(YES)
    assert run_of(proposal, dispatched=True) == {"state": "not_started", "at": None, "run_id": "r1"}
    told = "not run yet: its run continues by itself, a parked local one with: shotclock run --resume r1"
    assert outcome_of(proposal, 0, 0).data["continue_command"] == "shotclock run --resume r1"
    assert told in " ".join(draw(partial(draw_inbox, "approve"), summary(proposal.summary, Principal.local())).split())
    runs("--resume", "r1", code=3)
    with Store.open(runs.folder / "home") as store:
        ran = store.proposals.get(proposal.id)
        assert ran is not None and ran.outcome is not None
        assert (ran.outcome.ok, ran.outcome.code) == (False, "COMMAND_FAILED")


@pytest.mark.parametrize("change", ["secret", "environment"])
def test_what_changed_after_the_yes_does_not_run_with_it(change: str, runs: Runs) -> None:
    (runs.folder / "here").mkdir()
    text = SHIPPING.replace("/opt/odd", "${ODD}")
    runs.env |= {"MY_TOKEN": "sekret-one", "ODD": "/opt/odd"}
    runs(runs.flow(text), "--run-id", "r1", "--input", "place=here", code=14)
    runs.decide(YES)
    runs.env |= {"MY_TOKEN": "sekret-two"} if change == "secret" else {"ODD": "/evil"}
    ended = runs("--resume", "r1", code=3)
    error = ended["data"]["steps"]["ship"]["error"]
    assert error["code"] == "ACTION_CHANGED" and "has changed since" in error["message"]
    assert runs.done() == []


PROGRAMS = """
steps:
  ship:
    exec: "./ship.sh && timeout 20 sh -c './linked.sh a' && python3 -u ship.py && (test ! -e new.sh || sh new.sh)"
    on_fail: {retry: {max: 2}}
    approval: true
"""


def test_the_approval_of_a_step_binds_the_contents_of_the_programs_that_it_names(runs: Runs) -> None:
    folder = runs.folder
    evil = "#!/bin/sh\necho evil >> done\n"

    def link_elsewhere() -> None:
        (folder / "linked.sh").unlink()
        (folder / "linked.sh").symlink_to("evil.sh")

    changes: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "rewritten": lambda: (folder / "ship.sh").write_text(evil),
        "removed": lambda: (folder / "ship.sh").unlink(),
        "linked elsewhere": link_elsewhere,
        "given to an interpreter": lambda: (folder / "ship.py").write_text("open('done', 'a').write('evil')"),
        "created": lambda: (folder / "new.sh").write_text(evil),
    }
    for number, (change, make) in enumerate(changes.items()):
        for name in ("ship.sh", "good.sh", "evil.sh"):
            (folder / name).write_text(evil if name == "evil.sh" else "#!/bin/sh\necho good >> done\n")
            (folder / name).chmod(0o755)
        (folder / "ship.py").write_text("open('done', 'a').write('good')")
        for name in ("linked.sh", "new.sh", "done"):
            (folder / name).unlink(missing_ok=True)
        (folder / "linked.sh").symlink_to("good.sh")
        runs(runs.flow(PROGRAMS), "--run-id", f"r{number}", code=14)
        shown = runs.decide(YES).ask.text
        for name in ("ship.sh", "linked.sh", "ship.py"):
            assert re.search(f'"{folder}/{name}": "sha256 [0-9a-f]{{64}}"', shown), shown
        assert f'"{folder}/new.sh": "no such file"' in shown and f"{folder}/good.sh" not in shown
        make()
        ended = runs("--resume", f"r{number}", code=0 if change == "nothing" else 3)
        if change == "nothing":
            assert runs.done() == ["good", "good", "good"]
        else:
            step = ended["data"]["steps"]["ship"]
            assert step["error"]["code"] == "ACTION_CHANGED" and runs.done() == [], change


# Each step, and the files that its approval binds.
NAMED_PROGRAMS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "below": ({"exec": "cd sub && ./run.sh"}, {"sub/run.sh", "run.sh"}),
    "below_there": ({"exec": "cd sub; cd sub; sh ./run.sh"}, {"sub/run.sh", "run.sh", "sub/sub/run.sh"}),
    "below_in_a_shell": ({"exec": "bash -c 'cd ./sub && ./run.sh'"}, {"sub/run.sh", "run.sh", "sub/sub/run.sh"}),
    "above": ({"exec": "cd .. && ./run.sh"}, {"run.sh"}),
    "somewhere": ({"exec": 'cd "$PLACE" && ./run.sh; cd su*; ./run.sh'}, set()),
    "pushed": ({"exec": "pushd sub && ./run.sh"}, set()),
    "elsewhere_by_env": ({"exec": "env -C sub ./run.sh"}, set()),
    "elsewhere_by_find": ({"exec": "find sub -name run.sh -execdir ./run.sh {} +"}, set()),
    "moved_but_absolute": ({"exec": "cd sub && HERE/run.sh"}, {"run.sh"}),
    "root": ({"exec": "HERE/run.sh", "cwd": "/"}, {"run.sh", "/bin/sh"}),
    "server": ({"type": "mcp", "command": "env", "args": ["./run.sh"], "tool": "t"}, {"run.sh"}),
    "server_shell": ({"type": "mcp", "command": "sh", "args": ["-c", "exec ./run.sh -y"], "tool": "t"}, {"run.sh"}),
    "module": ({"type": "function", "target": "mod:app", "command": "go"}, {"mod.py", "mod/__init__.py"}),
    "late": ({"exec": "bash -e ./late.sh"}, {"late.sh"}),
    "long_option": ({"exec": "timeout --signal KILL 10 ./run.sh"}, {"run.sh"}),
    "shell": ({"exec": "true", "shell": "./bin/sh"}, {"bin/sh"}),
    "overtime": ({"exec": "true", "timeout": "5s", "overtime": {"command": "./run.sh", "budget": "1s"}}, {"run.sh"}),
    "trap": ({"exec": "trap ./run.sh EXIT"}, {"run.sh"}),
    "find": ({"exec": "find . -name run.sh -exec ./run.sh {} +"}, {"run.sh"}),
    "expanded": ({"exec": 'sh -c "./run.sh $HOME"'}, {"run.sh"}),
    "script_of_a_runner": ({"exec": "flock lock -c './run.sh a'; flock lock -c './none a'"}, {"run.sh"}),
    "awk": ({"exec": "awk -f prog.awk data.txt"}, {"prog.awk"}),
    "template": ({"exec": "./{{ inputs.name }} go"}, {"run.sh"}),
    "each[0]": ({"exec": "bash ./{{ item }}", "for_each": ["run.sh"]}, {"run.sh"}),
    "data": ({"exec": "cat ./data.txt; ls ./sub; echo './none a'; python3 -m json.tool ./none.txt"}, set()),
}


def test_the_approval_of_a_step_lists_the_files_that_run_and_no_others(runs: Runs) -> None:
    folder = runs.folder.resolve()
    for name in ("run.sh", "sub/run.sh", "bin/sh", "mod.py", "prog.awk", "data.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("#!/bin/sh\necho good >> done\n")
        (folder / name).chmod(0o755 if name.endswith("sh") else 0o644)
    steps = {name.removesuffix("[0]"): {**step, "approval": True} for name, (step, _) in NAMED_PROGRAMS.items()}
    given = {"max_parallelism": 50, "inputs": {"name": {"default": "run.sh"}}}
    runs(runs.flow(json.dumps({**given, "steps": steps}).replace("HERE", str(folder))), "--run-id", "r1", code=14)

    async def decide_all() -> dict[str, set[str]]:
        listed: dict[str, set[str]] = {}
        with Store.open(folder / "home") as store:
            inbox = Inbox(store)
            for each in await inbox.list(status=ProposalStatus.PENDING):
                asked = await inbox.get(each.id)
                assert asked is not None
                files = (asked.ask.surroundings or {}).get("files", {})
                listed[str(asked.ask.operation).split()[-1]] = {path.removeprefix(f"{folder}/") for path in files}
                await inbox.decide(each.id, YES if files else Decision(ProposalStatus.REJECTED), Principal.local())
            await inbox.close()
        return listed

    listed = asyncio.run(asyncio.wait_for(decide_all(), WITHIN_S))
    assert listed == {name: bound for name, (_, bound) in NAMED_PROGRAMS.items()}
    for name in ("run.sh", "sub/run.sh", "bin/sh", "mod.py", "late.sh", "prog.awk"):
        (folder / name).write_text("#!/bin/sh\necho evil >> done\n")
    ended = runs("--resume", "r1", code=3)["data"]["steps"]
    codes = {name: ended[name]["error"]["code"] for name, bound in listed.items() if bound and name in ended}
    assert set(codes.values()) == {"ACTION_CHANGED"} and runs.done() == [], codes


def test_an_approval_says_that_a_file_can_change_right_before_its_start_and_the_step_says_that_it_has(
    runs: Runs,
) -> None:
    for name in ("ship.sh", "sub/ship.sh"):
        (runs.folder / name).parent.mkdir(exist_ok=True)
        (runs.folder / name).write_text("#!/bin/sh\necho good >> done\n")
        (runs.folder / name).chmod(0o755)
    # As after `git pull`: the change comes behind the last comparison.
    evil = "printf '#!/bin/sh\\necho evil >> done\\n' > ship.sh; ./ship.sh"
    flow = runs.flow(json.dumps({"steps": {"ship": {"exec": evil, "approval": True}}}))
    runs(flow, "--run-id", "r1", code=14)
    shown = runs.decide(YES).ask.text
    assert "a change of a file between its last comparison, right before the start, and the moment when" in shown
    step = runs("--resume", "r1", code=0)["data"]["steps"]["ship"]
    assert runs.done() == ["evil"]
    changed = [note["message"] for note in step.get("warnings", ()) if note["code"] == "APPROVED_FILE_CHANGED"]
    assert len(changed) == 1 and str(runs.folder / "ship.sh") in changed[0]
    (runs.folder / "done").unlink()
    flow = runs.flow(json.dumps({"steps": {"ship": {"exec": "cd sub && ./ship.sh", "approval": True}}}))
    runs(flow, "--run-id", "r2", code=14)
    runs.decide(YES)
    assert "warnings" not in runs("--resume", "r2", code=0)["data"]["steps"]["ship"]


def test_an_approved_function_runs_the_approved_file_and_not_one_that_was_imported_before(runs: Runs) -> None:
    program = "from shotclock import App\napp = App('tool')\n@app.command()\ndef go() -> str:\n    return 'VERSION'\n"
    (runs.folder / "tool.py").write_text(program.replace("VERSION", "old"))
    (runs.folder / "new.py").write_text(program.replace("VERSION", "new"))
    runs.env["SHOTCLOCK_RESPONSE_TIMEOUT"] = "25s"
    process = runs.start(
        runs.flow(
            """
steps:
  first: {type: function, target: "HERE/tool.py:app", command: go}
  change: {exec: cp new.py tool.py, depends_on: first}
  second: {type: function, target: "HERE/tool.py:app", command: go, depends_on: change, approval: true}
""".replace("HERE", str(runs.folder.resolve()))
        )
    )
    runs.decide(YES)
    steps = json.loads(process.communicate(timeout=WITHIN_S)[0])["data"]["steps"]
    assert (steps["first"]["output"], steps["second"]["output"]) == ("old", "new")


def test_each_try_of_an_approved_step_runs_the_approved_contents_or_is_refused(runs: Runs) -> None:
    ship = runs.folder / "ship.sh"
    ship.write_text("echo first >> done; echo 'echo evil >> done' > ship.sh; exit 1")
    flow = runs.flow("steps: {ship: {exec: sh ship.sh, approval: true, on_fail: {retry: {max: 3}}}}")
    runs(flow, "--run-id", "r1", code=14)
    runs.decide(YES)
    step = runs("--resume", "r1", code=3)["data"]["steps"]["ship"]
    assert step["error"]["code"] == "ACTION_CHANGED" and str(ship) in step["error"]["message"]
    assert runs.done() == ["first"] and step["attempts"] == 1 and step["side_effects"] == "unknown"


NESTED = "steps: {o: {type: workflow, workflow: mid.yaml, approval: true}}"
MIDDLE = """
steps:
  first: {exec: echo first >> done}
  m: {type: workflow, workflow: inner.yaml, depends_on: first}
"""


def _decided_while_it_waits(runs: Runs, said: Decision | Callable[[Proposal], Decision], code: int) -> Any:
    runs.env["SHOTCLOCK_RESPONSE_TIMEOUT"] = "25s"
    process = runs.start(runs.flow(NESTED), "--run-id", "r1")
    runs.decide(said)
    ended = json.loads(process.communicate(timeout=WITHIN_S)[0])
    assert process.returncode == code, ended
    return ended


@pytest.mark.parametrize("change", ["mid.yaml", "inner.yaml", "link", None])
def test_the_approval_of_a_workflow_binds_every_file_that_it_runs(change: str | None, runs: Runs) -> None:
    runs.flow(MIDDLE, "mid.yaml")
    runs.flow("steps: {i: {exec: echo good >> done}}", "good.yaml")
    runs.flow("steps: {i: {exec: echo evil >> done}}", "evil.yaml")
    (runs.folder / "inner.yaml").symlink_to("good.yaml")

    def said(proposal: Proposal) -> Decision:
        for name in ("mid.yaml", "inner.yaml"):
            assert re.search(f'"{runs.folder}/{name}": "sha256 [0-9a-f]{{64}}"', proposal.ask.text), proposal.ask.text
        if change == "link":
            (runs.folder / "inner.yaml").unlink()
            (runs.folder / "inner.yaml").symlink_to("evil.yaml")
        elif change is not None:
            runs.flow("steps: {i: {exec: echo evil >> done}}", change)
        return YES

    ended = _decided_while_it_waits(runs, said, 0 if change is None else 3)
    if change is None:
        assert runs.done() == ["first", "good"]
    else:
        assert ended["data"]["steps"]["o"]["error"]["code"] == "ACTION_CHANGED" and runs.done() == []


def test_a_file_that_an_approved_workflow_changes_before_it_runs_it_is_refused(runs: Runs) -> None:
    runs.flow(MIDDLE.replace("echo first >> done", "cp evil.yaml inner.yaml"), "mid.yaml")
    runs.flow("steps: {i: {exec: echo good >> done}}", "inner.yaml")
    runs.flow("steps: {i: {exec: echo evil >> done}}", "evil.yaml")
    ended = _decided_while_it_waits(runs, YES, 3)
    assert ended["data"]["steps"]["o"]["error"]["context"]["failed"] == ["m"] and runs.done() == []
    with Store.open(runs.folder / "home") as store:
        assert "ACTION_CHANGED" in str(store.runs.steps("r1.o"))


@pytest.mark.parametrize(
    "flow",
    [
        """
steps:
  tell: {exec: 'cat >> done', stdin: "{{ env.MY_TOKEN }}", env: {MY_TOKEN: "${MY_TOKEN}"}, approval: true}
""",
        """
tools:
  teller: {exec: 'cat >> done', stdin: "{{ env.MY_TOKEN }}"}
steps:
  tell: {type: tool, tool: teller, env: {MY_TOKEN: "${MY_TOKEN}"}, approval: true}
""",
    ],
    ids=["command", "tool"],
)
def test_a_hidden_value_beside_what_the_operator_changed_stays_what_it_is(flow: str, runs: Runs) -> None:
    runs.env["MY_TOKEN"] = "sekret-one"
    runs(runs.flow(flow), "--run-id", "r1", code=14)

    def changed(proposal: Proposal) -> Decision:
        assert (proposal.ask.arguments or {})["stdin"] == "***"
        arguments = {**(proposal.ask.arguments or {}), "exec": "sed 's/^/changed /' >> done"}
        return Decision(ProposalStatus.MODIFIED, arguments=arguments)

    runs.decide(changed)
    runs("--resume", "r1", code=0)
    assert (runs.folder / "done").read_text().strip() == "changed sekret-one"


def test_what_an_operator_made_wrong_of_a_step_does_not_run(runs: Runs) -> None:
    runs(runs.flow(GATED), "--run-id", "r1", code=14)
    runs.decide(
        lambda proposal: Decision(ProposalStatus.MODIFIED, arguments={**(proposal.ask.arguments or {}), "exec": ""})
    )
    ended = runs("--resume", "r1", code=3)
    assert ended["data"]["steps"]["ship"]["error"]["code"] == "ARG_ERROR" and runs.done() == ["build"]


def test_a_rejected_step_fails_and_skips_what_depends_on_it(runs: Runs) -> None:
    runs(runs.flow(GATED), "--run-id", "r1", code=14)
    runs.decide(NO)
    ended = runs("--resume", "r1", code=3)
    ship, tell = ended["data"]["steps"]["ship"], ended["data"]["steps"]["tell"]
    assert ship["status"] == "failed" and ship["error"]["code"] == "PROPOSAL_REJECTED"
    assert ship["error"]["context"]["rule"] == "approval/rejected" and "not today" in ship["error"]["message"]
    assert (tell["status"], tell["reason"], tell["cause"]) == ("skipped", "dependency_failed", "ship")
    assert runs.done() == ["build"]


def test_an_unattended_run_goes_on_by_default_where_its_policy_says_so(runs: Runs) -> None:
    runs.env["SHOTCLOCK_RESPONSE_TIMEOUT"] = "20s"
    text = GATED.replace("{ttl: 1h}", "{ttl: 300ms, when_expired: default}")
    runs(runs.flow(text), code=0)
    assert runs.done() == ["build", "ship", "tell"]


def test_a_budget_that_is_none_is_refused_before_anything_runs(runs: Runs) -> None:
    runs.env["SHOTCLOCK_RESPONSE_TIMEOUT"] = "later"
    refused = runs(runs.flow(QUESTION), code=2)
    assert "SHOTCLOCK_RESPONSE_TIMEOUT" in refused["error"]["message"] and runs.done() == []
    assert runs(runs.flow(QUESTION), "--budget", "sometime", code=2)["error"]["errors"][0]["field"] == "budget"
