"""The command line: arguments in, tables or JSON out. Each command does its work in another room, imported when run.

Exit codes: 0 ok, 1 finding, 2 usage or spec, 3 toolchain. Only a bug of mokgen prints a traceback.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line of this process and exit."""
    from mokgen.cli.app import app

    app()
