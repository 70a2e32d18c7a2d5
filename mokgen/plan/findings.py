"""One broken rule of a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """rule: short name of what is broken; where: kernel, task or region; what: expected and actual."""

    rule: str
    where: str
    what: str
    hint: str = ""

    def __str__(self) -> str:
        return f"[{self.rule}] {self.where}: {self.what}"
