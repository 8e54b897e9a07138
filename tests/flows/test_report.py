"""Reports: what is said of a run that ended, still runs or was cut off, and that nothing in it can break out."""

import base64
import hashlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock.core.limits import ProcessIdentity, WallTime
from shotclock.core.value_types import replace
from shotclock.core.visible_text import visible
from shotclock.flows.cli._report_drawing import draw_run
from shotclock.flows.report.html_report import to_html
from shotclock.flows.report.junit import to_junit
from shotclock.flows.report.report import Report, brief, report_of, to_markdown
from shotclock.flows.run.state import Reason, Status, StepState
from shotclock.store.runs import StepRecord, StoredRun
from shotclock.terminal.drawing import draw
from shotclock.ui._browser import find_chromium

BEGAN = WallTime(1_700_000_000_000)
# Chromium takes two seconds to start; only a machine on its knees runs this out.
BROWSER_LIMIT_S = 60

EVIL = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">'\"`|&\u202e\x1b[31m"
)


def step(name: str, status: Status = Status.SUCCEEDED, at: int | None = 0, took: int | None = 100, **more: Any) -> Any:
    state = StepState(name, "command", status, started_ms=at, duration_ms=took, timeout_ms=60_000, attempts=1)
    for key, value in more.items():
        setattr(state, key, value)
    return state


def timed_out(owner: str, limit_ms: int, elapsed_ms: int) -> dict[str, Any]:
    clock = {"kind": "timeout", "owner": owner, "limit_ms": limit_ms, "elapsed_ms": elapsed_ms}
    return {"code": "TIMEOUT", "message": "timed out", "context": {"clock": clock}}


def report(
    states: list[StepState],
    written: dict[str, dict[str, Any]] | None = None,
    *,
    workflow: Any = None,
    error: dict[str, Any] | None = None,
    took: int | None = 5000,
    budget: int | None = None,
    name: str = "flow",
    alive: bool = True,
    now: int = 9000,
) -> Report:
    """`took` None: it has not ended."""
    written = written if written is not None else {state.id: {} for state in states}
    steps = {key: {"type": "command", "exec": "true", **value} for key, value in written.items()}
    run = StoredRun(
        id="run-1",
        name=name,
        file="/flow.yaml",
        workflow={"steps": steps} if workflow is None else workflow,
        inputs={},
        trace_id="t",
        holder=ProcessIdentity("here", "boot", 42, 1),
        created_at=BEGAN,
        deadline_at=None if budget is None else BEGAN + budget,
        ended_at=None if took is None else BEGAN + took,
        envelope=None if took is None else {"ok": error is None, "data": {}, "error": error},
    )
    records = {state.id: StepRecord(state.id, state.status.value, state.to_record()) for state in states}
    return report_of(run, records, now=BEGAN + now, is_alive=alive)


def by_id(made: Report) -> dict[str, Any]:
    return {each.id: each for each in made.steps}


# --- what is said ---------------------------------------------------------------------------------


def test_a_stopped_step_says_whose_clock_it_was() -> None:
    own = step("a", Status.TIMED_OUT, took=1300, error=timed_out("step a", 1000, 1001), ending="killed")
    runs = step("b", Status.TIMED_OUT, took=900, error=timed_out("run flow", 880, 890), ending="killed")
    other = step("c", Status.TIMED_OUT, took=900, error=timed_out("caller", 880, 890), ending="killed")
    made = report([own, runs, other], budget=1000)
    said = by_id(made)
    shown = json.loads(json.dumps(made.to_dict()))["steps"][0]["clock"]
    assert shown == {"kind": "timeout", "owner": "step a", "limit_ms": 1000, "elapsed_ms": 1001}
    assert said["a"].why == "stopped by its own timeout clock (1s)"
    assert said["b"].why == "stopped by the run's clock, which left it 880ms"
    assert said["b"].budget_ms == 880
    assert said["c"].why == "stopped by the timeout clock of caller (880ms)"


def test_a_skipped_step_stands_where_its_cause_ended() -> None:
    failed = step("a", Status.FAILED, at=100, took=400, error={"code": "X", "message": "no"})
    skipped = step("b", Status.SKIPPED, None, None, reason=Reason.DEPENDENCY_FAILED, cause="a", attempts=0)
    later = step("c", at=600)
    made = report([skipped, later, failed], {"b": {"depends_on": ["a"]}, "c": {}, "a": {}})
    assert [each.id for each in made.steps] == ["a", "b", "c"]
    assert by_id(made)["b"].at_ms == 500
    assert by_id(made)["b"].why == "it needs a: a failed"


def test_a_run_under_way_is_reported_up_to_now() -> None:
    states = [step("a"), step("b", Status.RUNNING, at=1000, took=None)]
    made = report(states, {"a": {}, "b": {}, "c": {"depends_on": ["a", "b"]}}, took=None, now=4000)
    assert made.status is Status.RUNNING
    assert by_id(made)["b"].duration_ms == 3000
    assert by_id(made)["c"].status is Status.PENDING
    assert by_id(made)["c"].why == "waits for b"
    assert "process 42" in made.why


def test_a_run_whose_process_died_says_how_to_go_on_and_no_step_outlives_its_clock() -> None:
    states = [step("a"), step("b", Status.RUNNING, at=1000, took=None)]
    made = report(states, {"a": {}, "b": {"timeout": 2}}, took=None, alive=False, now=3_600_000)
    assert made.status is Status.INTERRUPTED
    assert "--resume run-1" in made.why
    assert by_id(made)["b"].duration_ms == 2000
    assert by_id(made)["b"].why == "it ran when its process died"
    assert made.duration_ms == 3000


@pytest.mark.parametrize(
    ("code", "status"),
    [("STEPS_FAILED", Status.FAILED), ("TIMEOUT", Status.TIMED_OUT), ("CANCELLED", Status.CANCELLED),
     ("INCOMPLETE", Status.PENDING)],
)  # fmt: skip
def test_a_runs_status_comes_from_its_code(code: str, status: Status) -> None:
    assert report([step("a")], error={"code": code, "message": "x"}).status is status


def test_the_longest_way_is_what_the_end_waited_for() -> None:
    states = [step("a", took=100), step("b", at=100, took=900), step("c", at=100, took=50), step("d", at=1000)]
    made = report(
        states, {"a": {}, "b": {"depends_on": ["a"]}, "c": {"depends_on": ["a"]}, "d": {"depends_on": ["b|c"]}}
    )
    assert made.critical_path == ("a", "b", "d")


def test_the_longest_way_leads_over_the_step_that_called_for_another() -> None:
    states = [step("a", Status.FAILED, took=900, error={"code": "X", "message": "no"}), step("b"), step("c", at=901)]
    made = report(states, {"a": {"on_fail": {"run": "c"}}, "b": {}, "c": {}})
    assert made.critical_path == ("a", "c")


def test_a_command_that_failed_says_why_with_its_own_last_line() -> None:
    error = {"code": "COMMAND_FAILED", "message": "exit code 1", "context": {"stderr": "Traceback\n  no module x\n\n"}}
    other = {"code": "FAIL_IF", "message": "fail_if holds", "context": {"stderr": "no matter"}}
    states = [step("a", Status.FAILED, error=error), step("b", Status.FAILED, error=other)]
    said = by_id(report(states))
    assert said["a"].why == "no module x (exit code 1)"
    assert said["b"].why == "fail_if holds"
    page = to_html(report(states))
    assert '<pre tabindex="0">Traceback\n  no module x' in page


def test_the_time_of_a_person_is_no_time_of_the_step_and_a_bar_of_its_own() -> None:
    deploy = step("deploy", took=29_700, waited_ms=27_600)
    deploy.timeout_ms = 20_000
    made = report([deploy], {"deploy": {"timeout": 20, "approval": True}}, took=30_000)
    [reported] = made.to_dict()["steps"]
    assert (reported["duration_ms"], reported["waited_ms"], reported["uncounted_ms"]) == (29_700, 27_600, 27_600)
    assert "| 2.1s | 20s |" in to_markdown(made) and "waited 27.6s for a person" in to_markdown(made)
    page = to_html(made)
    assert "<b>2.1s</b>" in page and "29.7s</b>" not in page and 'class="waited"' in page
    assert 'time="2.100"' in to_junit(made)
    drawn = draw(draw_run, made.to_dict())
    assert re.search(r"deploy +2.1s / 20s +╱+█+", drawn) and "waited 27.6s for a person" in drawn
    for other in (to_html(report([step("deploy")])), draw(draw_run, report([step("deploy")]).to_dict())):
        assert 'class="waited"' not in other and "╱" not in other


def test_every_form_counts_the_attempts_of_a_step_and_the_drawing_fits_80_columns() -> None:
    made = report([step("a-step-with-a-long-name-indeed", took=5_000, attempts=3)])
    drawn = draw(draw_run, made.to_dict())
    assert "↻ 3 attempts" in drawn and max(map(len, drawn.splitlines())) <= 80
    assert "↻ 3 attempts" in to_html(made) and "| attempts | |" in to_markdown(made) and "| 3 |" in to_markdown(made)
    once = report([step("once")])
    assert not any("↻" in form for form in (draw(draw_run, once.to_dict()), to_html(once)))


def test_a_line_of_the_drawing_ends_at_the_edge_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = draw(draw_run, report([step("a-step-with-a-long-name-indeed", took=5_000)]).to_dict()).splitlines()
    assert max(map(len, lines)) == 40 and any(line.endswith("…") for line in lines)


def test_the_time_of_a_question_is_for_the_person_who_answers() -> None:
    ask = step("ask", took=9_000, waited_ms=8_990)
    ask.type, ask.timeout_ms = "human-input", 20_000
    made = report([ask], {"ask": {"type": "human-input", "prompt": "?", "timeout": 20, "exec": None}}, took=10_000)
    assert "| 9s | " in to_markdown(made)


def test_a_step_that_waits_for_a_person_is_not_reported_as_running() -> None:
    waiting = [step("deploy", Status.RUNNING, took=None, waits_for=["p-1"]), step("fetch")]
    made = report(waiting, took=None, now=60_000)
    deploy = by_id(made)["deploy"]
    says = "waits for p-1: shotclock inbox approve p-1"
    assert (deploy.word, deploy.why, made.why) == ("waits for a person", says, says)
    assert (deploy.duration_ms, deploy.waited_ms) == (60_000, 60_000), "its own timeout does not end the wait"
    assert "| ◌ | `deploy` | waits for a person |" in to_markdown(made)
    made = report([*waiting, step("build", Status.RUNNING, took=None)], took=None)
    assert made.why == "under way in process 42", "another step works"


def test_a_step_that_succeeded_shows_what_it_was_warned_of() -> None:
    capped = {"code": "DEADLINE_INHERITED", "message": "the run left 5s"}  # as every step of a short run is
    stopped = {"code": "DESCENDANTS_STOPPED", "message": "1 process outlived the command"}
    warned = step("a", warnings=[capped, stopped])
    assert by_id(report([step("a", warnings=[capped])]))["a"].why == ""
    assert by_id(report([warned, step("b")]))["a"].why == "1 process outlived the command"
    assert by_id(report([warned, step("b")]))["b"].why == ""


def test_a_page_shows_what_the_run_answers_with() -> None:
    made = replace(report([step("a")]), outputs={"count": 3, "<who>": "<b>you</b>", "nothing": None})
    page = to_html(made)
    assert '<dt><bdi>count</bdi></dt><dd><bdi class="text">3</bdi></dd>' in page
    assert "&lt;b&gt;you" in page and "<b>you" not in page and "nothing" not in page.split("<main>")[0]


def test_a_budget_is_all_tries_inside_what_the_run_had_left() -> None:
    retry = {"on_fail": {"retry": {"max": 2, "backoff": {"mode": "fixed", "delay_ms": 100}}}}
    states = [step("a"), step("b", at=9000), step("c"), step("d")]
    written = {"a": {"timeout": 1, **retry}, "b": {"timeout": 60}, "c": {"timeout": 1, "for_each": list(range(9))}}
    written["d"] = {"timeout": 1, "for_each": "{{ inputs.some }}"}
    said = by_id(report(states, written, budget=10_000))
    assert said["a"].budget_ms == 3200
    assert said["b"].budget_ms == 1000
    assert said["c"].budget_ms == 2_000  # eight items at a time
    assert said["d"].budget_ms == 10_000  # each item has a second, and their number was not known


def test_the_budget_of_the_run_is_what_it_had() -> None:
    workflow = {"timeout": "10s", "steps": {"a": {"type": "command", "exec": "true"}}}
    assert report([step("a")], workflow=workflow, budget=10_000).budget_ms == 10_000
    assert report([step("a")], workflow=workflow, budget=4_000).budget_ms == 4_000


@pytest.mark.parametrize("workflow", [{}, [], {"steps": {"a": {"type": "unheard-of"}}}, {"steps": []}])
def test_a_run_that_another_version_wrote_down_is_reported_all_the_same(workflow: Any) -> None:
    made = report([step("a"), step("b", Status.FAILED)], workflow=workflow)
    assert {each.id for each in made.steps} == {"a", "b"}
    assert to_markdown(made)
    assert to_junit(made)
    assert to_html(made)


def test_a_run_without_steps_or_duration_renders() -> None:
    made = report([], {"a": {}}, took=0)
    assert by_id(made)["a"].status is Status.PENDING
    assert to_html(made)
    assert to_html(report([], workflow={}, took=0))
    assert to_markdown(report([], workflow={}, took=0))


def test_a_long_output_is_cut_and_says_so() -> None:
    made = report([step("a", output="x" * 50_000 + "THE END")])
    [said] = made.to_dict()["steps"]
    assert len(said["output"]) < 21_000
    assert said["output_truncated"]
    assert said["output"].endswith("THE END")


@pytest.mark.parametrize(
    ("ms", "said"), [(0, "0ms"), (999, "999ms"), (1304, "1.3s"), (12_345, "12.3s"), (59_990, "1m")]
)
def test_durations_have_as_many_digits_as_one_reads(ms: int, said: str) -> None:
    assert brief(ms) == said


def test_what_cannot_be_seen_is_written_out() -> None:
    assert visible("a\x1b[2J\u202eb\ud800\n\tc") == "a<U+001B>[2J<U+202E>b<U+D800>\n\tc"


# --- Markdown and JUnit ---------------------------------------------------------------------------


def evil_report(text: str) -> Report:
    text = f"{text}…"  # never the name of another step
    states = [
        step("a", Status.FAILED, error={"code": text, "message": text, "suggestion": text}, output=text),
        step("b", Status.TIMED_OUT, error=timed_out(text, 5, 5), warnings=[{"code": text, "message": text}]),
        step(text, output={text: [text]}),
        step("c", Status.SKIPPED, None, None, reason=Reason.DEPENDENCY_FAILED, cause=text),
    ]
    written: dict[str, dict[str, Any]] = {"a": {}, "b": {}, text: {}, "c": {}}
    workflow = {"steps": {key: {"type": "command", "exec": "true"} for key in written}}
    return report(states, workflow=workflow, error={"code": "STEPS_FAILED", "message": text}, name=text)


def cells(line: str) -> list[str]:
    """As GitHub splits a table: at every bar that no backslash stands before."""
    return re.split(r"(?<!\\)\|", line)[1:-1]


@given(st.text(max_size=60) | st.just(EVIL) | st.text(alphabet="`|\\\n <&@", max_size=12))
def test_whatever_the_text_the_markdown_is_one_table(text: str) -> None:
    lines = to_markdown(evil_report(text)).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(evil_report(text).steps)
    assert all(len(cells(line)) == 7 for line in table), table
    outside = [re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)|<code>.*?</code>", "", line) for line in lines]
    assert not [line for line in outside if re.search(r"[<>@`\[\]]", line)], outside


@given(st.text(max_size=60) | st.just(EVIL))
def test_whatever_the_text_the_junit_file_is_xml(text: str) -> None:
    suites = xml.fromstring(to_junit(evil_report(text)).encode())
    [suite] = suites
    assert len(suite.findall("testcase")) == int(suite.attrib["tests"])
    assert suite.attrib["failures"] == "1"
    assert suite.attrib["errors"] == "1"


def test_a_junit_case_says_what_ci_should_believe() -> None:
    states = [
        step("good", took=1500),
        step("bad", Status.FAILED, error={"code": "COMMAND_FAILED", "message": "exit code 3"}),
        step("may", Status.FAILED, error={"code": "COMMAND_FAILED", "message": "exit code 4"}, continues=True),
        step("hung", Status.TIMED_OUT, error=timed_out("step hung", 1000, 1001), ending="killed"),
        step("never", Status.SKIPPED, None, None, reason=Reason.DEPENDENCY_FAILED, cause="bad"),
    ]
    [suite] = xml.fromstring(to_junit(report(states, error={"code": "STEPS_FAILED", "message": "two"})))
    cases = {case.attrib["name"]: case for case in suite.findall("testcase")}
    assert {name: [child.tag for child in case] for name, case in cases.items()} == {
        "good": [], "bad": ["failure"], "may": ["skipped"], "hung": ["error"], "never": ["skipped"],
    }  # fmt: skip
    assert cases["good"].attrib["time"] == "1.500"
    assert cases["hung"][0].attrib == {"message": "stopped by its own timeout clock (1s)", "type": "TIMEOUT"}
    assert "timeout of step hung: 1000 ms" in (cases["hung"][0].text or "")
    assert {key: suite.attrib[key] for key in ("tests", "failures", "errors", "skipped", "timestamp")} == {
        "tests": "5", "failures": "1", "errors": "1", "skipped": "2", "timestamp": "2023-11-14T22:13:20.000",
    }  # fmt: skip


def test_a_failure_of_the_run_itself_is_a_case_of_its_own() -> None:
    [suite] = xml.fromstring(to_junit(report([step("a")], error={"code": "CANCELLED", "message": "stopped by SIGINT"})))
    assert suite.attrib["errors"] == "1"
    assert suite.findall("testcase")[-1].attrib["name"] == "(the run)"


# --- the page -------------------------------------------------------------------------------------


class Seen(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._in = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag

    def handle_data(self, data: str) -> None:
        if self._in in ("script", "style"):
            self.texts[self._in] = self.texts.get(self._in, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._in = ""


@pytest.mark.slow
@given(st.text(max_size=60) | st.just(EVIL))
def test_whatever_the_text_the_page_has_no_markup_but_its_own(text: str) -> None:
    def skeleton(made: Report) -> set[tuple[str, tuple[str, ...]]]:
        return {(tag, tuple(sorted(attributes))) for tag, attributes in Seen(to_html(made)).tags}

    page = to_html(evil_report(text))
    assert skeleton(evil_report(text)) <= skeleton(evil_report("harmless"))
    assert [tag for tag, _ in Seen(page).tags].count("script") == 1
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x1b]", page)


def test_the_page_forbids_itself_everything_but_its_own_script_and_style() -> None:
    seen = Seen(to_html(evil_report(EVIL)))
    [policy] = [a["content"] for tag, a in seen.tags if a.get("http-equiv") == "Content-Security-Policy"]
    hashes = {
        kind: base64.b64encode(hashlib.sha256(seen.texts[kind].encode()).digest()).decode()
        for kind in ("script", "style")
    }
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; script-src 'sha256-{hashes['script']}'; "
        "base-uri 'none'; form-action 'none'"
    )
    outside = {"src", "style", "onclick", "onload", "action", "srcset"}
    assert not [tag for tag, attributes in seen.tags if outside & attributes.keys()]
    assert all(str(a["href"]).startswith("#s") for tag, a in seen.tags if "href" in a)


def chain(count: int, **written: Any) -> Report:
    states = [step(f"s{number}", at=number * 10, took=10) for number in range(count)]
    after = {f"s{n}": {"depends_on": [f"s{n - 1}"] if n else [], **written} for n in range(count)}
    return report(states, after)


@pytest.mark.slow
def test_a_page_grows_with_its_steps_and_not_faster() -> None:
    small, large = len(to_html(chain(200))), len(to_html(chain(2000)))
    assert large < 11 * small
    assert large < 4_000_000


def test_links_lead_to_steps_that_are_there() -> None:
    made = report(
        [step("a", Status.FAILED), step("b", Status.SKIPPED, None, None, reason=Reason.DEPENDENCY_FAILED, cause="a")],
        {"a": {}, "b": {"depends_on": ["a", "gone"]}},
    )
    seen = Seen(to_html(made))
    ids = {attributes["id"] for _, attributes in seen.tags if "id" in attributes}
    links = {str(attributes["href"])[1:] for tag, attributes in seen.tags if tag == "a"}
    assert links
    assert links <= ids


# --- in a real browser ----------------------------------------------------------------------------


@pytest.fixture
def chromium(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """A function that opens a page and returns its document after the scripts ran, and what the console said."""
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here: `make test` installs it where it may")

    def dump(page: str, query: str = "") -> tuple[str, str]:
        file = tmp_path / "report.html"
        file.write_text(page, "utf-8")
        words = [
            str(program), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-extensions", f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr", "--v=0", "--dump-dom", f"file://{file}{query}",
        ]  # fmt: skip
        with open(tmp_path / "dom", "wb") as out, open(tmp_path / "log", "wb") as log:
            process = subprocess.Popen(words, stdout=out, stderr=log, start_new_session=True)
            try:
                process.wait(BROWSER_LIMIT_S)
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait(BROWSER_LIMIT_S)
        return (tmp_path / "dom").read_text("utf-8"), (tmp_path / "log").read_text("utf-8", "replace")

    return dump


def rows(dom: str) -> dict[str, bool]:
    """Every step on the page, and whether it is shown."""
    found = re.findall(r'<details class="row[^>]*>.*?<bdi class="name">(.*?)</bdi>', dom, re.DOTALL)
    shown = [" hidden" not in tag for tag in re.findall(r'<details class="row[^>]*>', dom)]
    return dict(zip(found, shown, strict=True))


@pytest.mark.slow
def test_in_a_browser_the_script_runs_under_the_pages_own_policy_and_what_is_injected_stays_text(
    chromium: Callable[..., tuple[str, str]],
) -> None:
    dom, log = chromium(to_html(evil_report(EVIL)))
    assert 'data-ready="yes"' in dom and len(rows(dom)) == 4 and all(rows(dom).values())
    assert "Content Security Policy" not in log and "Refused" not in log, log
    assert "<title>owned" not in dom and "<img" not in dom and dom.count("<script") == 1
    assert "&lt;/script&gt;&lt;script&gt;document.title" in dom


@pytest.mark.slow
def test_in_a_browser_steps_are_filtered_by_status_and_words(chromium: Callable[..., tuple[str, str]]) -> None:
    states = [step("build"), step("test", Status.FAILED, error={"code": "X", "message": "no"}), step("test-more")]
    page = to_html(report(states))
    assert rows(chromium(page, "?status=failed&q=TEST")[0]) == {"build": False, "test": True, "test-more": False}
    dom, _ = chromium(page, "?q=nothing-like-it#s1")  # a link to a step wins over a filter that hides it
    assert rows(dom)["test"]
    assert re.search(r'<details class="row[^>]*id="s1"[^>]*open=""', dom)


def test_a_run_without_its_secrets_keeps_its_dependencies_in_the_report() -> None:
    steps = {"a": {"type": "command", "exec": "true"}, "b": {"type": "command", "exec": "true", "depends_on": ["a"]}}
    made = report([step("a"), step("b", at=100)], workflow={"steps": steps, "x-secrets-hidden": True})
    assert made.steps[1].depends_on == (("a",),)


def test_steps_that_call_each_other_in_no_time_are_each_once_on_the_critical_path() -> None:
    calls = {"a": "b", "b": "c", "c": "a"}
    steps = {name: {"type": "command", "exec": "true", "on_success": {"run": [other]}} for name, other in calls.items()}
    made = report([step(name, took=0) for name in calls], workflow={"steps": steps})
    assert len(made.critical_path) == len({*made.critical_path})
