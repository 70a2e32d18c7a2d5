"""mokgen: mixture-of-experts layers as specialised GPU kernels, generated from a YAML spec.

Public names are loaded on first use, so that `import mokgen` needs neither torch nor the CuTe DSL.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mokgen.codegen.emit import emit
    from mokgen.driver import build
    from mokgen.plan.schedule import make_plan
    from mokgen.runtime.layer import compile_count, load_artifact, load_layer
    from mokgen.spec.load import load_spec
    from mokgen.testing import check_layer

__version__ = "0.1.0"
__all__ = [
    "build",
    "check_layer",
    "compile_count",
    "emit",
    "load_artifact",
    "load_layer",
    "load_spec",
    "make_plan",
]

_HOMES = {
    "build": "mokgen.driver",
    "check_layer": "mokgen.testing",
    "compile_count": "mokgen.runtime.layer",
    "emit": "mokgen.codegen.emit",
    "load_artifact": "mokgen.runtime.layer",
    "load_layer": "mokgen.runtime.layer",
    "load_spec": "mokgen.spec.load",
    "make_plan": "mokgen.plan.schedule",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mokgen' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
