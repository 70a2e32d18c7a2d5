"""Plan to text: one module per launch and the layer's test.

Text depends on the plan and the stem alone, so equal plans give equal bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from mokgen.codegen.context import FORWARD_TEMPLATE, forward_context, used_only
from mokgen.codegen.small_kernels import route_context, schedule_context
from mokgen.codegen.templates import render
from mokgen.errors import UnsupportedError
from mokgen.plan.model import LayerPlan

TEST_NAME = "test_kernel.py"


@dataclass(frozen=True)
class SourceBundle:
    """Generated text by file name, kernels in launch order."""

    stem: str
    files: dict[str, str]


def emit(plan: LayerPlan, stem: str) -> SourceBundle:
    """Text of every launch of the plan and of the layer's test. Raises TemplateError."""
    makers = {"route": emit_route, "schedule": emit_schedule, "forward": emit_forward}
    files = {}
    for kernel in plan.kernels:
        if kernel.name not in makers:
            raise UnsupportedError(f"no template for the launch {kernel.name}", where="codegen")
        files[f"{kernel.name}.py"] = makers[kernel.name](plan, stem)
    files[TEST_NAME] = render(f"{TEST_NAME}.jinja", {"STEM": stem, "ARCH": plan.arch, "LAYER": plan.layer})
    return SourceBundle(stem, files)


def emit_forward(plan: LayerPlan, stem: str) -> str:
    """Rendered twice: the first text tells which constants it names."""
    context = forward_context(plan, stem)
    text = render(FORWARD_TEMPLATE, context)
    return render(FORWARD_TEMPLATE, context | {"SECTIONS": used_only(context["SECTIONS"], text)})


def emit_route(plan: LayerPlan, stem: str) -> str:
    return render("route.py.jinja", route_context(plan, stem))


def emit_schedule(plan: LayerPlan, stem: str) -> str:
    return render("schedule.py.jinja", schedule_context(plan, stem))
