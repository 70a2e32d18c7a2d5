"""Prove generated text clean before it is written: no dead name, no dead branch, no undefined name, readable size.

Parses only; runs nothing and needs no linter installed, so that `emit` gives the same answer on every machine.
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mokgen.errors import Diagnostic, TemplateError

MAX_COLUMNS = 120
MAX_KERNEL_LINES = 450
EXPORTED = frozenset({"ARGUMENTS", "launch"})  # what others read from a kernel module


@dataclass(frozen=True)
class Finding:
    """One fault of a generated file."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def lint(file: str, text: str) -> list[Finding]:
    """All faults of one generated Python file, by line."""
    found = [Finding(file, line, what) for line, what in _line_faults(text)]
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [*found, Finding(file, error.lineno or 0, f"syntax error: {error.msg}")]
    exported = EXPORTED | {name for name in _top_level(tree) if name.startswith("test_")}
    if EXPORTED <= set(_top_level(tree)) and (lines := len(text.splitlines())) > MAX_KERNEL_LINES:
        found.append(Finding(file, lines, f"{lines} lines, a kernel module has at most {MAX_KERNEL_LINES}"))
    for faults in (
        _forbidden_imports(tree),
        _unused_names(tree, exported),
        _constant_branches(tree),
        _undefined_names(tree, text, file),
    ):
        found += [Finding(file, line, what) for line, what in faults]
    return sorted(found, key=lambda finding: (finding.line, finding.what))


def require_clean(files: Mapping[str, str]) -> None:
    """Raise one TemplateError with every fault of the Python files among `files`."""
    found = [finding for name, text in files.items() if name.endswith(".py") for finding in lint(name, text)]
    if found:
        raise TemplateError([Diagnostic(item.what, where=f"{item.file}:{item.line}") for item in found])


def _line_faults(text: str) -> Iterator[tuple[int, str]]:
    if not text.endswith("\n") or text.endswith("\n\n"):
        yield len(text.splitlines()), "file must end with exactly one newline"
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_COLUMNS:
            yield number, f"{len(line)} columns, at most {MAX_COLUMNS}"
        if not line.isascii():
            yield number, "not ASCII"
        if line != line.rstrip():
            yield number, "trailing blanks"


def _forbidden_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if any(alias.name == "*" for alias in node.names):
                yield node.lineno, "star import hides names, `range` among them, from the kernel language"
            if node.module == "__future__":
                yield node.lineno, "future import: @cute.struct needs annotations that are objects"


def _top_level(tree: ast.Module) -> dict[str, int]:
    """Names bound at module level and the line of their first binding."""
    names: dict[str, int] = {}
    for node in tree.body:
        bound: list[str] = []
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        for name in bound:
            names.setdefault(name, node.lineno)
    return names


def _unused_names(tree: ast.Module, exported: frozenset[str] | set[str]) -> Iterator[tuple[int, str]]:
    """Imports, constants, functions and classes of the module that nothing in it reads."""
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for name, line in _top_level(tree).items():
        if name not in read and name not in exported:
            yield line, f"{name} is never used"


def _constant_branches(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Branches whose outcome the text itself decides: only literals and module constants in the test."""
    constants = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.If | ast.IfExp | ast.While):
            continue
        test: ast.expr = node.test
        while isinstance(test, ast.Call) and _last_name(test.func) == "const_expr" and len(test.args) == 1:
            test = test.args[0]
        names = [item.id for item in ast.walk(test) if isinstance(item, ast.Name)]
        calls = any(isinstance(item, ast.Call | ast.Attribute) for item in ast.walk(test))
        if not calls and all(name in constants for name in names):
            yield node.lineno, f"branch on a constant: {ast.unparse(node.test)}"


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _undefined_names(tree: ast.Module, text: str, file: str) -> Iterator[tuple[int, str]]:
    """Names read as globals that neither the module nor Python defines."""
    known = set(_top_level(tree)) | set(dir(builtins)) | {"__name__", "__file__", "__doc__"}
    missing: set[str] = set()
    tables = [symtable.symtable(text, file, "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        at_module = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (at_module or symbol.is_global()) and symbol.get_name() not in known:
                missing.add(symbol.get_name())
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in missing:
            yield node.lineno, f"undefined name {node.id}"
