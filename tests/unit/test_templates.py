"""Rendering: strict names, errors with the template's line, stable blank lines; and the report's rows."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

from mokgen.codegen import templates
from mokgen.codegen.report import Section, render_report
from mokgen.compile.compiler import KernelReport
from mokgen.errors import TemplateError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    environment = templates.environment().overlay(loader=jinja2.FileSystemLoader(tmp_path))
    monkeypatch.setattr(templates, "environment", lambda: environment)
    monkeypatch.setattr(templates, "shipped", lambda name: tmp_path)
    return tmp_path


def test_undefined_names_show_the_line_of_the_template(folder: Path) -> None:
    (folder / "a.jinja").write_text("one\ntwo {{ missing }}\nthree\n", encoding="utf-8")
    with pytest.raises(TemplateError, match="missing") as caught:
        templates.render("a.jinja", {})
    assert caught.value.where == "a.jinja:2"
    assert ">    2 two {{ missing }}" in caught.value.what


def test_syntax_errors_and_missing_templates(folder: Path) -> None:
    (folder / "a.jinja").write_text("one\n{% for x in %}\n", encoding="utf-8")
    with pytest.raises(TemplateError, match=r">    2 \{% for x in %\}"):
        templates.render("a.jinja", {})
    with pytest.raises(TemplateError, match=r"no template b\.jinja"):
        templates.render("b.jinja", {})


def test_blank_lines_are_stable(folder: Path) -> None:
    (folder / "a.jinja").write_text("\n\nx\n\n\n\n{% if no %}\ny\n{% endif %}\n\nz\n\n\n", encoding="utf-8")
    assert templates.render("a.jinja", {"no": False}) == "x\n\n\nz\n"


def kernel_report(**changes: object) -> KernelReport:
    report = KernelReport(
        kernel="forward",
        function="forward_sm_90a",
        arch="sm_90a",
        arguments=(),
        seconds=5.0,
        registers=168,
        stack=0,
        spill_bytes=0,
        local=None,
        smem_bytes=229584,
        threads=512,
        object="kernels.so",
        ptx="",
        cubin="",
        sass={"HGMMA": 8},
    )
    return KernelReport(**{**report.to_dict(), **changes})  # type: ignore[arg-type]


def report(kernel: KernelReport) -> str:
    sections = [Section("Stages", "route -> fc1", "text"), Section("Time", "7.9 ms")]
    return render_report("tiny", "sm_90a", "E = 8", sections, [kernel], {"flavour": "cu12", "versions": {"p": "1"}})


def test_report_states_resources_and_what_is_unknown() -> None:
    text = report(kernel_report())
    assert "| forward | 512 | 168 | 0 B | 0 B | unknown | 229584 B | 5.0 s |" in text
    assert "- forward: 8 HGMMA" in text and "```text\nroute -> fc1\n```" in text and "## Time\n\n7.9 ms" in text
    assert "No spills, no stack frames, no local memory." in text
    assert "- flavour: cu12" in text and "- p: 1" in text


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"spill_bytes": 64}, "64 bytes of register spills"),
        ({"stack": 16}, "stack frame of 16 bytes"),
        ({"local": 8}, "local memory"),
        ({"sass": {"LDL": 3}}, "3 LDL"),
        ({"registers": None, "stack": None, "spill_bytes": None}, "stated no registers"),
    ],
)
def test_report_shows_findings(changes: dict[str, object], finding: str) -> None:
    text = report(kernel_report(**changes))
    assert finding in text and "No spills" not in text
