"""`test` and `bench`: what runs the layer."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from mokgen import settings
from mokgen.cli.output import NUMPY_WARNING, Output
from mokgen.cli.specs import Selection, chosen_archs, load
from mokgen.errors import EXIT_FINDING, EXIT_OK

TEST_FILE = "test_kernel.py"


def run_test(spec: str, selection: Selection, output: Output) -> int:
    """Run the generated test of every architecture in a process of its own."""
    documents, code = [], EXIT_OK
    for arch in chosen_archs(selection, load(spec, selection).target.archs):
        with tempfile.TemporaryDirectory(prefix="mokgen-test-") as scratch:
            test = _test_file(spec, selection, arch, Path(scratch))
            done = _pytest(test, output)
        documents.append({"spec": spec, "arch": arch, "exit_code": done, "ok": done == 0})
        code = max(code, EXIT_FINDING if done else EXIT_OK)
    output.document({"ok": code == EXIT_OK, "tests": documents})
    return code


def _test_file(spec: str, selection: Selection, arch: str, scratch: Path) -> Path:
    """With a GPU the artifact's own test, built if need be; without one its text alone, since the CPU runs the plan."""
    import torch

    from mokgen.driver import build

    source = load(spec, selection) if selection.reduced else spec
    overrides = () if selection.reduced else selection.overrides
    if torch.cuda.is_available():
        result = build(source, arch=arch, overrides=overrides)
        assert result.artifact_dir is not None
        return result.artifact_dir / TEST_FILE
    result = build(source, arch=arch, overrides=overrides, out=scratch, emit_only=True)
    return scratch / result.stem / TEST_FILE


def _pytest(test: Path, output: Output) -> int:
    quiet = ("-p", "no:cacheprovider", "-W", f"ignore:{NUMPY_WARNING}:UserWarning")
    command = [sys.executable, "-m", "pytest", "-q", *quiet, str(test)]
    # The artifact may lie in a read-only cache, and pytest's own output must not mix with the JSON document.
    stdout = sys.stderr if output.as_json else None
    environment = settings.python_environment(PYTHONDONTWRITEBYTECODE="1")
    return subprocess.run(command, cwd=test.parent, env=environment, stdout=stdout, check=False).returncode


def run_bench(spec: str, selection: Selection, tokens: int | None, output: Output) -> int:
    """Times of the layer and of what it is compared with, in one run."""
    from mokgen.bench import bench

    source = load(spec, selection)
    name = source if selection.overrides else spec  # an unchanged spec keeps its name in the result
    result = bench(name, tokens, show=lambda line: print(line, file=sys.stderr))
    output.print(f"{result.stem}: T={result.tokens}, {result.pattern} routing, {result.device}")
    output.table("", *result.table())
    output.document(result.to_dict())
    return EXIT_OK
