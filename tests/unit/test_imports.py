"""The dependency rule, read from the source: who imports whom, who reads the environment, how long files are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mokgen"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 500

# Each room may import itself, and what stands before it in the chain.
CHAIN = ["errors", "settings", "facts", "spec", "ir", "stages", "lower", "plan", "codegen", "driver", "cli"]
LEAVES = {"errors", "settings", "facts"}
ANYONE = {"errors", "settings", "lower.layer"}  # lower/layer.py imports nothing

ALLOWED: dict[str, set[str]] = {room: set(CHAIN[: index + 1]) for index, room in enumerate(CHAIN)}
ALLOWED["errors"] = {"errors"}
ALLOWED["compile"] = {"compile", *LEAVES}
ALLOWED["cache"] = {"cache", "compile", *LEAVES}
ALLOWED["device"] = {"device"}
ALLOWED["execute"] = {"execute", "plan", "ir", "stages", "reference", *LEAVES}
ALLOWED["reference"] = {"reference", "spec", "ir", "stages", *LEAVES}
ALLOWED["runtime"] = {"runtime", "cache", "compile", "execute", *LEAVES}
ALLOWED["testing"] = {"testing", "runtime", "reference", "execute", "cache", "spec", *LEAVES}
ALLOWED["bench"] = {"bench", "runtime", "reference", "testing", "cache", "spec", *LEAVES}
ALLOWED["driver"] |= {"compile", "cache"}
ALLOWED["cli"] |= {"compile", "cache", "runtime", "testing", "bench"}
ALLOWED["__main__"] = {"cli"}
# Public names on first use; a path or spec given to load_layer is built by the driver on first use.
LAZY = {("", room) for room in ("codegen", "driver", "plan", "runtime", "spec", "testing")} | {("runtime", "driver")}

NO_TORCH = set(CHAIN) | {"cache", "__main__", ""}
DEVICE_MAY_IMPORT = {"cutlass", "math", "typing", "dataclasses", "collections", "functools", "enum", "operator"}


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement with each module it names; `from mokgen import x` names mokgen.x."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}" if node.module == "mokgen" else str(node.module)


def inner_nodes(tree: ast.Module) -> set[ast.AST]:
    """Nodes that do not run when the module is imported: function bodies and `if TYPE_CHECKING` blocks."""
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if guarded or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner.update(child for statement in node.body for child in ast.walk(statement))
    return inner


def broken(room: str, module: str, lazy: bool) -> bool:
    """Whether `room` may not import `module` of mokgen."""
    name = module.removeprefix("mokgen").lstrip(".")
    if not name or any(name == free or name.startswith(free + ".") for free in ANYONE if room != "errors"):
        return room == "device"
    target = name.split(".")[0]
    if target == "__version__" or target in ALLOWED.get(room, set()):
        return False
    return not (lazy and (room, target) in LAZY)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_chain(path: Path):
    tree = ast.parse(path.read_text())
    room, inner = room_of(path), inner_nodes(tree)
    assert room == "" or room in ALLOWED, f"{room} is no room of the house: add it to ALLOWED"
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} imports {module}"
        for node, module in imports(tree)
        if module.split(".")[0] == "mokgen" and broken(room, module, node in inner)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_imports_stay_out_of_the_light_rooms(path: Path):
    tree = ast.parse(path.read_text())
    room, inner = room_of(path), inner_nodes(tree)
    for node, module in imports(tree):
        top = module.split(".")[0]
        at = f"{path.relative_to(ROOT)}:{node.lineno} imports {module}"
        if room in NO_TORCH:
            assert top not in {"torch", "cutlass"} or node in inner, f"{at} when it is imported"
        if room == "device" and top != "mokgen":
            assert top in DEVICE_MAY_IMPORT, at
        if top == "cutlass":
            assert room in {"device", "compile", "cli"}, at


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_environment_is_read_in_settings_only(path: Path):
    if path == PACKAGE / "settings.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        named = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"}
        brought = (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {"environ", "getenv"} & {alias.name for alias in node.names}
        )
        assert not named and not brought, f"{path.relative_to(ROOT)}:{node.lineno} reads the environment"


@pytest.mark.parametrize(
    "path",
    [
        path
        for folder, pattern in (("mokgen", "*.py"), ("tests", "*.py"), ("templates", "*"), ("generated", "*.py"))
        for path in sorted((ROOT / folder).rglob(pattern))
        if path.is_file() and "__pycache__" not in path.parts
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_files_stay_short_and_ascii(path: Path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert text.isascii()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_stay_short(path: Path):
    limit = 120 if room_of(path) == "device" else 60
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= limit, f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {lines} lines"


@pytest.mark.parametrize(
    ("room", "module", "lazy"),
    [
        ("facts", "mokgen.spec.moe", False),
        ("spec", "mokgen.lower.resolve", False),
        ("plan", "mokgen.codegen.emit", True),
        ("device", "mokgen.facts.arch", False),
        ("device", "mokgen.errors", False),
        ("compile", "mokgen.plan.model", True),
        ("cache", "mokgen.spec.moe", False),
        ("runtime", "mokgen.plan.schedule", False),
        ("runtime", "mokgen.driver", False),
        ("errors", "mokgen.settings", False),
        ("reference", "mokgen.lower.build", False),
    ],
)
def test_the_rule_refuses(room, module, lazy):
    assert broken(room, module, lazy)


@pytest.mark.parametrize(
    ("room", "module", "lazy"),
    [
        ("spec", "mokgen.facts.arch", False),
        ("reference", "mokgen.lower.layer", False),
        ("runtime", "mokgen.driver", True),
        ("device", "mokgen.device.sync", False),
        ("cli", "mokgen.plan.verify", True),
    ],
)
def test_the_rule_allows(room, module, lazy):
    assert not broken(room, module, lazy)


def test_import_of_the_package_is_light():
    code = "import sys, mokgen, mokgen.cli; print([m for m in ('torch', 'cutlass', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
