"""The conformance suite runs real agents, so it is collected only by `make conformance`, which says where they are."""

import os

FOLDER = os.environ.get("SHOTCLOCK_CONFORMANCE", "")
collect_ignore_glob = [] if FOLDER else ["test_*.py"]
