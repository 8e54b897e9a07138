"""A run of some steps: those that are named or tagged with what they need, or all but some."""

from pathlib import Path

import pytest

from .test_rerun import Flow, Valid, why

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors", "warm_starts")]

FILE = """
    steps:
      fetch: {exec: "echo fetch >> audit; echo data", tags: [quick]}
      lint: {exec: "echo lint >> audit", tags: [quick, check]}
      build: {exec: "echo build >> audit; echo {{ outputs.fetch }}", depends_on: fetch}
      test: {exec: "echo test >> audit; test ! -e broken", depends_on: build, tags: check, on_fail: {run: tidy}}
      ship: {exec: "echo ship >> audit", depends_on: [test], env: {T: "${NOT_SET_ANYWHERE}"}}
      tidy: {exec: "echo tidy >> audit"}
      note: {exec: "echo note >> audit", depends_on: lint, accept_skipped: true}
    outputs: {built: "{{ outputs.build }}", linted: "{{ outputs.lint }}"}
"""


@pytest.fixture
def flow(tmp_path: Path, validate_envelope: Valid) -> Flow:
    made = Flow(tmp_path, validate_envelope)
    made.write(FILE)
    return made


def test_named_steps_run_with_what_they_need_and_the_others_are_skipped(flow: Flow) -> None:
    envelope = flow.first("--only", "build,note")
    assert envelope["ok"] and flow.did == ["build", "fetch", "lint", "note"], envelope["error"]
    data = envelope["data"]
    assert data["skipped"] == ["test", "ship", "tidy"] and data["outputs"] == {"built": "data", "linted": ""}
    assert {data["steps"][name]["reason"] for name in data["skipped"]} == {"not_chosen"}
    assert flow.run(str(flow.file), "--only", "lint")["data"]["outputs"] == {"linted": ""}


def test_tagged_steps_run_with_what_they_need_and_their_reactions(flow: Flow) -> None:
    (flow.folder / "broken").touch()
    envelope = flow.first("--tags", "check")
    assert flow.did == ["build", "fetch", "lint", "test", "tidy"]
    assert envelope["data"]["failed"] == ["test"] and envelope["data"]["skipped"] == ["ship", "note"]


def test_what_depends_on_a_step_that_is_left_out_is_skipped_unless_it_accepts_that(flow: Flow) -> None:
    flow.change("${NOT_SET_ANYWHERE}", "x")
    envelope = flow.first("--skip", "lint,build")
    assert envelope["ok"] and flow.did == ["fetch", "note"]
    steps = envelope["data"]["steps"]
    assert (steps["ship"]["reason"], steps["ship"]["cause"]) == ("dependency_skipped", "build")


def test_a_reaction_does_not_start_a_step_that_is_left_out(flow: Flow) -> None:
    flow.change("${NOT_SET_ANYWHERE}", "x")
    (flow.folder / "broken").touch()
    envelope = flow.first("--skip", "tidy")
    assert "tidy" not in flow.did and envelope["data"]["steps"]["tidy"]["reason"] == "not_chosen"
    flow.file.write_text("fail_fast: true\n" + flow.file.read_text())
    envelope = flow.run(str(flow.file), "--skip", "tidy,ship")
    assert "tidy" not in flow.did and envelope["data"]["steps"]["tidy"]["reason"] == "not_chosen"


def test_a_continued_run_keeps_the_choice(flow: Flow) -> None:
    (flow.folder / "broken").touch()
    flow.first("--only", "test")
    assert flow.did == ["build", "fetch", "test", "tidy"]
    (flow.folder / "broken").unlink()
    flow.change("  note:", '  more: {exec: "echo more >> audit"}\n  note:')
    envelope = flow.rerun("--run-id", "second")
    assert envelope["ok"] and flow.did == ["test"]
    assert envelope["data"]["steps"]["more"]["reason"] == "not_chosen", "an added step was not chosen either"
    assert envelope["data"]["rerun"]["file"] == [] and envelope["data"]["outputs"] == {"built": "data"}
    flow.change("depends_on: build, tags: check", "depends_on: [build, more], tags: check")
    envelope = flow.run("--rerun-failed", "second")
    assert flow.did == ["more", "test"] and why(envelope)["more"] == "a step that runs again needs it"


def test_a_continued_run_leaves_out_what_was_skipped(flow: Flow) -> None:
    flow.change("${NOT_SET_ANYWHERE}", "x")
    (flow.folder / "broken").touch()
    flow.first("--skip", "lint")
    assert flow.did == ["build", "fetch", "note", "test", "tidy"]
    (flow.folder / "broken").unlink()
    envelope = flow.rerun()
    assert envelope["ok"] and flow.did == ["ship", "test"]
    assert envelope["data"]["steps"]["lint"]["reason"] == "not_chosen"


def test_unknown_names_and_impossible_choices_are_refused(flow: Flow) -> None:
    refusals = {
        ("--only", "biuld"): "--only: there is no step 'biuld'; did you mean build?",
        ("--skip", "nothing-like-it"): "the steps of this file: fetch, lint, build, test, ship, tidy, note",
        ("--tags", "chek"): "the tags of this file: check, quick",
        ("--only", "test", "--skip", "build"): "--skip build leaves out what --only test needs",
        ("--only", "test,"): "is not a list",
        ("--skip", "a", "--on", "temporal://127.0.0.1:1"): "only for runs of this machine",
    }
    for words, message in refusals.items():
        envelope = flow.first(*words)
        assert message in envelope["error"]["message"], envelope["error"]
        assert envelope["meta"]["exit_code"] == 2 and envelope["meta"]["ending"] == "not_started"
    assert flow.did == []


LAST = """
    finally:
      clean: {exec: "echo clean >> audit; echo {{ run.status }} {{ steps.ship.status }} >> ends"}
"""


def test_finally_runs_whatever_is_chosen(flow: Flow) -> None:
    flow.write(FILE + LAST)
    envelope = flow.first("--only", "fetch")
    assert envelope["ok"] and flow.did == ["clean", "fetch"], envelope["error"]
    refused = flow.run(str(flow.file), "--skip", "clean")
    assert refused["error"]["code"] == "ARG_ERROR" and "always runs" in refused["error"]["message"]


def test_finally_runs_again_in_a_rerun_and_alone_is_no_reason_for_one(flow: Flow) -> None:
    flow.write(FILE.replace("${NOT_SET_ANYWHERE}", "x") + LAST)
    (flow.folder / "broken").touch()
    flow.first()
    assert "clean" in flow.did
    (flow.folder / "broken").unlink()
    envelope = flow.rerun("--run-id", "second")
    assert envelope["ok"] and flow.did == ["clean", "ship", "test"]
    assert (flow.folder / "ends").read_text().splitlines() == ["failed skipped", "succeeded succeeded"]
    assert flow.run("--rerun-failed", "second")["error"]["code"] == "ARG_ERROR"


def test_a_step_that_waits_for_any_end_runs_without_the_other(flow: Flow) -> None:
    flow.write("""
    steps:
      build: {exec: "echo build >> audit"}
      tell: {exec: "echo tell >> audit", depends_on: {build: ended}}
    """)
    envelope = flow.first("--skip", "build")
    assert envelope["ok"] and flow.did == ["tell"]
