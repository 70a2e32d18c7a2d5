"""Shared by every test: an own cache directory, GPU tests skipped with a reason, a count of what ran on a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Torch on one thread, here and in child processes: tensors are small, and threads that wait for a busy core spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
# The marker as a property: a report's keywords hold the folder's name too, and tests/gpu has tests for both devices.
NEEDS_GPU = ("needs_gpu", True)
_GPU_TESTS_RUN = 0


def gpu_reason() -> str:
    """Why GPU tests cannot run here; empty where they can."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    return "" if capability == (9, 0) else f"device of compute capability {capability}, kernels exist for (9, 0)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    for item in marked:
        item.user_properties.append(NEEDS_GPU)
    reason = gpu_reason() if marked else ""
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _GPU_TESTS_RUN
    if report.when == "call" and NEEDS_GPU in report.user_properties and not report.skipped:
        _GPU_TESTS_RUN += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"tests run on a GPU: {_GPU_TESTS_RUN}")


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of this run's own, unless the caller chose one: results never depend on what was built before."""
    chosen = os.environ.get("MOKGEN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    path = tmp_path_factory.mktemp("cache")
    path.chmod(0o700)
    os.environ["MOKGEN_CACHE_DIR"] = str(path)
    return path


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT
