"""A report as JUnit XML, for the test tab of a CI: one test suite for each level and workload, and in it one test case
for each layer and view.

A case fails if any tensor or choice of the layer is outside the noise; it is skipped if none of its tensors could be
compared. A report that compared nothing is an error, never a pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from parity.report.records import Choice, Report, Row

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LISTED = 20


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
    runs = dict.fromkeys((row.level, row.workload, row.seed) for row in report.rows)
    for level, workload, seed in runs:
        suite = Element("testsuite", name=_clean(f"{level}: {workload} (seed {seed})"))
        rows = [row for row in report.rows if (row.level, row.workload, row.seed) == (level, workload, seed)]
        choices = [c for c in report.choices if (c.level, c.workload, c.seed) == (level, workload, seed)]
        cases = dict.fromkeys((row.layer, row.view) for row in rows)
        cases.update(dict.fromkeys((choice.layer, choice.view) for choice in choices))
        for layer, view in cases:
            title = report.layer_title(layer).strip()
            case = SubElement(suite, "testcase", classname=_clean(f"{level}.{view}"), name=_clean(f"layer {title}"))
            _judge(
                case,
                [row for row in rows if (row.layer, row.view) == (layer, view)],
                [choice for choice in choices if (choice.layer, choice.view) == (layer, view)],
            )
        yield suite


def _judge(case: Element, rows: Iterable[Row], choices: Iterable[Choice]) -> None:
    bad: list[Row | Choice] = [row for row in rows if row.is_different]
    bad += [choice for choice in choices if choice.is_different]
    if bad:
        lines = [f"{one.tensor}  {one.phrase}  {_place(one)}" for one in bad]
        more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
        failure = SubElement(case, "failure", type="different", message=_clean(lines[0]))
        failure.text = _clean("\n".join([*lines[:_LISTED], *more]))
    elif all(row.verdict == "missing" for row in rows) and not list(choices):
        SubElement(case, "skipped", message="no tensor of this layer has a row in common")


def _place(one: Row | Choice) -> str:
    place = one.place if isinstance(one, Choice) else one.first_bad
    return f"from {place}" if place else ""


def _count(suite: Element) -> None:
    suite.set("tests", str(len(suite.findall("testcase"))))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(len(suite.findall(f"testcase/{tag}"))))


def _clean(text: str) -> str:
    """Characters that XML cannot hold, as a foreign dump's names may have, become question marks."""
    return _NOT_XML.sub("?", text)
