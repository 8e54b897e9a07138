"""What the tests of workflow files share: a file from a few lines, and what is said about it."""

import textwrap
from collections.abc import Callable

import pytest
from hypothesis import settings

from shotclock.workflow.lint import lint
from shotclock.workflow.loader import Finding, Loaded, load_text

# Other tests, and other people, share these cores: how long one example took says nothing about the code.
settings.register_profile("shotclock", deadline=None, max_examples=60)
settings.load_profile("shotclock")

Load = Callable[..., Loaded]
Lint = Callable[..., list[Finding]]


@pytest.fixture
def load() -> Load:
    """The text, dedented, as a workflow file."""

    def load(text: str | bytes) -> Loaded:
        data = text if isinstance(text, bytes) else textwrap.dedent(text).encode()
        return load_text(data, "flow.yaml")

    return load


@pytest.fixture
def linted(load: Load) -> Lint:
    """Everything said about a file of the right shape."""

    def linted(text: str, *, timeout_ms: int | None = None, unattended: bool = True) -> list[Finding]:
        loaded = load(text)
        assert loaded.workflow is not None, loaded.findings
        return lint(loaded, timeout_ms=timeout_ms, unattended=unattended)

    return linted


@pytest.fixture
def problems(load: Load) -> Callable[[str | bytes], list[Finding]]:
    """What is wrong with a file that is not of the right shape."""

    def problems(text: str | bytes) -> list[Finding]:
        loaded = load(text)
        assert loaded.workflow is None, "nothing was found"
        assert loaded.findings
        assert all(finding.is_error for finding in loaded.findings)
        return list(loaded.findings)

    return problems
