"""The report of a run in JUnit's XML."""

from __future__ import annotations

import re
from xml.etree import ElementTree as xml
from xml.etree.ElementTree import Element

from ...core.visible_text import one_line, visible
from ...terminal.output import brief
from ..run.state import Status
from .report import Report, ReportedStep
from .words import WORDS, attempts_in_words, news_in_words

SYSTEM_OUT_SHOWN = 8_000  # characters of a step's output in JUnit, which readers load whole
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: Report) -> str:
    """Return a JUnit case for each step, and one for the run if no step explains its failure."""
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


def _case(report: Report, step: ReportedStep) -> Element:
    group = f"{report.name}.finally" if step.is_finally else report.name
    case = xml.Element("testcase", name=_text(step.id), classname=_text(group), time=_seconds(step.worked_ms or 0))
    reason = step.why or WORDS[step.status]
    if step.status is Status.SKIPPED or step.status is Status.PENDING:
        _add(case, "skipped", reason, step.reason or step.status.value)
    elif step.status.is_bad and step.continues:  # it did not fail the run
        _add(case, "skipped", f"{WORDS[step.status]}, which is allowed: {reason}", _code_of(step.error, step.status))
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
        lines.append(f"{clock.kind} of {clock.owner}: {clock.limit_ms} ms, fired after {clock.elapsed_ms} ms")
    if step.ending:
        lines.append(f"ending: {step.ending}")
    if step.attempts > 1:
        lines.append(attempts_in_words(step.attempts) + " over all items" * step.is_per_item)
    lines += [f"+{brief(news['at_ms'])}: {news_in_words(news)}" for news in step.overtime]
    return "\n".join(lines)


def _add(case: Element, kind: str, message: str, type_: str, text: str = "") -> None:
    element = xml.SubElement(case, kind, message=_text(one_line(message, 1000)), type=_text(type_))
    element.text = _text(text) or None


def _code_of(error: dict[str, object] | None, status: Status) -> str:
    return str((error or {}).get("code") or status.value.upper())


def _seconds(ms: int) -> str:
    return f"{ms / 1000:.3f}"


def _text(text: str) -> str:
    """Replace the characters that XML 1.0 cannot hold."""
    return _NOT_XML.sub("\ufffd", visible(text))
