"""`check`, `plan`, `verify`: what is known of a layer without torch or a compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mokgen.cli.output import Output, report
from mokgen.cli.specs import Planned, Selection, planned
from mokgen.errors import EXIT_FINDING, EXIT_OK, MokgenError


def check(specs: Sequence[str], selection: Selection, output: Output) -> int:
    """Every spec is judged; the worst exit code wins."""
    code, documents = EXIT_OK, []
    for name in specs:
        document: dict[str, Any] = {"spec": name, "ok": True}
        try:
            findings = [(each, finding) for each in planned(name, selection) for finding in _findings(each)]
        except MokgenError as error:
            code = max(code, error.exit_code)
            document |= {"ok": False, **error.to_dict()}
            if not output.as_json:
                report(error, False)
        else:
            document |= {"ok": not findings, "findings": [asdict(finding) for _, finding in findings]}
            code = max(code, EXIT_FINDING if findings else EXIT_OK)
            _print_findings(findings, output)
            output.print(f"{name}: {'the plan does not hold' if findings else 'ok'}")
        documents.append(document)
    output.document({"ok": code == EXIT_OK, "specs": documents})
    return code


def prove(specs: Sequence[str], selection: Selection, output: Output) -> int:
    """Findings of `verify` for every spec and architecture, with the sizes of what was proven."""
    rows, findings = [], []
    for name in specs:
        for each in planned(name, selection):
            found = _findings(each)
            findings += [(each, finding) for finding in found]
            rows.append((name, each.arch, *_sizes(each), len(found)))
    columns = ("spec", "arch", "kernels", "task kinds", "waits", "pipelines", "regions", "findings")
    output.table("", columns, rows)
    _print_findings(findings, output)
    documents = [{"spec": each.name, "arch": each.arch, **asdict(finding)} for each, finding in findings]
    output.document(
        {"ok": not findings, "plans": [dict(zip(columns, row, strict=True)) for row in rows], "findings": documents}
    )
    return EXIT_FINDING if findings else EXIT_OK


def show(spec: str, selection: Selection, mermaid: bool, svg: Path | None, output: Output) -> int:
    """Print the plan in the words of `plan.explain`; or only the stage graph."""
    from mokgen.lower.build import lower
    from mokgen.plan import explain

    plans = list(planned(spec, selection))
    graph = lower(plans[0].layer)
    if svg is not None:
        from mokgen.cli.svg import draw

        svg.write_text(draw(graph), encoding="utf-8")
        output.print(f"{svg} written")
    if mermaid:
        output.print(graph.to_mermaid())
    if not mermaid and svg is None:
        for each in plans:
            output.print(f"{spec} for {each.arch}\n\n{explain.summary(each.plan)}")
            for title, text, _ in explain.sections(each.plan):
                output.print(f"\n{title}\n{'-' * len(title)}\n{text}")
    output.document(
        {
            "spec": spec,
            "mermaid": graph.to_mermaid(),
            "plans": [{"arch": each.arch, "plan": each.plan.to_dict()} for each in plans],
        }
    )
    return EXIT_OK


def _findings(each: Planned) -> list[Any]:
    from mokgen.plan.verify import verify

    return list(verify(each.plan))


def _sizes(each: Planned) -> tuple[int, ...]:
    kernels = each.plan.kernels
    kinds = [kind for kernel in kernels for kind in kernel.kinds]
    return (
        len(kernels),
        len(kinds),
        sum(len(kind.waits) for kind in kinds),
        sum(len(kernel.pipelines) for kernel in kernels),
        len(each.plan.regions),
    )


def _print_findings(findings: Sequence[tuple[Planned, Any]], output: Output) -> None:
    for each, finding in findings:
        hint = f"\n  hint: {finding.hint}" if finding.hint else ""
        output.print(f"{each.name} ({each.arch}): {finding.where}: {finding.what}{hint}")
