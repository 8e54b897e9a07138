"""A report for other programs and other people's pages: Markdown for a pull request, JUnit XML for a CI server."""

from __future__ import annotations

import re
from xml.etree import ElementTree as xml

from ..core.texts import one_line, visible
from .report import MARKS, WORDS, Report, ReportedStep, brief
from .state import Status

# What JUnit files carry of one step's output: readers load them whole.
SYSTEM_OUT_SHOWN = 8_000

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")


# --- Markdown ---------------------------------------------------------------------------------------------


def to_markdown(report: Report) -> str:
    took = brief(report.duration_ms)
    lines = [f"### {MARKS[report.status]} {_code(report.name)} {WORDS[report.status]} in {took}", ""]
    if report.why:
        lines += [_code(report.why), ""]
    if not report.steps:
        return "\n".join(lines)
    of = "" if report.budget_ms is None else f" of {brief(report.budget_ms)}"
    counts = ", ".join(f"{count} {WORDS[status]}" for status, count in report.counts.items())
    lines += [f"{took}{of} · {counts} · run {_code(report.run_id)}", ""]
    lines += ["| | step | status | took | budget | tries | |", "|---|---|---|---:|---:|---:|---|"]
    for step in report.steps:
        cells = (
            MARKS[step.status],
            _code(step.id),
            WORDS[step.status] + (", may fail" if step.continues and step.status.is_bad else ""),
            "" if step.duration_ms is None else brief(step.duration_ms),
            "" if step.budget_ms is None else brief(step.budget_ms),
            str(step.attempts) if step.attempts > 1 else "",
            _code(step.why) if step.why else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    if len(report.critical_path) > 1:
        lines += ["", f"Longest way: {' → '.join(map(_code, report.critical_path))}"]
    for notice in report.warnings:
        lines += ["", f"⚠ {_code(str(notice['code']))}: {_code(str(notice['message']))}"]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """As code, where no markup, mention, link or table border is looked for in it."""
    flat = one_line(text)
    if "|" in flat:  # a table splits at it even inside backticks, and a backslash before it could be one of the text's
        return f"<code>{_PUNCTUATION.sub(lambda found: f'&#{ord(found[0])};', flat)}</code>"
    fence = "`" * (1 + max((len(ticks) for ticks in re.findall("`+", flat)), default=0))
    pad = " " if flat.startswith("`") or flat.endswith("`") or not flat.strip() else ""
    return f"{fence}{pad}{flat}{pad}{fence}"


# --- JUnit ------------------------------------------------------------------------------------------------


def to_junit(report: Report) -> str:
    """A suite for the run, a case for each step; one more for the run where no step explains its failure."""
    suite = xml.Element("testsuite", name=_text(report.name), time=_seconds(report.duration_ms))
    if report.started_at is not None:
        suite.set("timestamp", report.started_at.iso().removesuffix("Z"))
    properties = xml.SubElement(suite, "properties")
    for name, value in (("run_id", report.run_id), ("file", report.file), ("status", report.status.value)):
        xml.SubElement(properties, "property", name=name, value=_text(value))
    for notice in report.warnings:
        text = f"{notice['code']}: {notice['message']}"
        xml.SubElement(properties, "property", name="warning", value=_text(one_line(text, 1000)))
    for step in report.steps:
        suite.append(_case(report, step))
    explained = any(step.has_failed_the_run for step in report.steps) and report.status is Status.FAILED
    if report.status is not Status.SUCCEEDED and not explained:
        case = xml.SubElement(
            suite, "testcase", name="(the run)", classname=_text(report.name), time=_seconds(report.duration_ms)
        )
        _add(case, "error", report.why or WORDS[report.status], _code_of(report.error, report.status))
    cases = suite.findall("testcase")
    for attribute, path in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(case.find(path) is not None for case in cases)))
    suite.set("tests", str(len(cases)))
    suites = xml.Element("testsuites", {key: suite.attrib[key] for key in ("name", "tests", "failures", "errors")})
    suites.set("time", suite.attrib["time"])
    suites.append(suite)
    xml.indent(suites)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{xml.tostring(suites, encoding="unicode")}\n'


def _case(report: Report, step: ReportedStep) -> xml.Element:
    case = xml.Element(
        "testcase", name=_text(step.id), classname=_text(report.name), time=_seconds(step.duration_ms or 0)
    )
    reason = step.why or WORDS[step.status]
    if step.status is Status.SKIPPED or step.status is Status.PENDING:
        _add(case, "skipped", reason, step.reason or step.status.value)
    elif step.status.is_bad and step.continues:  # the run is none the worse for it, and CI must see what we say
        _add(case, "skipped", f"{WORDS[step.status]}, and may: {reason}", _code_of(step.error, step.status))
    elif step.status is Status.FAILED:
        _add(case, "failure", reason, _code_of(step.error, step.status), _detail(step))
    elif step.status.is_bad or step.status is Status.RUNNING:
        _add(case, "error", reason, _code_of(step.error, step.status), _detail(step))
    if output := step.output_text(SYSTEM_OUT_SHOWN):
        xml.SubElement(case, "system-out").text = _text(output)
    return case


def _detail(step: ReportedStep) -> str:
    lines = [str((step.error or {}).get("message", ""))]
    if step.clock is not None:
        clock = step.clock
        lines.append(f"{clock.kind} of {clock.owner}: {clock.limit_ms} ms, rang after {clock.elapsed_ms} ms")
    if step.ending:
        lines.append(f"ending: {step.ending}")
    if step.attempts > 1:
        lines.append(f"tries: {step.attempts}")
    return "\n".join(lines)


def _add(case: xml.Element, kind: str, message: str, type_: str, text: str = "") -> None:
    element = xml.SubElement(case, kind, message=_text(one_line(message, 1000)), type=_text(type_))
    element.text = _text(text) or None


def _code_of(error: dict[str, object] | None, status: Status) -> str:
    return str((error or {}).get("code") or status.value.upper())


def _seconds(ms: int) -> str:
    return f"{ms / 1000:.3f}"


def _text(text: str) -> str:
    """What XML 1.0 cannot carry at all is written out."""
    return _NOT_XML.sub("\ufffd", visible(text))
