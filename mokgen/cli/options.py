"""Arguments that several commands take, spelled once."""

from __future__ import annotations

from typing import Annotated

import typer

Spec = Annotated[str, typer.Argument(metavar="SPEC", help="A YAML file, or the name of a shipped spec as dsv3.")]
Specs = Annotated[list[str], typer.Argument(metavar="SPEC...", help="YAML files, or names of shipped specs as dsv3.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Replace a field, as router.top_k=4. Repeatable, goes last."),
]
Arch = Annotated[
    list[str] | None,
    typer.Option("--arch", metavar="ARCH", help="Architecture in place of target.archs, as sm_90a. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Reduced = Annotated[
    bool, typer.Option("--reduced", help="Take the reduced twin: same structure, small enough for the CPU.")
]
