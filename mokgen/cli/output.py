"""What every command shares: printing for people or as JSON, errors to exit codes."""

from __future__ import annotations

import functools
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from mokgen import settings
from mokgen.errors import EXIT_FINDING, MokgenError, UsageError

if TYPE_CHECKING:
    from rich.console import Console


# torch says so where NumPy is not installed; nothing here uses it.
NUMPY_WARNING = "Failed to initialize NumPy"


class Output:
    """Prints for people, or collects one JSON document for `--json`."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    @property
    def console(self) -> Console:
        return _console(False)

    def print(self, text: str = "") -> None:
        """Text as it is, for people only: no markup, no wrapping."""
        if not self.as_json:
            print(text)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table for people only; columns whose cells are all numbers are right-aligned."""
        if self.as_json:
            return
        from rich import box
        from rich.table import Table
        from rich.text import Text

        cells = [[str(cell) for cell in row] for row in rows]
        table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for index, column in enumerate(columns):
            numeric = bool(cells) and all(_is_number(row[index]) for row in cells)
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in cells:
            table.add_row(*[Text(cell) for cell in row])
        with self.console.capture() as drawn:
            self.console.print(table)
        print("\n".join(line.rstrip() for line in drawn.get().splitlines()))

    def document(self, data: Any) -> None:
        """The one JSON document of a command."""
        if self.as_json:
            print(json.dumps(data, indent=1, sort_keys=False))


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace(".", "", 1).lstrip("-").isdigit()


@functools.lru_cache(maxsize=2)
def _console(stderr: bool) -> Console:
    from rich.console import Console

    # A pipe has no width of its own; a table must not be cut there.
    width = None if (sys.stderr if stderr else sys.stdout).isatty() else 160
    return Console(stderr=stderr, highlight=False, width=width)


def error_console() -> Console:
    return _console(True)


def report(error: MokgenError, as_json: bool) -> None:
    """Print an error: JSON on stdout for `--json`, else text on stderr."""
    if as_json:
        print(json.dumps(error.to_dict(), indent=1))
        return
    from rich.text import Text

    console = error_console()
    for entry in error.diagnostics:
        line = Text("error: ", style="bold red")
        line.append(f"{entry.where}: " if entry.where else "", style="bold")
        line.append(entry.what, style="default")
        console.print(line, soft_wrap=True)
        if entry.hint:
            console.print(Text(f"  hint: {entry.hint}", style="cyan"), soft_wrap=True)


def command(function: Callable[..., int | None]) -> Callable[..., None]:
    """Wrap a command: MokgenErrors and refused paths become messages and exit codes; a number is the exit code."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        as_json = bool(kwargs.get("as_json"))
        warnings.filterwarnings("ignore", message=NUMPY_WARNING)
        try:
            logging.basicConfig(level=settings.LOG.get().upper(), format="%(levelname)s %(name)s: %(message)s")
            code = function(*args, **kwargs)
        except MokgenError as error:
            report(error, as_json)
            raise typer.Exit(error.exit_code) from None
        except BrokenPipeError:
            raise typer.Exit(EXIT_FINDING) from None
        except OSError as error:
            if error.filename is None:
                raise
            refused = UsageError(error.strerror or str(error), str(error.filename), "a path that can be written")
            report(refused, as_json)
            raise typer.Exit(refused.exit_code) from None
        raise typer.Exit(code or 0)

    return wrapped
