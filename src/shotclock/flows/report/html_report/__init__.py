"""The HTML report: one page that needs no server, no network and no script to be read.

Steps, messages and outputs are untrusted text, so all is escaped, and the page forbids every script and style but its
own two.
"""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from importlib import resources
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined, Template

from ....core.limits import format_duration
from ....core.value_types import JsonObject
from ....core.visible_text import visible
from ....terminal.output import brief
from ...check.plan import needs
from ...run.state import Status
from ..report import Report, ReportedStep, format_output, shorten
from ..words import MARKS, WORDS, artifacts_in_words, attempts_in_words, news_in_words, stderr_of

# Characters of the outputs of all steps together, and the least for each step.
OUTPUTS_SHOWN, LEAST_OUTPUT = 4_000_000, 500
NAMES_SHOWN = 40  # a thousand links do not explain a step that a thousand others wait for
OUTPUT_OF_RUN = 1_000  # characters of each output of the run; the steps show more
OPEN_OUTPUT = 2_000  # characters of an output that is open as soon as its step is
COMPACT_FROM = 60  # steps from which on each row is one line
DEADLINE_IN_SIGHT = 1.7  # in durations of the run. A later deadline would squeeze the timeline, and is not shown
TICKS = 6
ARTIFACTS_SHOWN = 500  # of one step


def to_html(report: Report) -> str:
    end_ms = _end_of_timeline(report)
    numbers = {step.id: number for number, step in enumerate(report.steps)}
    behind: dict[str, list[str]] = {}
    for step in report.steps:
        for name in needs(step.depends_on):
            behind.setdefault(name, []).append(step.id)
    output_limit = max(LEAST_OUTPUT, min(20_000, OUTPUTS_SHOWN // max(1, len(report.steps))))
    critical = set(report.critical_path)
    rows = [_row(step, numbers, behind, end_ms, output_limit, step.id in critical) for step in report.steps]
    style, script = _asset("page.css"), _asset("page.js")
    used = None if not report.budget_ms else min(100, round(100 * report.duration_ms / report.budget_ms))
    is_near = report.budget_ms is not None and report.budget_ms <= end_ms
    path = list(report.critical_path)
    durations = {step.id: step.duration_ms or 0 for step in report.steps}
    for row in rows:
        row["artifacts"] = _link_artifacts(report, row["step"])
    return _template().render(
        report=report,
        rows=rows,
        mark=MARKS[report.status],
        word=WORDS[report.status],
        counts=[(status.value, WORDS[status], MARKS[status], count) for status, count in report.counts.items()],
        took=brief(report.duration_ms),
        budget="" if report.budget_ms is None else brief(report.budget_ms),
        used=used,
        ticks=_ticks(end_ms, report.budget_ms if is_near else None),
        deadline=_percent(report.budget_ms or 0, end_ms) if is_near else None,
        path=[(name, numbers[name], brief(durations[name])) for name in _ends_of(path)],
        path_left_out=max(0, len(path) - 2 * PATH_END),
        compact=len(rows) >= COMPACT_FROM,
        outputs=_outputs(report),
        open_output=OPEN_OUTPUT,
        words=WORDS,
        artifacts="" if report.artifacts is None else artifacts_in_words(report.artifacts),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def _printed(step: ReportedStep) -> list[tuple[str, str]]:
    """Return other attempts and stderr of successes, which the page does not show as output or error."""
    shown = []
    for each in step.printed:
        is_last = each["step"] == step.id and each["try"] == step.attempts
        name = f"{each['step']} attempt {each['try']}"
        shown += [(f"{name} stdout", each["stdout"])] if not is_last and each["stdout"] else []
        shown += [(f"{name} stderr", each["stderr"])] if each["stderr"] and not (is_last and step.error) else []
    return shown


def _link_artifacts(report: Report, step: ReportedStep) -> list[tuple[JsonObject, str]]:
    """Return the artifacts of a step with the URL of each, which is empty if they were deleted."""
    artifacts = report.artifacts or {}
    base = "" if artifacts.get("is_deleted", True) else f"file://{quote(artifacts['folder'])}/"
    return [(each, base and base + quote(each["file"])) for each in step.artifacts[:ARTIFACTS_SHOWN]]


def _outputs(report: Report) -> list[tuple[str, str]]:
    if not isinstance(report.outputs, dict):
        return []
    values = {name: value for name, value in report.outputs.items() if value is not None}
    return [(name, shorten(format_output(value), OUTPUT_OF_RUN)) for name, value in values.items()][:NAMES_SHOWN]


PATH_END = 6  # shown names at either end of the critical path


def _ends_of(path: list[str]) -> list[str]:
    return path if len(path) <= 2 * PATH_END else path[:PATH_END] + path[-PATH_END:]


def _row(
    step: ReportedStep,
    numbers: dict[str, int],
    behind: dict[str, list[str]],
    end_ms: int,
    output_limit: int,
    is_critical: bool,
) -> JsonObject:
    followers = behind.get(step.id, [])
    neighbours = sorted(numbers[name] for name in needs(step.depends_on) if name in numbers)
    used = None
    if step.duration_ms is not None and step.started_ms is not None and step.budget_ms:
        used = min(100, round(100 * (step.worked_ms or 0) / step.budget_ms))
    return {
        "number": numbers[step.id],
        "step": step,
        "mark": step.mark,
        "bar": _bar(step, end_ms),
        "used_percent": used,
        "took": step.took,
        "budget": "" if step.budget_ms is None else brief(step.budget_ms),
        "after": [[(name, numbers.get(name)) for name in group] for group in step.depends_on[:NAMES_SHOWN]],
        "behind": [(name, numbers[name]) for name in followers[:NAMES_SHOWN]],
        "more_behind": max(0, len(followers) - NAMES_SHOWN),
        # Numbers of the rows it depends on, for the script.
        "neighbours": " ".join(map(str, neighbours[:NAMES_SHOWN])),
        "cause": numbers.get(step.cause or ""),
        "clock": "" if step.clock is None else step.clock.in_words(step.id),
        "output": step.output_text(output_limit),
        "stderr": stderr_of(step.error),
        "printed": _printed(step),
        "is_critical": is_critical,
    }


def _bar(step: ReportedStep, end_ms: int) -> dict[str, str | None] | None:
    """Return a step's bar on the timeline, in per cent."""
    if step.at_ms is None:
        return None
    start = 100 * step.at_ms / end_ms
    width = 100 * (step.duration_ms or 0) / end_ms if step.started_ms is not None else 0.0
    width = max(0.0, min(width, 100 - start))
    waited, budget = min(width, 100 * step.waited_ms / end_ms), 0.0
    if step.started_ms is not None and step.budget_ms is not None:
        budget = max(0.0, min(100 * (step.budget_ms + step.uncounted_ms) / end_ms, 100 - start))
    rang, grace = None, 0.0
    if step.clock is not None and step.attempts == 1 and step.started_ms is not None and step.duration_ms is not None:
        over_ms = max(0, step.duration_ms - step.clock.elapsed_ms)
        grace = min(width, 100 * over_ms / end_ms)
        rang = f"{start + width - grace:.3f}%"
    # After the bar if there is room, else before it, else on it, up to its mark.
    label_at, anchor = start + width, "start"
    if start + width > 72:
        label_at, anchor = (start, "end") if start > 30 else (start + width - grace, "on")
    return {
        "x": f"{start:.3f}%",
        "width": f"{width:.3f}%",
        "budget": f"{budget:.3f}%",
        "waited": f"{waited:.3f}%" if waited else None,  # for its approval, before it began
        "rang": rang,  # where its clock fired; `grace` is the time it took to stop
        "grace": f"{grace:.3f}%",
        "label": _label(step),
        "label_x": f"{label_at:.3f}%",
        "anchor": anchor,  # `start` and `end` as in SVG; `on` is at the end of the bar, inside of it
        "spoken": _describe_times(step),
    }


def _label(step: ReportedStep) -> str:
    """Return words for the bar: attempts, overtime, and the clock that ended it."""
    words = []
    if step.attempts > 1 and not step.is_per_item:
        words.append(f"↻ {attempts_in_words(step.attempts)}")
    if any(news["event"] == "overtime" and news["granted_ms"] for news in step.overtime):
        words.append(f"+{brief(sum(news.get('granted_ms', 0) for news in step.overtime))} overtime")
    if any(news["event"] == "wind_down" for news in step.overtime):
        words.append("◔ wound down")
    if step.clock is not None:
        verb = {"killed": "killed by", "cancelled": "cancelled by", "abandoned": "given up by"}
        words.append(f"◷ {verb.get(step.ending or '', 'stopped by')} {step.clock.owner_in_words(step.id)[:50]}")
    elif step.status is Status.FAILED and step.error is not None:
        words.append(f"✗ {step.error.get('code', 'failed')}")
    elif step.status is Status.SKIPPED and step.started_ms is None:
        words.append("skipped")
    return "  ".join(words)


def _describe_times(step: ReportedStep) -> str:
    if step.started_ms is None:
        return WORDS[step.status]
    until = "" if step.ended_ms is None else f" to +{format_duration(step.ended_ms)}"
    of = "" if step.budget_ms is None else f", budget {format_duration(step.budget_ms)}"
    return f"+{format_duration(step.started_ms)}{until}{of}"


def _end_of_timeline(report: Report) -> int:
    last = max((step.ended_ms or 0 for step in report.steps), default=0)
    end = max(report.duration_ms, last, 1)
    if report.budget_ms is not None and end <= report.budget_ms <= end * DEADLINE_IN_SIGHT:
        end = report.budget_ms
    return max(1, round(end * 1.02))


def _ticks(end_ms: int, deadline_ms: int | None) -> list[tuple[str, str]]:
    """Return the marks of the timeline, except under the word "deadline"."""
    steps = [base * 10**power for power in range(0, 4) for base in (1, 2, 5)]
    steps += [unit * count for unit in (60_000, 3_600_000) for count in (0.25, 0.5, 1, 2, 5, 10, 15, 30)]
    steps += [86_400_000 * 2**power for power in range(0, 14)]
    size = int(next((step for step in sorted(steps) if end_ms / step <= TICKS), end_ms))
    taken = range(0) if deadline_ms is None else range(round(deadline_ms - end_ms * 0.2), deadline_ms + 1)
    marks = [at for at in range(0, end_ms, max(1, size)) if at not in taken and at < end_ms * 0.96]
    return [(_percent(at, end_ms), format_duration(at) if at else "0") for at in marks]


def _percent(ms: int, end_ms: int) -> str:
    return f"{100 * ms / end_ms:.3f}%"


@lru_cache
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["seen"] = lambda text: visible(str(text).replace("\r\n", "\n"))
    environment.filters["news"] = news_in_words
    environment.filters["duration"] = lambda ms: format_duration(int(ms))
    return environment.from_string(_asset("page.html.j2"))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
