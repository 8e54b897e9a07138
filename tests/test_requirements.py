"""The requirements manifest, both ways: what it lists is tested and marked, and what is marked is listed.

`tests/requirements.toml` has for every id of the contract what it demands and which tests hold it to that. A test says
so itself with `@pytest.mark.requirement("F-011")`. Neither can drift from the other.
"""

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
MANIFEST = ROOT / "tests" / "requirements.toml"
# The lines that the App framework answers for, and those that its commands declare.
DEMANDED = set(
    """
    F-011 F-012 F-013 F-069 F-015 F-030 F-031 F-080 F-081 F-082
    F-003 F-006 F-009 F-014 F-033 F-048 F-071
    C-001 C-007 C-008 C-012 C-034 C-035 C-036
    O-009 O-010 O-012 O-038
    """.split()
)


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return tomllib.loads(MANIFEST.read_text("utf-8"))


def ids_of(decorators: list[ast.expr]) -> set[str]:
    """The ids in `pytest.mark.requirement(...)` among decorators."""
    calls = [node for node in decorators if isinstance(node, ast.Call)]
    return {call.args[0].value for call in calls if ast.unparse(call.func) == "pytest.mark.requirement"}  # type: ignore


@pytest.fixture(scope="module")
def collected(manifest: dict[str, Any]) -> dict[str, set[str]]:
    """Every test of the modules that are listed or marked, and the ids it is for. Read, not imported: importing all of
    them takes many seconds."""
    listed = {ROOT / node.partition("::")[0] for entry in manifest.values() for node in entry["tests"]}
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        content = path.read_text("utf-8")
        marks = content.count("mark.requirement(") if path != Path(__file__) else 0
        if not marks and path not in listed:
            continue
        for node in ast.parse(content).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[f"{path.relative_to(ROOT)}::{node.name}"] = ids_of(node.decorator_list)
                marks -= sum("mark.requirement(" in ast.unparse(decorator) for decorator in node.decorator_list)
        assert marks == 0, f"{path}: a requirement is marked elsewhere than above a test function"
    return found


def test_every_line_that_was_demanded_is_there_and_says_something(manifest: dict[str, Any]):
    assert not DEMANDED - set(manifest), f"missing: {sorted(DEMANDED - set(manifest))}"
    for id, entry in manifest.items():
        assert re.fullmatch(r"[FCO]-\d{3}", id), id
        assert set(entry) == {"says", "tests"}, id
        assert len(entry["says"]) > 30, id
        assert entry["tests"] and len(set(entry["tests"])) == len(entry["tests"]), id


def test_every_test_that_is_listed_exists_and_says_the_same(manifest: dict[str, Any], collected: dict[str, set[str]]):
    listed = {(id, node) for id, entry in manifest.items() for node in entry["tests"]}
    gone = sorted({node for _, node in listed if node not in collected})
    assert not gone, f"listed, but there is no such test: {gone}"
    unmarked = sorted((id, node) for id, node in listed if id not in collected[node])
    assert not unmarked, f"listed, but not marked with the id: {unmarked}"


def test_every_test_that_is_marked_is_listed(manifest: dict[str, Any], collected: dict[str, set[str]]):
    marked = {(id, node) for node, ids in collected.items() for id in ids}
    unlisted = sorted((id, node) for id, node in marked if id not in manifest or node not in manifest[id]["tests"])
    assert not unlisted, f"marked, but not listed in {MANIFEST.name}: {unlisted}"
