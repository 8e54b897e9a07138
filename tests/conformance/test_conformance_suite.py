"""The MCP conformance suite gives the same result with and without `shotclock wrap`, scenario by scenario.

One client of the SDK speaks HTTP to the suite, and the same client speaks over stdio to `wrap --url`.
Scenarios of authorisation are left out: the wrap sends headers that it is given, and is no OAuth client.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conformance.listening import SHOTCLOCK
from tests.conformance.published_servers import FOLDER, SUITES
from tests.conformance.results import record

pytestmark = pytest.mark.timeout(400)
each_suite = pytest.mark.parametrize("suite", SUITES)
HERE = Path(__file__).parent
SUITE_S = 300.0
CLIENT_SCENARIOS = {
    "0.1.16": ("initialize", "tools_call", "elicitation-sep1034-client-defaults", "sse-retry"),
    "0.2.0-alpha.12": (
        *("initialize", "tools_call", "elicitation-sep1034-client-defaults", "sse-retry"),
        *("request-metadata", "sep-2322-client-request-state"),
        *("http-standard-headers", "http-custom-headers", "http-invalid-tool-headers"),
        *("json-schema-ref-no-deref", "json-schema-2020-12-preservation"),
    ),
}
Checks = dict[str, list[tuple[str, str]]]
"""The checks of each scenario, with their status."""


def conformance(suite: str, words: list[str], output: Path, limit_s: float = SUITE_S) -> Checks:
    """Run the suite and return its checks."""
    program = FOLDER / "node_modules" / SUITES[suite] / "dist" / "index.js"
    node = FOLDER / "node_modules" / ".bin" / "node"
    output.mkdir()
    with open(output / "log", "wb") as log:
        subprocess.run([node, program, *words, "-o", output], cwd=output, stdout=log, stderr=log, timeout=limit_s)
    seen: Checks = {}
    for file in sorted(output.rglob("checks.json")):
        folder = str(file.parent.relative_to(output))
        scenario = re.sub(r"-\d{4}-\d\d-\d\dT[-\dZ]+$", "", folder).removeprefix("server-")
        checks = [(check["id"], check["status"]) for check in json.loads(file.read_text())]
        seen[scenario] = sorted(check for check in checks if check[1] != "INFO")
    assert seen, (output / "log").read_text()[-3000:]
    return seen


def summary(seen: Checks) -> str:
    statuses = [status for checks in seen.values() for _, status in checks]
    bad = sum(status == "FAILURE" for status in statuses)
    return f"{len(seen)} scenarios, {statuses.count('SUCCESS')} checks passed, {bad} failed"


def compare(row: str, sides: dict[str, Checks]) -> None:
    """Record the sides, and fail with every scenario that differs from the direct one."""
    differences = []
    for side, seen in sides.items():
        record("the conformance suite", row, side, summary(seen))
        for scenario, expected in sides["direct"].items():
            checks = Counter(seen.get(scenario, []))
            lost, new = Counter(expected) - checks, checks - Counter(expected)
            if lost or new:
                differences.append(f"{side}: {scenario}: {dict(lost)} became {dict(new)}")
    assert not differences, "\n".join(differences)


@each_suite
def test_a_client_gives_the_same_result(suite: str, tmp_path: Path) -> None:
    sides: dict[str, Checks] = {}
    for side, front in (("direct", []), ("wrap --url", [SHOTCLOCK, "wrap", "--url"])):
        sides[side] = {}
        command = shlex.join([sys.executable, "-W", "ignore", str(HERE / "suite_client.py"), *front])
        for scenario in CLIENT_SCENARIOS[suite]:
            words = ["client", "--command", command, "--scenario", scenario]
            sides[side] |= conformance(suite, words, tmp_path / f"{side}-{scenario}")
    compare(f"clients, {suite}", sides)
