"""A report as JUnit XML, for the test tab of a CI: one test suite for each level and workload, and in it one test case
for each layer, view and step. What is not known by steps has one case for all of them.

A case fails if a tensor or choice of its layer is outside the noise in its step; it is skipped if none of its rows
could be judged. A report that compared nothing is an error, never a pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from parity.report.evidence import Choice, Partial, Row, Step, times
from parity.report.records import Report

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LISTED = 20
_CaseKey = tuple[str, str, int | None]  # layer, view, step


@dataclass
class _Case:
    """What was found of one layer in one view in one step: lines that fail it, and how much was judged."""

    failures: list[str] = field(default_factory=list)
    judged: int = 0


def junit_xml(report: Report) -> str:
    root = Element("testsuites", name=f"note-parity {report.command}")
    for suite in _suites(report):
        root.append(suite)
    if report.verdict == "nothing compared":
        suite = SubElement(root, "testsuite", name=report.command)
        case = SubElement(suite, "testcase", classname="note-parity", name="compared")
        SubElement(case, "error", message=_clean(report.headline)).text = _clean("\n".join(report.skipped))
    for suite in root:
        _count(suite)
    for attribute in ("tests", "failures", "errors", "skipped"):
        root.set(attribute, str(sum(int(suite.get(attribute, "0")) for suite in root)))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suites(report: Report) -> Iterator[Element]:
    records: list[Row | Partial | Choice] = [*report.rows, *report.partials, *report.choices]
    by_run: dict[tuple[str, str, int], list[Row | Partial | Choice]] = {}
    for record in records:
        by_run.setdefault((record.level, record.workload, record.seed), []).append(record)
    for (level, workload, seed), found in by_run.items():
        suite = Element("testsuite", name=_clean(f"{level}: {workload} (seed {seed})"))
        words = {step.action: step.word for record in found if isinstance(record, Row) for step in record.steps}
        for (layer, view, step), case in _cases(found).items():
            name = f"layer {report.layer_title(layer).strip()}"
            if step is not None:
                name += f", step {step} {words.get(step, '')}".rstrip()
            element = SubElement(suite, "testcase", classname=_clean(f"{level}.{view}"), name=_clean(name))
            _judge(element, case)
        yield suite


def _cases(records: list[Row | Partial | Choice]) -> dict[_CaseKey, _Case]:
    """In the order in which layers and views first appear; their steps ascending."""
    cases: dict[_CaseKey, _Case] = {}
    order: dict[tuple[str, str], None] = {}
    for record in records:
        order[record.layer, record.view] = None
        if isinstance(record, Row) and record.steps:
            for step in record.steps:
                case = cases.setdefault((record.layer, record.view, step.action), _Case())
                case.judged += 1
                if step.bad:
                    case.failures.append(_failed_step(record, step))
            continue
        case = cases.setdefault(
            (record.layer, record.view, None if isinstance(record, Row) else record.action), _Case()
        )
        case.judged += record.verdict != "missing"
        if record.is_different:
            case.failures.append(f"{record.tensor}  {record.phrase}  {_place(record)}")
    # A layer computes every step of the workload: one of which nothing was judged is skipped, not absent.
    steps = {(view, step) for layer, view, step in cases if layer.isdigit() and step is not None}
    for layer, view in [group for group in order if group[0].isdigit()]:
        if (layer, view, None) not in cases:
            for action in sorted(step for other, step in steps if other == view):
                cases.setdefault((layer, view, action), _Case())
    groups = list(order)
    return dict(
        sorted(cases.items(), key=lambda pair: (groups.index(pair[0][:2]), -1 if pair[0][2] is None else pair[0][2]))
    )


def _failed_step(row: Row, step: Step) -> str:
    return (
        f"{row.tensor}  {row.view} error {times(step.ratio)} noise (limit {times(step.limit)})  "
        f"{step.bad} of {step.rows} rows, worst at {step.place}"
    )


def _judge(element: Element, case: _Case) -> None:
    if case.failures:
        more = [f"and {len(case.failures) - _LISTED} more"] if len(case.failures) > _LISTED else []
        failure = SubElement(element, "failure", type="different", message=_clean(case.failures[0]))
        failure.text = _clean("\n".join([*case.failures[:_LISTED], *more]))
    elif not case.judged:
        SubElement(element, "skipped", message="no row of this layer could be judged")


def _place(one: Row | Partial | Choice) -> str:
    if isinstance(one, Partial):
        return f"in request {one.request}"
    place = one.place if isinstance(one, Choice) else one.first_bad
    return f"from {place}" if place else ""


def _count(suite: Element) -> None:
    suite.set("tests", str(len(suite.findall("testcase"))))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(len(suite.findall(f"testcase/{tag}"))))


def _clean(text: str) -> str:
    """Characters that XML cannot hold, as a foreign dump's names may have, become question marks."""
    return _NOT_XML.sub("?", text)
