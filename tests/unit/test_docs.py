"""README and pages: what they quote is what the files say, what they link and name exists, the example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mokgen import settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def links(text: str) -> list[str]:
    """Targets of relative links, without anchors."""
    found = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    return [target for target in found if target and "://" not in target]


def linked(pattern: str) -> list[Path]:
    return [ROOT / target for target in links(README) if re.search(pattern, target)]


def test_the_quoted_spec_is_the_file_s_text() -> None:
    (quoted,) = blocks(README, "yaml")
    specs = linked(r"\.yaml$")
    assert specs and all(spec.read_text(encoding="utf-8").endswith(quoted) for spec in specs)


def test_the_quoted_code_is_the_generated_text() -> None:
    """An excerpt starts inside a function; a program starts at the margin."""
    excerpts = [block for block in blocks(README, "python") if block.startswith(" ")]
    modules = linked(r"^generated/.*\.py$")
    assert excerpts and modules
    for excerpt in excerpts:
        assert all(excerpt in module.read_text(encoding="utf-8") for module in modules)


def test_the_example_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    (program,) = [block for block in blocks(README, "python") if not block.startswith(" ")]
    monkeypatch.chdir(root)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(compile(program, "README.md", "exec"), names)
    out = names["out"]
    assert isinstance(out, torch.Tensor)
    assert out.shape == (64, 256) and out.dtype == torch.bfloat16 and bool(out.isfinite().all())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [target for target in links(page.read_text(encoding="utf-8")) if not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_a_page_exist(page: Path) -> None:
    """`plan/tiles.py` and the like, from the root or from the package; names with a placeholder are left out."""
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|jinja|md|yaml|txt|toml))`", page.read_text(encoding="utf-8"))
    missing = [name for name in named if not any((start / name).exists() for start in places())]
    assert missing == []


def places() -> list[Path]:
    return [ROOT, ROOT / "mokgen", settings.shipped("templates"), ROOT / "docs"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_named_in_a_page_exist(page: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    named = re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8"))
    assert [name for name in named if not any(re.search(rf"\bdef {name}\b", text) for text in texts)] == []


def test_commands_of_the_readme_exist() -> None:
    """Every command of the table, with the options it names."""
    from typer.testing import CliRunner

    from mokgen.cli.app import app

    rows = re.findall(r"^\| (`mokgen .*?`) \| (.*) \|$", README, re.M)
    assert len(rows) > 8
    for commands, words in rows:
        for command in re.findall(r"`mokgen ([\w ]+?)(?: SPEC)?(?:\.\.\.)?`", commands):
            result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, [*command.split(), "--help"])
            assert result.exit_code == 0, command
            for option in re.findall(r"`(-{1,2}[\w-]+)", words):
                assert option in re.sub(r"\x1b\[[0-9;]*m", "", result.stdout), f"{command} {option}"
