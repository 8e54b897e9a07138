"""The generated parts of the reference pages are those that `make docs` writes."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_generated_pages_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    pages = generate.generated_pages()
    assert {"exec.md", "errors.md", "run.md", "doctor.md", "prune.md", "inbox.md"} <= {page.name for page in pages}
    stale = [page.name for page, text in pages.items() if page.read_text("utf-8") != text]
    assert not stale, "run `make docs`"
