"""An App that a function makes: the target `file.py:create()`, and what is refused when its server starts."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shotclock import App, testing
from shotclock.core.errors import Failure
from tests.apps.server.client import LEGACY, MODERN, connected, envelope_of, run

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

WITHIN_S = 60
MADE = """
import os
from contextlib import contextmanager
from shotclock import App, Context

with open(os.environ.get("MADE_BY", os.devnull), "a") as file:
    file.write("")

def create() -> App:
    with open(os.environ.get("MADE_BY", os.devnull), "a") as file:
        file.write(f"{os.getpid()}\\n")
    app = App("made")

    @app.lifespan
    @contextmanager
    def opened():
        yield {"count": 0}

    @app.command(mutates=False)
    def greet(name: str) -> str:
        return f"hello {name}"

    @app.command(isolation="shared")
    def count(ctx: Context) -> int:
        ctx.state["count"] += 1
        return ctx.state["count"]

    @app.command(interruption=True)
    def long(seconds: float) -> str:
        import time
        time.sleep(seconds)
        return "the end"

    @app.resource("notes://1")
    def note() -> str:
        return "noted"

    return app

class Maker:
    @staticmethod
    def app() -> App:
        return create()
"""
FLOW = """
steps:
  greet: {type: function, target: "made.py:create()", command: greet, arguments: {name: Ada}}
"""


def create() -> App:
    """Make an App for these tests."""
    app = App("made-here")

    @app.command(mutates=False)
    def greet(name: str) -> str:
        return f"hello {name}"

    return app


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MADE_BY", str(tmp_path / "made-by"))
    (tmp_path / "made.py").write_text(MADE)
    return tmp_path


def serve(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, *words]
    return subprocess.run(argv, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WITHIN_S)


@pytest.mark.parametrize(("target", "mode"), [("{}/made.py:create()", MODERN), ("made:Maker.app()", LEGACY)])
def test_an_app_that_a_function_makes_is_served_with_everything_that_it_declares(
    target: str, mode: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if target.startswith("made:"):
        monkeypatch.setenv("PYTHONPATH", str(made))

    async def scenario() -> None:
        async with connected("stdio", mode, target=target.format(made)) as (client, _):
            greeted = await asyncio.gather(*(envelope_of(client, "greet", {"name": str(n)}) for n in range(5)))
            assert [each["data"]["result"] for each in greeted] == [f"hello {n}" for n in range(5)]
            counts = [(await envelope_of(client, "count"))["data"]["result"] for _ in range(2)]
            assert counts == [1, 2]
            note: Any = (await client.read_resource("notes://1")).contents[0]
            assert note.text == "noted"
            begun = await envelope_of(client, "long", {"seconds": 1}, meta={"shotclock.dev/budgetMs": 1})
            job = {"action": "wait", "job_id": begun["data"]["job_id"], "wait_ms": 20_000}
            assert (await envelope_of(client, "job", job))["data"] == {"result": "the end"}

    run(scenario())
    makers = (made / "made-by").read_text().split()
    assert len(makers) == 2, "once before the workers of the server are forked, once for those of the job"


def test_a_reload_makes_the_app_anew(made: Path) -> None:
    async def scenario() -> None:
        async with connected("stdio", MODERN, "--reload", target=f"{made}/made.py:create()") as (client, _):
            async with asyncio.timeout(WITHIN_S):
                (made / "made.new").write_text(MADE.replace("hello", "salut"))
                os.utime(made / "made.new", (1_000_000, 1_000_000))  # long ago: it needs no time to settle
                os.replace(made / "made.new", made / "made.py")
                while "hello" in str(greeted := await envelope_of(client, "greet", {"name": "Ada"})):
                    await asyncio.sleep(0.1)
            assert greeted["data"] == {"result": "salut Ada"}

    run(scenario())


def test_a_step_and_a_test_call_the_app_that_a_function_makes(made: Path, tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text(FLOW)
    assert serve("-m", "shotclock", "check", "flow.yaml", folder=tmp_path).returncode == 0
    ran = serve("-m", "shotclock", "run", "flow.yaml", "--json", folder=tmp_path)
    assert ran.returncode == 0 and "hello Ada" in ran.stdout, ran.stdout
    for _ in range(2):  # the second App of the process has the same place in its workers
        with testing.calls(create) as call:
            assert testing.assert_ok(call("greet", name="Bob")) == "hello Bob"


def test_what_a_worker_process_cannot_find_is_refused_when_the_server_starts_with_the_reason(made: Path) -> None:
    main = "\nif __name__ == '__main__':\n"
    late = "    app = App('late')\n    @app.command\n    def see() -> str: return 'seen'\n    app.serve_mcp()\n"
    programs = {
        "inside": (f"{MADE}{main}    create().serve_mcp()\n", "is made inside of create(), which a worker process"),
        "below": (f"{MADE}{main}{late}", "defined where a worker process does not run, such as below `if __name__"),
        "only-main": (f"{main}    from made import App\n{late}else: import nothing\n", "No module named 'nothing'"),
    }
    for name, (program, reason) in programs.items():
        (made / f"{name}.py").write_text(program)
        ended = serve(f"{name}.py", folder=made)
        last = ended.stderr.strip().splitlines()[-1]
        assert ended.returncode == 1 and reason in last and "notebook" not in ended.stderr, (name, ended.stderr)
    assert "shotclock serve 'inside.py:create()'" in serve("inside.py", folder=made).stderr
    found = make_locally()

    async def scenario() -> None:
        async with testing.client(found):
            raise AssertionError("it was served")

    with pytest.raises(Failure, match="inside of make_locally"):
        run(scenario())


def make_locally() -> App:
    app = App("made-locally")
    app.command(create)
    return app


def test_a_function_that_makes_no_app_is_refused_with_the_reason(made: Path) -> None:
    (made / "wrong.py").write_text(
        "from shotclock import App\n"
        "def fails(): raise ValueError('no database')\n"
        "def quits(): raise SystemExit(3)\n"
        "def needs(name): return App(name)\n"
        "async def later(): return App('later')\n"
        "def makes(): return App('made')\n"
    )
    reasons = {
        "fails()": "ValueError: no database",
        "quits()": "SystemExit: 3",
        "needs()": "missing 1 required positional argument: 'name'",
        "later()": "later() returned a coroutine, not an App",
        "makes": "makes is a function, not an App; for the App that it makes, name makes()",
        "absent()": "there is no 'absent'",
        "makes(1)": "'makes(1)' cannot be the name of an App",
    }
    for target, reason in reasons.items():
        ended = serve("-m", "shotclock", "serve", f"wrong.py:{target}", folder=made)
        assert ended.returncode in (4, 5) and reason in ended.stderr, (target, ended.stderr)
