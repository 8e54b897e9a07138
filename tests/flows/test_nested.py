"""Workflows that run workflows: looked into before anything runs, and never for ever."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shotclock.flows.check.lint import NESTED_FILES_LIMIT, NESTING_LIMIT, lint
from shotclock.flows.file.loader import Finding, load_file

Lint = Callable[..., list[Finding]]


@pytest.fixture
def lint_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lint:
    """Writes the files and looks at the first."""
    monkeypatch.chdir(tmp_path)

    def lint_files(files: dict[str, str], *, timeout_ms: int | None = None) -> list[Finding]:
        for name, text in files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text)
        return lint(load_file(Path(next(iter(files)))), timeout_ms=timeout_ms)

    return lint_files


def brief(findings: list[Finding]) -> list[tuple[str, str | None, str]]:
    return [(finding.rule, finding.file, finding.field) for finding in findings]


GOOD = "steps: {a: {exec: x, timeout: 1}}\n"


def runs(child: str, more: str = "") -> str:
    return f"steps: {{sub: {{type: workflow, workflow: {child}{more}}}}}\n"


def test_a_file_that_is_fine_is_fine(lint_files: Lint) -> None:
    assert lint_files({"main.yaml": runs("lib/child.yaml"), "lib/child.yaml": GOOD}) == []


def test_a_child_is_found_beside_its_parent_not_beside_its_caller(lint_files: Lint) -> None:
    files = {"flows/main.yaml": runs("sub/a.yaml"), "flows/sub/a.yaml": runs("../b.yaml"), "flows/b.yaml": GOOD}
    assert lint_files(files) == []


def test_a_missing_file_is_an_error_with_what_was_meant(lint_files: Lint) -> None:
    (found,) = lint_files({"main.yaml": runs("chlid.yaml"), "child.yaml": GOOD})
    assert (found.rule, found.field, found.is_error) == ("nested/missing", "steps.sub.workflow", True)
    assert found.message == "there is no file 'chlid.yaml'"
    assert found.suggestion == "did you mean 'child.yaml'?"
    assert (found.place.line, found.place.column) == (1, 31)


def test_what_cannot_be_read_is_an_error_and_nobody_waits_for_it(lint_files: Lint, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder").mkdir()
    for name in ("pipe.yaml", "folder", "/dev/zero", "main.yaml/below"):
        (found,) = lint_files({"main.yaml": runs(name)})
        assert found.rule == "nested/unreadable", found
    (found,) = lint_files({"main.yaml": runs('"a\\0b"')})
    assert found.rule == "nested/missing"


def test_what_is_wrong_in_a_child_carries_its_name_and_place(lint_files: Lint) -> None:
    found = lint_files(
        {
            "main.yaml": runs("lib/a.yaml"),
            "lib/a.yaml": "steps:\n  sub: {type: workflow, workflow: b.yaml}\n  a: {exec: x, depends_on: c}\n",
            "lib/b.yaml": "steps:\n  a:\n    exec: x\n    timeot: 5\n",
        }
    )
    assert brief(found) == [
        ("graph/missing-dependency", "lib/a.yaml", "steps.a.depends_on"),
        ("schema/unknown-key", "lib/b.yaml", "steps.a.timeot"),
    ]
    assert [(finding.place.line, finding.place.column) for finding in found] == [(3, 16), (4, 5)]


@pytest.mark.parametrize(
    ("said", "child", "fits"),
    [
        (", timeout: 10", "timeout: 9500ms", True),
        (", timeout: 10", "timeout: 9501ms", False),
        (", timeout: 10", "timeout: 10", False),
        (", timeout: 10", "timeout: 0", True),
        (", timeout: 10", "name: x", True),
        (", timeout: 0", "timeout: 1h", True),
        ("", "timeout: 1h", True),
    ],
)
def test_a_child_that_gives_itself_more_than_its_step_has_is_an_error(
    lint_files: Lint, said: str, child: str, fits: bool
) -> None:
    found = lint_files({"main.yaml": runs("c.yaml", said), "c.yaml": f"{child}\n{GOOD}"})
    expected = [] if fits else [("budget/longer-than-step", None, "steps.sub.timeout")]
    assert brief(found) == expected
    assert all(finding.is_error for finding in found)


def test_a_child_that_gives_itself_more_than_the_run_has_is_an_error_too(lint_files: Lint) -> None:
    files = {"main.yaml": f"timeout: 60\n{runs('c.yaml')}", "c.yaml": f"timeout: 5m\n{GOOD}"}
    found = [finding for finding in lint_files(files) if finding.is_error]
    assert brief(found) == [("budget/longer-than-step", None, "steps.sub.timeout")]
    assert "c.yaml may take 5m by its own timeout, and has only 59s in this step" in found[0].message
    assert not any(finding.is_error for finding in lint_files({**files, "main.yaml": runs("c.yaml")}))


def test_the_steps_of_a_child_must_fit_into_its_step(lint_files: Lint) -> None:
    found = lint_files({"main.yaml": runs("c.yaml", ", timeout: 10"), "c.yaml": "steps: {a: {exec: x, timeout: 60}}"})
    assert ("budget/longer-than-run", "c.yaml", "steps.a.timeout") in brief(found)
    assert "the caller of the run has 10s" in found[0].message


def test_the_callers_limit_goes_down_through_every_file(lint_files: Lint) -> None:
    files = {"main.yaml": runs("b.yaml"), "b.yaml": runs("c.yaml"), "c.yaml": "steps: {a: {exec: x, timeout: 60}}"}
    assert lint_files(files) == []
    found = lint_files(files, timeout_ms=10_000)
    assert ("budget/longer-than-run", "c.yaml", "steps.a.timeout") in brief(found)


@pytest.mark.parametrize(
    ("files", "path"),
    [
        ({"a.yaml": "a.yaml"}, "a.yaml → a.yaml"),
        ({"a.yaml": "b.yaml", "b.yaml": "a.yaml"}, "a.yaml → b.yaml → a.yaml"),
        ({"a.yaml": "b.yaml", "b.yaml": "c.yaml", "c.yaml": "./b.yaml"}, "b.yaml → c.yaml → b.yaml"),
    ],
)
def test_a_circle_of_files_is_an_error_with_its_path(lint_files: Lint, files: dict[str, str], path: str) -> None:
    (found,) = lint_files({name: runs(child) for name, child in files.items()})
    assert (found.rule, found.message, found.is_error) == ("nested/circle", f"files run each other: {path}", True)
    assert found.file == (None if len(files) == 1 else list(files)[-1])


def test_a_circle_through_a_link_is_one(lint_files: Lint, tmp_path: Path) -> None:
    (tmp_path / "link.yaml").symlink_to("a.yaml")
    assert [finding.rule for finding in lint_files({"a.yaml": runs("link.yaml")})] == ["nested/circle"]


def test_two_steps_that_run_the_same_file_are_no_circle_and_tell_its_problems_once(lint_files: Lint) -> None:
    found = lint_files(
        {
            "main.yaml": "steps:\n"
            "  a: {type: workflow, workflow: c.yaml}\n"
            "  b: {type: workflow, workflow: c.yaml}\n"
            "  d: {type: workflow, workflow: ./c.yaml}\n",
            "c.yaml": "steps: {a: {exec: x, depends_on: b}}",
        }
    )
    assert brief(found) == [("graph/missing-dependency", "c.yaml", "steps.a.depends_on")]


def test_files_in_files_have_an_end(lint_files: Lint) -> None:
    count = NESTING_LIMIT + 3
    files = {f"f{n}.yaml": runs(f"f{n + 1}.yaml") for n in range(count)}
    assert [finding.rule for finding in lint_files({**files, f"f{count}.yaml": GOOD})] == ["nested/depth"]
    count = NESTING_LIMIT - 1
    files = {f"g{n}.yaml": runs(f"g{n + 1}.yaml") for n in range(count)}
    assert lint_files({**files, f"g{count}.yaml": GOOD}) == []


def test_so_many_files_nobody_wrote(lint_files: Lint, tmp_path: Path) -> None:
    for number in range(NESTED_FILES_LIMIT + 1):
        (tmp_path / f"c{number}.yaml").write_text(GOOD)
    steps = "".join(f"  s{n}: {{type: workflow, workflow: c{n}.yaml}}\n" for n in range(NESTED_FILES_LIMIT + 1))
    assert brief(lint_files({"main.yaml": f"steps:\n{steps}"})) == [
        ("nested/files", None, f"steps.s{NESTED_FILES_LIMIT}.workflow")
    ]


def test_a_name_that_is_only_known_at_run_time_is_left_alone(lint_files: Lint) -> None:
    main = "inputs: {which: {}}\n" + runs("'{{ inputs.which }}.yaml'")
    assert lint_files({"main.yaml": main}) == []


def test_inputs_are_compared_with_what_the_child_asks_for(lint_files: Lint) -> None:
    child = "inputs: {who: {required: true}, how: {required: true, default: well}, why: {}}\n" + GOOD
    assert lint_files({"main.yaml": runs("c.yaml", ", inputs: {who: me}"), "c.yaml": child}) == []
    found = lint_files({"main.yaml": runs("c.yaml", ", inputs: {whom: me, why: x}"), "c.yaml": child})
    assert [(finding.rule, finding.message, finding.suggestion) for finding in found] == [
        ("nested/input", "c.yaml needs the input 'who'", None),
        ("nested/input", "c.yaml has no input 'whom'", "did you mean 'who'?"),
    ]


def test_a_person_in_a_child_is_a_person_too(lint_files: Lint) -> None:
    files = {"main.yaml": runs("c.yaml"), "c.yaml": "steps: {a: {type: human-input, prompt: p}}"}
    assert brief(lint_files(files)) == [("human/unbounded", "c.yaml", "steps.a")]
