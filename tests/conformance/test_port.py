"""The original of the server in docs/howto/from-fastmcp.md gives the answers of the port."""

import asyncio
from pathlib import Path

from tests.conformance.published_servers import FOLDER
from tests.examples.inventory_session import drive
from tests.examples.test_inventory import ORIGINAL, check


def test_the_original_gives_the_same_answers(tmp_path: Path) -> None:
    environ = {"FASTMCP_SHOW_SERVER_BANNER": "false", "FASTMCP_LOG_LEVEL": "CRITICAL", "PYTHONWARNINGS": "ignore"}
    # FastMCP asks only clients of the revisions before 2026.
    check(asyncio.run(drive([str(FOLDER / "fastmcp/bin/python"), str(ORIGINAL)], "legacy", environ)))
