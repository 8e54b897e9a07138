"""The reference of the App names every option there is, with its real default, and none that there is not."""

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shotclock import Audio, EmbeddedResource, File, Image, Message, ResourceLink
from shotclock.apps._declared import DEFAULT_OPTIONS, RESERVED, Declared, ServedOptions
from shotclock.apps._manifest import build_manifest, option_flags
from shotclock.apps.app import BUILT_IN, App, CallOptions, call_request
from shotclock.core.catalogue import CommandSpec, HandlerReference, Interruption
from shotclock.core.value_types import as_dict
from shotclock.worker.context import Context

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "reference" / "app.md").read_text("utf-8")

# An example that only prints its help or checks an argument starts one Python and one worker.
EXAMPLE_LIMIT_S = 30.0


def section(heading: str) -> str:
    """What stands below a heading, up to the next one of any depth."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[1]


def rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def named(text: str) -> dict[str, str]:
    """The second column by the names in the first; several names may share a row."""
    return {name: row[1] for row in rows(text) for name in re.findall(r"`([^`]+)`", row[0])}


def defaults(parameters: dict[str, inspect.Parameter]) -> dict[str, str]:
    return {
        name: "required" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        for name, parameter in parameters.items()
        if name not in ("self", "function")
    }


def test_every_option_of_a_command_is_in_the_reference_with_its_default_and_no_other() -> None:
    declared = {name: f"`{DEFAULT_OPTIONS.get(name)!r}`" for name in Declared.__annotations__}
    assert named(section("@app.command(…)")) == declared


def test_every_option_of_an_app_is_in_the_reference_with_its_default_and_no_other() -> None:
    assert named(section("App(name, …)")) == defaults(dict(inspect.signature(App.__init__).parameters))


def test_every_field_of_interruption_is_in_the_reference_with_its_default_and_no_other() -> None:
    assert named(section("interruption")) == {
        name: f"`{default!r}`" for name, default in as_dict(Interruption()).items()
    }


def test_every_member_of_the_context_is_in_the_reference_and_no_other() -> None:
    attributes = set(inspect.signature(Context.__init__).parameters)
    hidden = {"self", "link", "skipped_steps", "trace"}
    members = {name for name in vars(Context) if not name.startswith("_")} | (attributes - hidden)
    assert {name.partition("(")[0] for name in named(section("Context"))} == members


def test_every_option_of_a_call_is_in_the_reference_and_no_other() -> None:
    spec = CommandSpec("all", HandlerReference("m", "f"), destructive=True, steps=("a",), interruption=Interruption())
    flags = {name.split()[0] for name in named(section("Options of a call")) if name.startswith("--")}
    assert flags == {f"--{name}" for name in ("timeout", "json", "debug", "help", *option_flags(spec))}
    assert {name.removeprefix("--") for name in flags} > RESERVED
    for name in BUILT_IN:
        assert f"`{name}`" in section("Options of a call"), name


def test_every_option_of_a_resource_and_a_prompt_and_every_kind_of_content_is_in_the_reference() -> None:
    options = section("@app.resource(uri, …), @app.prompt, @app.completion(of, argument)")
    for name in ServedOptions.__annotations__:
        assert f"`{name}`" in options, name
    table = section("Content")
    for kind in (Image, Audio, File, EmbeddedResource, ResourceLink, Message):
        parameters = [name for name in inspect.signature(kind).parameters if name != "annotations"]
        assert f"`{kind.__name__}({', '.join(parameters)})`" in table, kind


def test_every_option_of_a_library_call_is_in_the_reference_with_its_default() -> None:
    written = {name: text for name, text in named(section("Options of a call")).items() if not name.startswith("--")}
    assert written.keys() == CallOptions.__annotations__.keys()
    request = call_request("a command", {})
    assert request.confirmed is False and written.pop("confirm_destructive") == "`False`"
    assert request.clocks.timeout_ms is request.budget_ms is request.idempotency_key is request.on_item is None
    assert set(written.values()) == {"`None`"}


def test_every_variable_of_the_manifest_is_in_the_reference() -> None:
    variables = {entry["name"] for entry in build_manifest(App("listed").catalogue(), "0")["env_vars"]}
    assert variables <= named(section("Environment")).keys()


# --- the examples ---------------------------------------------------------------------------------

EXAMPLES = {"first_tool.py": "docs/tutorial-app.md", "long_work.py": "docs/howto/background.md"}


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_the_program_its_page_shows(example: str) -> None:
    page = (ROOT / EXAMPLES[example]).read_text("utf-8")
    shown = re.search(rf"^```python\n# {re.escape(example)}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert shown is not None
    written = ast.parse((ROOT / "examples" / example).read_text("utf-8"))
    assert ast.get_docstring(written), "an example says what it shows, and where"
    written.body.pop(0)
    assert ast.dump(written) == ast.dump(ast.parse(shown[1]))


def test_every_program_among_the_examples_is_on_a_page() -> None:
    elsewhere = {"conformance.py", "inventory.py"}  # for the suites of MCP; in tests/examples/test_inventory.py
    assert {file.name for file in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys() | elsewhere


@pytest.mark.slow
@pytest.mark.parametrize(("example", "words"), [("first_tool.py", ["greet", "Ada"]), ("long_work.py", ["manifest"])])
def test_an_example_runs_where_it_lies(example: str, words: list[str], tmp_path: Path, no_survivors: object) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example), *words],
        cwd=tmp_path,
        env={**os.environ, "SHOTCLOCK_HOME": str(tmp_path / "state")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=EXAMPLE_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b'{"ok":true')


# --- links into the pages -------------------------------------------------------------------------


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_anchor_leads_to_a_heading() -> None:
    wrong = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text("utf-8")):
            if anchor not in anchors_of(page.parent / target if target else page):
                wrong.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert not wrong, "\n".join(wrong)
