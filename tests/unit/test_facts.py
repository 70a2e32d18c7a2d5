"""Tables of facts: nothing in them is read by nobody."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from mokgen.facts.arch import ArchTraits, Device
from mokgen.facts.formats import NumberFormat


@pytest.mark.parametrize("table", [ArchTraits, Device, NumberFormat])
def test_every_fact_has_a_reader(root: Path, table: type) -> None:
    """A limit that no rule reads may be wrong for years."""
    readers = [path for path in (root / "mokgen").rglob("*.py") if path.parent.name != "facts"]
    readers += [root / "mokgen" / "facts" / "formats.py"]  # derives bytes from bits
    text = "\n".join(path.read_text(encoding="utf-8") for path in readers)
    unread = [field.name for field in fields(table) if not re.search(rf"\.{field.name}\b", text)]
    assert unread == []
