"""The requirements manifest, both ways: what it lists is tested and marked, and what is marked is listed.

`tests/requirements.toml` has for every id of the contract what it demands and which tests hold it to that. A test says
so itself with `@pytest.mark.requirement("F-011")`. Neither can drift from the other.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
MANIFEST = ROOT / "tests" / "requirements.toml"
# Collecting imports every test module that names a requirement; a machine on its knees would run this out.
COLLECTED_WITHIN_S = 90

# The lines that the App framework answers for, and those that its commands declare.
DEMANDED = set(
    """
    F-011 F-012 F-013 F-069 F-015 F-030 F-031 F-080 F-081 F-082
    F-003 F-006 F-009 F-014 F-033 F-048 F-071
    C-001 C-007 C-008 C-012 C-034 C-035 C-036
    O-009 O-010 O-012 O-038
    """.split()
)

PLUGIN = """
import json, sys
import pytest

class Collector:
    def pytest_collection_finish(self, session):
        marked = {}
        for item in session.items:
            node = item.nodeid.partition("[")[0]
            ids = sorted({mark.args[0] for mark in item.iter_markers("requirement")})
            marked.setdefault(node, set()).update(ids)
        with open(sys.argv[1], "w") as file:
            json.dump({node: sorted(ids) for node, ids in marked.items()}, file)

options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", ""]  # no test is left out, however long it takes
sys.exit(pytest.main([*options, *sys.argv[2:]], plugins=[Collector()]))
"""


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return tomllib.loads(MANIFEST.read_text("utf-8"))


@pytest.fixture(scope="module")
def collected(manifest: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Every test of every file that has to do with requirements, as pytest itself finds it, and the ids it is for."""
    files = {node.partition("::")[0] for entry in manifest.values() for node in entry["tests"]}
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path != Path(__file__) and "mark.requirement" in path.read_text("utf-8"):
            files.add(str(path.relative_to(ROOT)))
    folder = tmp_path_factory.mktemp("collected")
    with open(folder / "out", "wb") as out:
        ran = subprocess.run(
            [sys.executable, "-c", PLUGIN, folder / "collected.json", *sorted(f for f in files if (ROOT / f).exists())],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            timeout=COLLECTED_WITHIN_S,
        )
    assert ran.returncode == 0, (folder / "out").read_text()[-3000:]
    found: dict[str, list[str]] = json.loads((folder / "collected.json").read_text())
    return found


def test_every_line_that_was_demanded_is_there_and_says_something(manifest: dict[str, Any]):
    assert not DEMANDED - set(manifest), f"missing: {sorted(DEMANDED - set(manifest))}"
    for id, entry in manifest.items():
        assert re.fullmatch(r"[FCO]-\d{3}", id), id
        assert set(entry) == {"says", "tests"}, id
        assert len(entry["says"]) > 30, id
        assert entry["tests"] and len(set(entry["tests"])) == len(entry["tests"]), id


def test_every_test_that_is_listed_exists_and_says_the_same(manifest: dict[str, Any], collected: dict[str, list[str]]):
    listed = {(id, node) for id, entry in manifest.items() for node in entry["tests"]}
    gone = sorted({node for _, node in listed if node not in collected})
    assert not gone, f"listed, but there is no such test: {gone}"
    unmarked = sorted((id, node) for id, node in listed if id not in collected[node])
    assert not unmarked, f"listed, but not marked with the id: {unmarked}"


def test_every_test_that_is_marked_is_listed(manifest: dict[str, Any], collected: dict[str, list[str]]):
    marked = {(id, node) for node, ids in collected.items() for id in ids}
    unlisted = sorted((id, node) for id, node in marked if id not in manifest or node not in manifest[id]["tests"])
    assert not unlisted, f"marked, but not listed in {MANIFEST.name}: {unlisted}"
