"""The layer in fp64, written straight from its description, and the torch baseline that sets the error budget.

The oracle never sees the stage graph, the plan or a pool table: it loops over experts, so that a full-size layer
streams through one expert's fp64 weights at a time. The baseline is the same loop in fp32 rounded to bf16 exactly where
the kernels round (hidden rows, expert output rows, output); its error against the oracle is what bf16 costs anyway.

Letters: T tokens, E experts, K top-k, H hidden, I intermediate, n rows of one expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mokgen.facts.activations import ACTIVATIONS
from mokgen.lower.layer import ResolvedLayer
from mokgen.reference.inputs import Inputs, Parameters

Tensor = torch.Tensor

ROWS_AT_A_TIME = 8192  # bounds the fp64 copies of one expert's rows; no value depends on it
NORMALIZE_FLOOR = 1e-20  # added to the sum of chosen scores by DeepSeek-V3's router; elsewhere below resolution


NEAR = 2e-6  # some sixteen steps of fp32: what two exponentials and sums may differ by


@dataclass(frozen=True)
class Numbers:
    """Arithmetic of one pass: dtype of products and sums, dtype that stored rows are rounded to (None: not rounded)."""

    compute: torch.dtype
    stored: torch.dtype | None

    def store(self, value: Tensor) -> Tensor:
        return value if self.stored is None else value.to(self.stored).to(self.compute)


EXACT = Numbers(torch.float64, None)
BASELINE = Numbers(torch.float32, torch.bfloat16)


def route(
    layer: ResolvedLayer, logits_TE: Tensor, selection_bias_E: Tensor | None = None, logit_bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose experts. Returns ids (T, K) int32 in falling order of choice and weights (T, K) fp64.

    Choices compare fp32 scores: a NaN ranks with -inf, ties go to the lowest id, experts of closed groups are never
    chosen. Weights are the fp64 scores of the chosen.
    """
    router = layer.router
    logits = logits_TE.float() if logit_bias_E is None else logits_TE.float() + logit_bias_E.float()
    choice = logits if router.order == "topk_then_score" else _score(router.score, logits)
    if selection_bias_E is not None:
        choice = choice + selection_bias_E.float()
    closed = _closed_groups(layer, choice) if router.top_groups < router.groups else None
    ids = _largest(choice, router.top_k, closed)
    exact = logits.double()
    if router.order == "topk_then_score":
        weights = _score(router.score, exact.gather(1, ids))
    else:
        weights = _score(router.score, exact).gather(1, ids)
    if router.normalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + NORMALIZE_FLOOR)
    return ids.int(), weights * router.scale


def near_ties(
    layer: ResolvedLayer, logits_TE: Tensor, selection_bias_E: Tensor | None = None, logit_bias_E: Tensor | None = None
) -> Tensor:
    """True (T,) where two fp32 libraries may choose otherwise: deciding scores differ by less than NEAR of themselves.

    Equal logits tie exactly in any library and are not meant, unless different biases bring them together.
    """
    router = layer.router
    if router.order == "topk_then_score":  # compares logits, which are exact
        return torch.zeros(len(logits_TE), dtype=torch.bool, device=logits_TE.device)
    logits = logits_TE.float() if logit_bias_E is None else logits_TE.float() + logit_bias_E.float()
    choice, biased = _score(router.score, logits.double()), selection_bias_E is not None
    if selection_bias_E is not None:
        choice = choice + selection_bias_E.double()
    near = torch.zeros(len(choice), dtype=torch.bool, device=choice.device)
    if router.top_groups < router.groups:
        groups = _group_scores(layer, choice).sort(dim=1, descending=True).values
        near |= _close(groups[:, router.top_groups - 1 : router.top_groups + 1], biased).any(dim=1)
        choice = choice.masked_fill(_closed_groups(layer, choice), -torch.inf)
    return near | _close(choice.sort(dim=1, descending=True).values[:, : router.top_k + 1], biased).any(dim=1)


def _close(falling: Tensor, biased: bool) -> Tensor:
    """Neighbours of each row that nearly tie; sums with a bias round in steps of the size of their terms, about 1."""
    size = falling[:, :-1].abs()
    gap = falling[:, :-1] - falling[:, 1:]
    return (gap < NEAR * (size.clamp_min(1.0) if biased else size)) & ((gap > 0) | biased)


def _score(kind: str, logits: Tensor) -> Tensor:
    return {"softmax": lambda: logits.softmax(dim=1), "sigmoid": logits.sigmoid}[kind]()


def _largest(values: Tensor, count: int, closed: Tensor | None = None) -> Tensor:
    """Column numbers of the `count` largest values of each row, falling, equal values in rising column order.

    A NaN equals -inf, and a `closed` column comes after every other.
    """
    order = values.masked_fill(values.isnan(), -torch.inf).sort(dim=1, descending=True, stable=True).indices
    if closed is not None:
        order = order.gather(1, closed.int().gather(1, order).sort(dim=1, stable=True).indices)
    return order[:, :count]


def _closed_groups(layer: ResolvedLayer, choice_TE: Tensor) -> Tensor:
    """True (T, E) in the experts of groups that are not among the best `top_groups`."""
    router = layer.router
    closed = torch.ones(len(choice_TE), router.groups, dtype=torch.bool, device=choice_TE.device)
    closed.scatter_(1, _largest(_group_scores(layer, choice_TE), router.top_groups), False)
    return closed.repeat_interleave(layer.num_experts // router.groups, dim=1)


def _group_scores(layer: ResolvedLayer, choice_TE: Tensor) -> Tensor:
    """Score (T, groups) of every group; a NaN in it counts as -inf."""
    shape = (len(choice_TE), layer.router.groups, layer.num_experts // layer.router.groups)
    grouped = choice_TE.masked_fill(choice_TE.isnan(), -torch.inf).reshape(shape)
    if layer.router.group_score == "max":
        return grouped.amax(dim=2)
    return grouped.sort(dim=2, descending=True).values[:, :, :2].sum(dim=2)


def _mlp(
    layer: ResolvedLayer,
    numbers: Numbers,
    x_nH: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_gate_up: Tensor | None = None,
    b_down: Tensor | None = None,
    layout: str = "concatenated",
) -> tuple[Tensor, Tensor]:
    """One expert in `numbers`: hidden = act(x @ gate^T, x @ up^T) (n, I) and y = hidden @ down^T (n, H)."""
    gate_up = x_nH.to(numbers.compute) @ w_gate_up.to(numbers.compute).T
    if b_gate_up is not None:
        gate_up = gate_up + b_gate_up.to(numbers.compute)
    if layout == "interleaved":
        gate, up = gate_up[:, 0::2], gate_up[:, 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=1)
    hidden = numbers.store(ACTIVATIONS[layer.activation].reference(gate, up, layer.alpha, layer.clamp))
    y = hidden @ w_down.to(numbers.compute).T
    if b_down is not None:
        y = y + b_down.to(numbers.compute)
    return hidden, numbers.store(y)


def _pieces(rows: Tensor) -> list[Tensor]:
    return [rows[start : start + ROWS_AT_A_TIME] for start in range(0, len(rows), ROWS_AT_A_TIME)]


@dataclass(frozen=True)
class Rows:
    """What the two GEMMs leave, unweighted, in the dtype of storage: by route (T*K rows) or by token (T rows).

    `hidden` is kept for rounded numbers only: in fp64 a full-size layer would need tens of GB for it and nobody asks.
    """

    hidden: Tensor | None
    y: Tensor


def _no_rows(layer: ResolvedLayer, numbers: Numbers, count: int, inter: int, device: torch.device) -> Rows:
    dtype = numbers.compute if numbers.stored is None else numbers.stored
    hidden = None if numbers.stored is None else torch.zeros(count, inter, dtype=dtype, device=device)
    return Rows(hidden, torch.zeros(count, layer.hidden_size, dtype=dtype, device=device))


def _put(rows: Rows, where: Tensor, hidden: Tensor, y: Tensor) -> None:
    if rows.hidden is not None:
        rows.hidden[where] = hidden.to(rows.hidden.dtype)
    rows.y[where] = y.to(rows.y.dtype)


def expert_rows(layer: ResolvedLayer, inputs: Inputs, parameters: Parameters, numbers: Numbers) -> Rows:
    """Every route through its expert; rows of routes without an expert stay zero."""
    flat = inputs.ids.reshape(-1)
    rows = _no_rows(layer, numbers, flat.numel(), layer.intermediate_size, inputs.x.device)
    for expert in range(layer.num_experts):
        for routes in _pieces((flat == expert).nonzero().flatten()):
            hidden, y = _mlp(
                layer,
                numbers,
                inputs.x[routes // layer.top_k],
                parameters.w_gate_up[expert],
                parameters.w_down[expert],
                None if parameters.b_gate_up is None else parameters.b_gate_up[expert],
                None if parameters.b_down is None else parameters.b_down[expert],
                layer.gate_up_layout,
            )
            _put(rows, routes, hidden, y)
    return rows


def shared_rows(layer: ResolvedLayer, inputs: Inputs, parameters: Parameters, numbers: Numbers) -> Rows | None:
    """Every token through the shared experts; None when the layer has none."""
    if parameters.w_shared_gate_up is None or parameters.w_shared_down is None:
        return None
    rows = _no_rows(layer, numbers, inputs.tokens, layer.shared.intermediate_size, inputs.x.device)
    for tokens in _pieces(torch.arange(inputs.tokens, device=inputs.x.device)):
        up, down = parameters.w_shared_gate_up, parameters.w_shared_down
        _put(rows, tokens, *_mlp(layer, numbers, inputs.x[tokens], up, down))
    return rows


def _weighted_sum(layer: ResolvedLayer, inputs: Inputs, routed: Rows, shared: Rows | None, numbers: Numbers) -> Tensor:
    """Shared part plus the routes in slot order, dropped by selection and never multiplied by zero; (T, H)."""
    shape = (inputs.tokens, layer.hidden_size)
    out = torch.zeros(shape, dtype=numbers.compute, device=inputs.x.device)
    if shared is not None:
        out += shared.y.to(numbers.compute)
        if inputs.shared_gate_logits is not None:
            out *= inputs.shared_gate_logits.to(numbers.compute).sigmoid().unsqueeze(1)
    y = routed.y.reshape(inputs.tokens, layer.top_k, layer.hidden_size)
    for slot in range(layer.top_k):
        ids = inputs.ids[:, slot]
        live = ((ids >= 0) & (ids < layer.num_experts)).nonzero().flatten()
        weight = inputs.weights[live, slot].to(numbers.compute).unsqueeze(1)
        out[live] += weight * y[live, slot].to(numbers.compute)
    return out


def oracle(layer: ResolvedLayer, inputs: Inputs, parameters: Parameters) -> Tensor:
    """The layer's output in fp64 with nothing rounded, (T, H)."""
    routed = expert_rows(layer, inputs, parameters, EXACT)
    return _weighted_sum(layer, inputs, routed, shared_rows(layer, inputs, parameters, EXACT), EXACT)


@dataclass(frozen=True)
class Baseline:
    """Output (T, H) bf16 of the torch pipeline that rounds where the kernels do, and the rows it was made of."""

    out: Tensor
    routed: Rows
    shared: Rows | None


def baseline(layer: ResolvedLayer, inputs: Inputs, parameters: Parameters) -> Baseline:
    """fp32 products and sums; hidden rows, expert rows and output rounded to bf16."""
    with _full_fp32():
        routed = expert_rows(layer, inputs, parameters, BASELINE)
        shared = shared_rows(layer, inputs, parameters, BASELINE)
        out = _weighted_sum(layer, inputs, routed, shared, BASELINE)
        return Baseline(out.to(torch.bfloat16), routed, shared)


@contextmanager
def _full_fp32() -> Iterator[None]:
    """Matrix products in full fp32: TF32 would add an error the kernels do not have."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class PoolTable:
    """Where every route lies in the pool of routed rows, by the definition in docs/architecture.md."""

    block_start: Tensor  # (E+1,) int32
    block_expert: Tensor  # (B,) int32
    block_rows: Tensor  # (B,) int32
    row_token: Tensor  # (B * tile_m,) int32, -1 on padding
    slot_row: Tensor  # (T*K,) int32, -1 for no route


def pool_table(layer: ResolvedLayer, ids_TK: Tensor, tile_m: int) -> PoolTable:
    """Segments by rising expert, each padded to `tile_m` rows; rows of a segment by rising route number."""
    flat = ids_TK.reshape(-1).cpu().long()
    slot_row = torch.full((flat.numel(),), -1, dtype=torch.int32)
    blocks: list[int] = []
    block_expert: list[int] = []
    block_rows: list[int] = []
    row_token: list[Tensor] = []
    for expert in range(layer.num_experts):
        routes = (flat == expert).nonzero().flatten()
        first = sum(blocks) * tile_m
        blocks.append(-(-len(routes) // tile_m))
        slot_row[routes] = torch.arange(first, first + len(routes), dtype=torch.int32)
        tokens = torch.full((blocks[-1] * tile_m,), -1, dtype=torch.int32)
        tokens[: len(routes)] = (routes // layer.top_k).int()
        row_token.append(tokens)
        block_expert += [expert] * blocks[-1]
        block_rows += [min(tile_m, len(routes) - tile_m * block) for block in range(blocks[-1])]
    starts = torch.tensor([0, *blocks]).cumsum(0).int()
    numbers = [torch.tensor(values, dtype=torch.int32) for values in (block_expert, block_rows)]
    return PoolTable(starts, numbers[0], numbers[1], torch.cat(row_token), slot_row)
