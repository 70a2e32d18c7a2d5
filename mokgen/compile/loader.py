"""Import a generated file under a stable module name.

The CuTe DSL reads source text again while it compiles, so a module needs a real file that is never rewritten after
import; the name carries the hash of text and path, and equal files are imported once.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from importlib import util
from pathlib import Path
from types import ModuleType

from mokgen.errors import CompileError

ARGUMENTS_NAME = "ARGUMENTS"  # the table a kernel module must define
ENTRY_NAME = "launch"  # the host function a kernel module must define


def load_source(path: Path) -> ModuleType:
    """Import the generated module at `path`; the same file with the same text gives the same module object."""
    path = path.resolve()
    digest = hashlib.sha256(path.read_bytes() + b"\0" + str(path).encode()).hexdigest()[:16]
    name = f"mokgen_generated_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CompileError("not an importable Python file", where=str(path))
    module = util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: decorators look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def is_kernel_text(text: str) -> bool:
    """True if the text defines ARGUMENTS and `launch` at module level, which makes it a kernel module."""
    names: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {ARGUMENTS_NAME, ENTRY_NAME} <= names


def kernel_files(directory: Path) -> list[Path]:
    """Kernel modules of a directory, sorted by name."""
    return [path for path in sorted(directory.glob("*.py")) if is_kernel_text(path.read_text(encoding="utf-8"))]
