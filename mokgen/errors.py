"""Every error mokgen raises on purpose; imports nothing of mokgen.

An error says where it happened, what is wrong and what to do, and carries the exit code of the command line:
1 a finding (a plan, a check or a run that did not hold), 2 the user's spec or arguments, 3 the toolchain or machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

EXIT_OK = 0
EXIT_FINDING = 1
EXIT_USAGE = 2
EXIT_TOOLCHAIN = 3


@dataclass(frozen=True)
class Diagnostic:
    """One fault: `where` is a place (file:line:column, stage, argument), `what` the fact, `hint` the way out."""

    what: str
    where: str = ""
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  hint: {self.hint}" if self.hint else text


class MokgenError(Exception):
    """Base of the family. `str(error)` is the whole message; `diagnostics` holds one entry per fault found together."""

    exit_code = EXIT_FINDING

    def __init__(self, what: str | Iterable[Diagnostic], where: str = "", hint: str = "") -> None:
        self.diagnostics = (Diagnostic(what, where, hint),) if isinstance(what, str) else tuple(what)
        # One positional argument of plain data, so that the error survives pickling between processes.
        super().__init__(self.diagnostics)

    @property
    def what(self) -> str:
        return self.diagnostics[0].what

    @property
    def where(self) -> str:
        return self.diagnostics[0].where

    @property
    def hint(self) -> str:
        return self.diagnostics[0].hint

    def __str__(self) -> str:
        return "\n".join(str(diagnostic) for diagnostic in self.diagnostics)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form printed by `--json`."""
        return {"error": type(self).__name__, "diagnostics": [asdict(diagnostic) for diagnostic in self.diagnostics]}


class UsageError(MokgenError):
    """The command line asks for something impossible: an unknown spec name, a missing file."""

    exit_code = EXIT_USAGE


class SpecError(MokgenError):
    """The spec is not legal: place in the file, field, value, what is allowed."""

    exit_code = EXIT_USAGE


class UnsupportedError(MokgenError):
    """A legal spec for which no kernels exist: names stage, choice and the nearest supported choice."""

    exit_code = EXIT_USAGE


class PlanError(MokgenError):
    """No plan can be made from the stage graph, or a plan knob has no legal value."""


class ResourceError(PlanError):
    """A plan exceeds shared memory, registers or workspace: a table of regions with bytes against the limit."""


class VerifyError(MokgenError):
    """A plan breaks a rule of execution: the edge or pipeline, expected and actual counts."""


class TemplateError(MokgenError):
    """A template does not render: template line and, where there is one, rendered line."""

    exit_code = EXIT_TOOLCHAIN


class CompileError(MokgenError):
    """Generated text does not compile or link: file, the compiler's message, the command to repeat."""

    exit_code = EXIT_TOOLCHAIN


class ToolchainError(MokgenError):
    """A compiler, tool or runtime library is missing or has the wrong version."""

    exit_code = EXIT_TOOLCHAIN


class ArtifactMismatchError(MokgenError):
    """An artifact is damaged or belongs to another ABI, architecture or runtime library: names both sides."""

    exit_code = EXIT_TOOLCHAIN


class ArgumentError(MokgenError, ValueError):
    """A call's tensor or number does not fit the layer: names the argument, its dtype, shape and strides."""


class RoutingError(MokgenError, ValueError):
    """A routing id outside [-1, E): names token, slot and value."""


class DeviceWaitError(MokgenError, RuntimeError):
    """A bounded wait inside a kernel expired; the outputs of that call are invalid."""
