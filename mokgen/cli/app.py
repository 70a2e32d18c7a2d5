"""The commands and their arguments. What a command prints stands in a module of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mokgen.cli import options
from mokgen.cli.output import Output, command
from mokgen.cli.specs import Selection

app = typer.Typer(
    name="mokgen",
    help="Mixture-of-experts layers as specialised GPU kernels, generated from a YAML spec.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cache_app = typer.Typer(help="Look at the artifact cache.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")


def _version(value: bool) -> None:
    if value:
        import mokgen

        print(f"mokgen {mokgen.__version__}")
        raise typer.Exit()


@app.callback()
def _app(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Global options."""


def _selection(overrides: list[str] | None, archs: list[str] | None, reduced: bool) -> Selection:
    return Selection(tuple(overrides or ()), tuple(archs or ()), reduced)


@app.command("build")
@command
def build_command(
    specs: options.Specs,
    overrides: options.Set = None,
    archs: options.Arch = None,
    out: Annotated[Path | None, typer.Option(help="Write the generated text to OUT/<spec name>/.")] = None,
    emit_only: Annotated[
        bool, typer.Option("--emit-only", help="Write the text (default: to generated/), compile nothing.")
    ] = False,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="Also write OUT/<spec name>_standalone/, which needs no mokgen.")
    ] = False,
    jobs: Annotated[int | None, typer.Option("-j", "--jobs", min=1, help="Kernels compiled at a time.")] = None,
    reduced: options.Reduced = False,
    as_json: options.Json = False,
) -> int:
    """Spec to compiled kernels in the cache; no GPU needed."""
    from mokgen.cli.build import BuildOptions, run

    wanted = BuildOptions(out, emit_only, standalone, jobs)
    return run(specs, _selection(overrides, archs, reduced), wanted, Output(as_json))


@app.command("check")
@command
def check_command(
    specs: options.Specs,
    overrides: options.Set = None,
    archs: options.Arch = None,
    reduced: options.Reduced = False,
    as_json: options.Json = False,
) -> int:
    """Tell whether specs are legal and have kernels. No torch, no compiler."""
    from mokgen.cli.plan import check

    return check(specs, _selection(overrides, archs, reduced), Output(as_json))


@app.command("plan")
@command
def plan_command(
    spec: options.Spec,
    overrides: options.Set = None,
    archs: options.Arch = None,
    reduced: options.Reduced = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print the stage graph as Mermaid text only.")] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the stage graph into a file.")] = None,
    as_json: options.Json = False,
) -> int:
    """Show the plan: stage graph, tasks, memory map, resource budget, knobs."""
    from mokgen.cli.plan import show

    return show(spec, _selection(overrides, archs, reduced), mermaid, svg, Output(as_json))


@app.command("verify")
@command
def verify_command(
    specs: options.Specs,
    overrides: options.Set = None,
    archs: options.Arch = None,
    reduced: options.Reduced = False,
    as_json: options.Json = False,
) -> int:
    """Prove the plan: no deadlock, arrival counts, buffer lifetimes, ring reuse, register and memory limits."""
    from mokgen.cli.plan import prove

    return prove(specs, _selection(overrides, archs, reduced), Output(as_json))


@app.command("test")
@command
def test_command(
    spec: options.Spec,
    overrides: options.Set = None,
    archs: options.Arch = None,
    reduced: options.Reduced = False,
    as_json: options.Json = False,
) -> int:
    """Run the generated test: on the GPU if there is one, else by the CPU executor."""
    from mokgen.cli.run import run_test

    return run_test(spec, _selection(overrides, archs, reduced), Output(as_json))


@app.command("bench")
@command
def bench_command(
    spec: options.Spec,
    overrides: options.Set = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens T of a call (default: the spec's maximum).")] = None,
    as_json: options.Json = False,
) -> int:
    """Time the layer beside the dense bound and torch._grouped_mm, queued and isolated. Needs a GPU."""
    from mokgen.cli.run import run_bench

    return run_bench(spec, _selection(overrides, None, False), tokens, Output(as_json))


@cache_app.command("ls")
@command
def cache_ls_command(as_json: options.Json = False) -> int:
    """List the artifacts of the cache."""
    from mokgen.cli.housekeeping import list_cache

    return list_cache(Output(as_json))


@cache_app.command("path")
@command
def cache_path_command(as_json: options.Json = False) -> int:
    """Print the directory of the cache."""
    from mokgen.cli.housekeeping import print_cache_path

    return print_cache_path(Output(as_json))


@app.command("doctor")
@command
def doctor_command(as_json: options.Json = False) -> int:
    """Check what this machine can do: compile, inspect, load, run."""
    from mokgen.cli.doctor import run

    return run(Output(as_json))


@app.command("schema")
@command
def schema_command(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/spec.md instead.")] = False,
    as_json: options.Json = False,
) -> int:
    """Print the JSON schema of a spec file."""
    from mokgen.cli.housekeeping import print_schema

    return print_schema(markdown, Output(as_json))
