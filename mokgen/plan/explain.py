"""The plan in words: tables of plain strings for the command line and the build report. No Rich, no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mokgen.facts.arch import ARCHS
from mokgen.lower.build import lower
from mokgen.plan.model import Barrier, KernelPlan, LayerPlan
from mokgen.plan.roles import WARP_THREADS
from mokgen.plan.roofline import roofline
from mokgen.stages.base import TILE_ROWS

MIB = 1024 * 1024


@dataclass(frozen=True)
class Table:
    """A titled table; `notes` follow it, one a line."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Columns aligned by spaces."""
        lines = [self.columns, *self.rows] if self.rows else []
        widths = [max(len(line[index]) for line in lines) for index in range(len(self.columns))] if lines else []
        body = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([line.rstrip() for line in body] + list(self.notes))


def _table(title: str, columns: str, rows: Sequence[Sequence[object]], notes: Sequence[str] = ()) -> Table:
    return Table(
        title, tuple(columns.split("|")), tuple(tuple(str(cell) for cell in row) for row in rows), tuple(notes)
    )


def summary(plan: LayerPlan) -> str:
    """What the plan comes to, in three lines."""
    layer, kernel, times = plan.layer, plan.kernel("forward"), roofline(plan)
    shared = f", shared expert of width {layer.shared.intermediate_size}" if layer.shared.num else ""
    device = ARCHS[plan.arch].device
    return (
        f"H {layer.hidden_size}, I {layer.intermediate_size}, {layer.num_local_experts} experts, top {layer.top_k}, "
        f"up to {layer.max_tokens} tokens{shared}.\n"
        f"{len(plan.kernels)} launches ({', '.join(entry.name for entry in plan.kernels)}); forward: "
        f"{kernel.threads} threads, {kernel.shared_bytes} bytes of shared memory, "
        f"workspace {plan.workspace_bytes / MIB:.1f} MiB.\n"
        f"Estimate for {layer.max_tokens} tokens on one {device.name}: {times.expected * 1e3:.3f} ms; "
        f"the useful FLOPs alone at the dense rate: {times.dense * 1e3:.3f} ms."
    )


def sections(plan: LayerPlan) -> list[tuple[str, str, str]]:
    """(title, text, language of the fence) of every part, for the report and the command line."""
    graph = lower(plan.layer)
    return [("Stage graph", graph.to_text().rstrip(), "text")] + [
        (table.title, table.text(), "text") for table in tables(plan)
    ]


def tables(plan: LayerPlan) -> list[Table]:
    found = [_launches(plan)]
    for kernel in plan.kernels:
        if kernel.queues:
            found += [_tasks(kernel), _order(kernel), _roles(plan, kernel), _shared(plan, kernel), _pipelines(kernel)]
    return [*found, _memory(plan), _counters(plan), _choices(plan), _padding(plan), _times(plan)]


def _launches(plan: LayerPlan) -> Table:
    rows = []
    for kernel in plan.kernels:
        arguments = ", ".join(argument.name for argument in kernel.arguments)
        rows.append((kernel.name, kernel.grid, kernel.cluster, kernel.threads, kernel.shared_bytes, arguments))
    return _table("Launches", "kernel|grid|cluster|threads|shared bytes|arguments", rows)


def _tasks(kernel: KernelPlan) -> Table:
    rows = []
    for kind in kernel.kinds:
        space = kind.space
        tile = f"{space.tile_rows} x {space.tile_columns}"
        waits = "; ".join(wait.text() for wait in kind.waits) or "-"
        signals = "; ".join(signal.text() for signal in kind.signals) or "-"
        steps = ", ".join(dict.fromkeys(step.role for step in kind.steps))
        depth = space.k_blocks or "-"
        rows.append((kind.code, kind.name, space.rows, tile, space.column_tiles, depth, waits, signals, steps))
    notes = ["waits and signals index counters by the task's row block or slab"]
    return _table("Tasks", "code|kind|rows|tile|column tiles|K blocks|waits|signals|roles", rows, notes)


def _order(kernel: KernelPlan) -> Table:
    rows = []
    for queue in kernel.queues:
        phases = []
        for phase in queue.phases:
            kinds = ", then ".join(phase.kinds)
            phases.append(f"for each slab: {kinds}" if phase.sliced else kinds)
        claimers = ", ".join(
            f"{role} (after {before})" if before else role
            for role, before in zip(queue.claimers, queue.after, strict=True)
        )
        rows.append((queue.name, queue.ticket, claimers, "; ".join(phases)))
    assert kernel.tiles is not None
    groups = f"groups of {kernel.tiles.group_blocks} row blocks"
    notes = [f"expert by expert; inside an expert {groups}, of a group row blocks first, then column tiles"]
    return _table("Task order", "queue|ticket|claimed by|order", rows, notes)


def _roles(plan: LayerPlan, kernel: KernelPlan) -> Table:
    arch, rows, total = ARCHS[plan.arch], [], 0
    for role in kernel.roles:
        last = role.first_warp + role.num_warps - 1
        registers = WARP_THREADS * role.num_warps * role.registers
        total += registers
        warps = str(role.first_warp) if role.num_warps == 1 else f"{role.first_warp}-{last}"
        rows.append((role.code, role.name, warps, role.registers, registers))
    notes = [f"{total} of {arch.registers_per_sm} registers"]
    return _table("Warp roles", "code|role|warps|registers per thread|registers", rows, notes)


def _shared(plan: LayerPlan, kernel: KernelPlan) -> Table:
    limit = ARCHS[plan.arch].smem_bytes_per_cta
    rows = [(region.name, region.offset, region.bytes, region.meaning) for region in kernel.shared]
    notes = [f"{kernel.shared_bytes} of {limit} bytes, {limit - kernel.shared_bytes} free"]
    return _table("Shared memory of a forward CTA", "region|offset|bytes|holds", rows, notes)


def _arrivals(barrier: Barrier) -> str:
    return f"{barrier.arrivals} ({', '.join(f'{party.role}: {party.unit}' for party in barrier.parties)})"


def _pipelines(kernel: KernelPlan) -> Table:
    rows: list[tuple[object, ...]] = [
        (entry.name, entry.stages, _arrivals(entry.full), _arrivals(entry.empty)) for entry in kernel.pipelines
    ]
    rows += [
        (entry.name, f"named x {entry.copies}", f"{entry.threads} threads", "-") for entry in kernel.named_barriers
    ]
    return _table("Pipelines", "ring|stages|full arrivals|empty arrivals", rows)


def _memory(plan: LayerPlan) -> Table:
    rows = []
    for region in plan.regions:
        shape = " x ".join(str(extent) for extent in region.shape)
        readers = ", ".join(region.readers)
        rows.append((region.name, region.dtype, shape, region.offset, region.bytes, region.writer, readers))
    notes = [f"peak {plan.workspace_bytes} bytes ({plan.workspace_bytes / MIB:.1f} MiB), the same for every call"]
    return _table("Workspace", "region|dtype|shape|offset|bytes|written by|read by", rows, notes)


def _counters(plan: LayerPlan) -> Table:
    rows = [(entry.name, entry.word, entry.length, entry.purpose, entry.meaning) for entry in plan.counters]
    return _table(
        "Counters", "counter|word|words|purpose|meaning", rows, ["zeroed by the schedule kernel at every call"]
    )


def _choices(plan: LayerPlan) -> Table:
    rows = [(entry.name, entry.value, entry.source, entry.reason) for entry in plan.choices]
    return _table("Knobs", "knob|value|from|default's reason", rows)


def _padding(plan: LayerPlan) -> Table:
    rows = []
    for load in roofline(plan).loads:
        rows.append(
            (
                load.kind,
                load.rows,
                load.padded_rows,
                f"{load.column_waste:.1%}",
                f"{load.k_waste:.1%}",
                f"{load.useful_flops / 1e12:.3f}",
                f"{load.computed_flops / 1e12:.3f}",
                f"{load.waste:.1%}",
            )
        )
    layer = plan.layer
    ragged = layer.num_local_experts * TILE_ROWS / 2 / (layer.max_tokens * layer.top_k)
    notes = [
        f"{layer.max_tokens} tokens, routes spread evenly over the experts",
        f"uneven routes waste half a row block per expert on average: {ragged:.1%} of the routed rows",
    ]
    columns = "kind|rows|with padding|column tail|K tail|useful TFLOP|computed TFLOP|added"
    return _table("Padding", columns, rows, notes)


def _times(plan: LayerPlan) -> Table:
    times, device = roofline(plan), ARCHS[plan.arch].device
    slab = times.reduction
    rows = [
        ("useful FLOPs at the dense rate", f"{times.dense * 1e3:.3f}"),
        ("computed FLOPs at the dense rate", f"{times.computed * 1e3:.3f}"),
        (f"least traffic, {times.traffic_bytes / 1e9:.2f} GB", f"{times.traffic * 1e3:.3f}"),
        (f"hidden rows read {slab.num_slabs} times, under the MMAs", f"{slab.reread * 1e3:.3f}"),
        ("reduction", f"{slab.reduction * 1e3:.3f}"),
        ("reduction left exposed", f"{slab.exposed * 1e3:.3f}"),
        ("forward launch, estimate", f"{times.expected * 1e3:.3f}"),
    ]
    notes = [
        f"{device.name}: {device.matmul_flops_per_second / 1e12:.0f} TFLOP/s and "
        f"{device.copy_bytes_per_second / 1e12:.1f} TB/s, measured; an estimate, no measurement of this layer"
    ]
    return _table("Expected time", "part|ms", rows, notes)
