"""Our chat format against a template: agreement, each rule changed, templates that fail.

The template shows that `check_template` compares, not that the format is the released one.
"""

from pathlib import Path

import pytest
from prompt_texts import TEMPLATE, TOOLS_TEXT, user

from reference.prompt import render_template
from reference.prompt_check import check_template, read_template, read_tools_text
from reference.prompt_messages import PromptError


def test_a_template_of_these_rules_is_verified() -> None:
    checked = check_template(TEMPLATE)
    assert (checked.verdict, checked.differences) == ("verified", ())
    assert checked.tools_text_as_rebuilt is False
    assert read_tools_text(TEMPLATE) == TOOLS_TEXT


def test_without_a_template_nothing_is_verified(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None
    assert check_template(read_template(tmp_path)).verdict == "not verified"
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert check_template(read_template(tmp_path)).verdict == "verified"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(PromptError, match="cannot be read"):
        read_template(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "case"),
    [
        ("'<|endofsystem|>'", r"'<|endofsystem|>\n'", "one question, thinking on"),
        ("You are a helpful assistant.", "", "one question, thinking on"),
        ("('' if thinking else '<think>\\n\\n</think>\\n\\n')", "'<think>'", "one question, thinking on"),
        ("{{- '<no_think>' }}", "", "one question, thinking off"),
        ("{{- '<think>\\n' + reasoning.strip() + '\\n</think>\\n\\n' }}", "", "reasoning in the text, thinking on"),
        ("loop.last or loop.nextitem.role != 'tool'", "true", "calls and results, thinking on"),
        ("'<|img|><|imgpad|><|endofimg|>'", r"'<|img|><|imgpad|><|endofimg|>\n'", "an image, thinking on"),
    ],
)  # fmt: skip
def test_a_template_of_other_rules_differs(old: str, new: str, case: str) -> None:
    assert old in TEMPLATE
    checked = check_template(TEMPLATE.replace(old, new))
    assert checked.verdict == "differs"
    first = checked.differences[0]
    assert first.case == case
    assert first.expected[: first.at] == first.actual[: first.at]
    assert first.expected[first.at : first.at + 1] != first.actual[first.at : first.at + 1]


@pytest.mark.parametrize(
    "template", ["{{", "{{ ''.__class__.__mro__ }}", "{{ raise_exception('no') }}", "{{ 1 // 0 }}"]
)
def test_templates_that_fail_are_named(template: str) -> None:
    with pytest.raises(PromptError, match=r"chat_template\.jinja: "):
        render_template(template, [user()])


@pytest.mark.parametrize("template", ["x", "<|system|>S{{ tools }}<|endofsystem|>"])
def test_templates_without_a_list_of_tools_are_named(template: str) -> None:
    with pytest.raises(PromptError, match=r"does not (list tools|write a tool)"):
        read_tools_text(template)
