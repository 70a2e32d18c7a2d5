"""run: one call of a layer on the CPU, from tensors to outputs and every buffer on the way.

Values round where the kernels do: fp32 sums, bf16 hidden and y rows, the slot sum in fp32, one rounding of the output.
The routing contract holds as on a GPU: id -1 is no route, an id outside [-1, E) raises or is recorded and left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from mokgen.errors import ArgumentError, RoutingError, UnsupportedError, VerifyError
from mokgen.execute.state import Buffer, State, UnwrittenReadError, poisoned
from mokgen.execute.workers import run_in_order, run_interleaved
from mokgen.ir.requests import Argument
from mokgen.lower.layer import ResolvedLayer
from mokgen.plan.model import KernelPlan, LayerPlan
from mokgen.plan.tasks import Problem, instantiate, quantities
from mokgen.stages.registry import STAGES

Tensor = torch.Tensor
MAX_FLOPS = 2 * 10**10
MAX_BYTES = 10**9
TICKET = "ticket"
ID_TYPES = (torch.int32, torch.int64)
WEIGHT_TYPES = (torch.float32, torch.bfloat16)


def run(
    plan: LayerPlan, tensors: Mapping[str, Tensor | None], order: str | int = TICKET, virtual_ctas: int = 4
) -> dict[str, Tensor]:
    """Run one call and return "out" (T, H) bf16 and every buffer by region name.

    tensors: the op's arguments by name; `ids` (T, K) and `topk_weights` (T, K), or `logits` (T, E) and its biases.
    order: "ticket", or a seed of an interleaving of `virtual_ctas` CTAs.
    Buffers are trimmed to the call: row_token (128 B,), hidden (128 B, I), y (128 B, H), and so on, B row blocks. The
    result also has the routes used (`ids`, `topk_weights`) and, where an id was outside [-1, E), `wrong_id` (3,) int64:
    token, slot, value of the first.
    """
    given = {name: value for name, value in tensors.items() if value is not None}
    kernel = plan.kernel("forward")
    if "ids" not in given:
        given |= route(plan, given)
    _check_arguments(plan, kernel, given)
    result = {name: given[name] for name in ("ids", "topk_weights")}
    wrong = _wrong_id(plan.layer, given["ids"])
    if wrong is not None:
        result["wrong_id"] = wrong
    if len(given["x"]) == 0:
        return {**result, "out": torch.empty(0, plan.layer.hidden_size, dtype=torch.bfloat16)}
    tables = STAGES["schedule"].reference(plan.layer, given)
    problem = Problem(len(given["x"]), tuple(tables["block_start"].diff().tolist()))
    _check_size(kernel, problem, given)
    buffers = _buffers(plan, kernel, problem, tables)
    state = State(plan, kernel, given, buffers)
    tasks = {queue.name: instantiate(kernel, problem, queue.name) for queue in kernel.queues}
    if order == TICKET:
        run_in_order(state, tasks)
    elif isinstance(order, int) and virtual_ctas > 0:
        run_interleaved(state, tasks, order, virtual_ctas)
    else:
        raise ArgumentError(f"order {order!r}, {virtual_ctas} CTAs", "order", 'order is "ticket" or a whole number')
    _check_finished(kernel, state)
    return {**result, **{name: buffer.value for name, buffer in buffers.items()}}


def route(plan: LayerPlan, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """ids (T, K) int32 and topk_weights (T, K) fp32 from logits (T, E) and the biases the router has."""
    given = {name: value for name, value in tensors.items() if value is not None}
    if plan.layer.router.input != "logits":
        raise ArgumentError("the layer takes ids and topk_weights, not logits", where="ids")
    needed = [argument for argument in plan.kernel("route").arguments if argument.name not in ("ids", "weights")]
    _check_shapes(needed, given)
    return STAGES["route"].reference(plan.layer, given)


def _check_arguments(plan: LayerPlan, kernel: KernelPlan, given: Mapping[str, Tensor]) -> None:
    inputs = [argument for argument in kernel.arguments if argument.shape is not None]
    inputs = [argument for argument in inputs if argument.name not in ("out", "workspace")]
    ids = Argument("ids", "int32", ("T", plan.layer.top_k))
    _check_shapes([*inputs, ids], given)
    if given["ids"].dtype not in ID_TYPES:
        raise ArgumentError(f"dtype {given['ids'].dtype}", "ids", "int32 or int64")
    if given["topk_weights"].dtype not in WEIGHT_TYPES:
        raise ArgumentError(f"dtype {given['topk_weights'].dtype}", "topk_weights", "float32 or bfloat16")
    if len(given["x"]) > plan.layer.max_tokens:
        raise ArgumentError(f"{len(given['x'])} tokens, built for at most {plan.layer.max_tokens}", "x")


def _check_shapes(arguments: list[Argument], given: Mapping[str, Tensor]) -> None:
    """Every argument is there and has the plan's extents; equal names are equal extents."""
    named: dict[str, int] = {}
    for argument in arguments:
        assert argument.shape is not None
        if argument.name not in given:
            listed = ", ".join(entry.name for entry in arguments)
            raise ArgumentError("missing", argument.name, f"the layer takes {listed}")
        shape = tuple(given[argument.name].shape)
        wanted = (
            tuple(
                named.setdefault(extent, shape[0]) if isinstance(extent, str) else extent for extent in argument.shape
            )
            if len(shape) == len(argument.shape)
            else argument.shape
        )
        if shape != wanted:
            raise ArgumentError(f"shape {shape}, expected {wanted}", argument.name)


def _wrong_id(layer: ResolvedLayer, ids: Tensor) -> Tensor | None:
    """Token, slot and value of the first id outside [-1, E); raised where the layer checks."""
    wrong = ((ids < -1) | (ids >= layer.num_experts)).nonzero()
    if not len(wrong):
        return None
    token, slot = (int(place) for place in wrong[0])
    value = int(ids[token, slot])
    if layer.checks == "checked":
        raise RoutingError(f"id {value} of token {token}, slot {slot} is outside [-1, {layer.num_experts})", "ids")
    return torch.tensor([token, slot, value], dtype=torch.int64)


def _row_counts(kernel: KernelPlan, problem: Problem) -> dict[str, tuple[int, int]]:
    """Rows of each tensor that tasks write, and the columns of one of their tiles; the output ends with the tokens."""
    counts = quantities(kernel, problem)
    found = {}
    for kind in kernel.kinds:
        for access in kind.writes:
            rows = counts[kind.space.rows] * kind.space.tile_rows
            rows = problem.tokens if kind.space.rows == "token_blocks" else rows
            found[access.tensor] = (rows, kind.space.tile_columns)
    return found


def _buffers(plan: LayerPlan, kernel: KernelPlan, problem: Problem, tables: Mapping[str, Tensor]) -> dict[str, Buffer]:
    """Tables of the schedule, written; a poisoned buffer for each tensor the tasks write."""
    buffers = {name: Buffer(name, value, 1, written=True) for name, value in tables.items()}
    extents = {region.name: (region.dtype, region.shape[1]) for region in plan.regions if len(region.shape) == 2}
    extents |= {
        argument.name: (argument.dtype, int(argument.shape[1]))
        for argument in kernel.arguments
        if argument.name == "out" and argument.shape is not None
    }
    for name, (rows, cell) in _row_counts(kernel, problem).items():
        dtype, columns = extents[name]
        if plan.has_region(name) and rows > plan.region(name).shape[0]:
            raise VerifyError(f"{rows} rows in a region of {plan.region(name).shape[0]}", where=name)
        buffers[name] = Buffer(name, poisoned((rows, columns), dtype), cell, written=False)
    return buffers


def _check_size(kernel: KernelPlan, problem: Problem, given: Mapping[str, Tensor]) -> None:
    """Refuse calls that would take minutes or swap: those are for a GPU, or for the layer's reduced twin."""
    assert kernel.tiles is not None
    counts, flops = quantities(kernel, problem), 0
    for kind in kernel.kinds:
        space = kind.space
        columns = space.column_tiles * kernel.tiles.tile_n
        flops += 2 * counts[space.rows] * space.tile_rows * columns * space.k_blocks * kernel.tiles.tile_k
    size = sum(value.numel() * value.element_size() for value in given.values())
    columns_of = {access.tensor: kind.space.columns for kind in kernel.kinds for access in kind.writes}
    size += sum(2 * prod((rows, columns_of[name])) for name, (rows, _) in _row_counts(kernel, problem).items())
    for amount, limit, unit in ((flops, MAX_FLOPS, "FLOP"), (size, MAX_BYTES, "bytes")):
        if amount > limit:
            raise UnsupportedError(
                f"{amount:.2e} {unit} on the CPU executor, which stops at {limit:.0e}",
                where="CPU executor",
                hint="fewer tokens, a GPU, or the reduced twin of the layer (same structure, small sizes)",
            )


def _check_finished(kernel: KernelPlan, state: State) -> None:
    """Every cell that tasks write is written; a plan that leaves one out has lost a task."""
    for kind in kernel.kinds:
        for access in kind.writes:
            if not bool(state.buffers[access.tensor].written.all()):
                raise UnwrittenReadError(f"cells of {access.tensor} are never written", where=kind.name)
