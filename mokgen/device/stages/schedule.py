"""Where every route's row lies in the pool: count the routes of each expert, then place them.

A route is one slot of one token: route = token * K + slot. Routes are cut into contiguous parts, one per warp of a
cluster; a warp counts its part expert by expert and so knows each route's rank among equals of its part. Adding what
lower warps and lower CTAs counted turns ranks into rows. Every sum has a fixed order and no atomic is used, so the
tables are the same in every run. Several clusters may run: all of them count everything, each places its share, and
none waits for another.

The CTAs of a cluster send each other their counts by asynchronous stores that complete on the receiver's mbarrier: the
only cluster barrier comes first, while there is nothing to order, since a releasing one waits for all global stores.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Constexpr, Int32, Int64, Uint32, const_expr, range_constexpr

from mokgen.device import warp

LANES = warp.WARP_LANES
NO_ROUTE = -1
NO_INVALID = 0x7FFFFFFF  # "first invalid route" of a part that has none


class Shape(NamedTuple):
    """Compile-time numbers of the schedule."""

    num_experts: Constexpr
    top_k: Constexpr
    tile_m: Constexpr  # rows of a row block
    clusters: Constexpr
    cluster_ctas: Constexpr
    warps: Constexpr  # of a CTA
    routes_per_lane: Constexpr  # ids a lane loads before the first is counted


class Ids(NamedTuple):
    """The ids tensor, read as int32 words."""

    words: cute.Tensor  # (T, K * words_per_id) int32
    words_per_id: Int32  # 1: int32 ids; 2: int64 ids, low word first


class Tables(NamedTuple):
    """What the schedule writes (all int32)."""

    counters: cute.Tensor  # (COUNTER_WORDS,)
    block_start: cute.Tensor  # (E + 1,)
    block_expert: cute.Tensor  # (B_MAX,)
    block_rows: cute.Tensor  # (B_MAX,)
    row_token: cute.Tensor  # (P_MAX,)
    slot_row: cute.Tensor  # (T_MAX * K,)


class Counts(NamedTuple):
    """Shared memory of one CTA (all int32). Bin E takes routes that go nowhere."""

    part: cute.Tensor  # (warps, E + 1): routes per bin of each warp's part, later the sum over lower warps
    ctas: cute.Tensor  # (cluster_ctas, E + 1): routes per expert of each CTA; bin E: its first invalid route
    arrived: cute.Pointer  # mbarrier that completes when all of `ctas` is there
    total: cute.Tensor  # (E,): routes per expert
    start: cute.Tensor  # (E + 1,): first row block of each expert
    base: cute.Tensor  # (E + 1,): first row of this CTA's routes of each expert
    scan: cute.Tensor  # (32,): warp sums of the prefix over experts
    invalid: cute.Tensor  # (32,): first invalid route of each warp's part


class Place(NamedTuple):
    """The calling thread and the routes of its warp."""

    cluster: Int32
    cta: Int32  # rank in the cluster
    warp: Int32  # in the CTA
    lane: Int32
    thread: Int32  # in the CTA
    begin: Int32  # first route of the warp's part
    end: Int32
    batches: Int32  # of 32 * routes_per_lane routes


@cute.jit
def table(workspace: cute.Tensor, offset: Constexpr[int], words: Constexpr[int]):
    """int32 table of `words` entries at byte `offset` (a multiple of 16) of the workspace."""
    address = workspace.iterator.toint() + offset  # made anew: a pointer recast from bytes is stored to byte by byte
    start = cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(start, cute.make_layout(words))


@cute.jit
def allocate_counts(smem, shape: Constexpr):
    """Shared memory for the counts; `smem` is the kernel's allocator."""
    bins = shape.num_experts + 1
    return Counts(
        part=smem.allocate_tensor(Int32, cute.make_layout((shape.warps, bins), stride=(bins, 1)), byte_alignment=16),
        ctas=smem.allocate_tensor(
            Int32, cute.make_layout((shape.cluster_ctas, bins), stride=(bins, 1)), byte_alignment=16
        ),
        arrived=smem.allocate_array(Int64, 1, byte_alignment=8),
        total=smem.allocate_tensor(Int32, cute.make_layout(shape.num_experts), byte_alignment=16),
        start=smem.allocate_tensor(Int32, cute.make_layout(bins), byte_alignment=16),
        base=smem.allocate_tensor(Int32, cute.make_layout(bins), byte_alignment=16),
        scan=smem.allocate_tensor(Int32, cute.make_layout(LANES), byte_alignment=16),
        invalid=smem.allocate_tensor(Int32, cute.make_layout(LANES), byte_alignment=16),
    )


@cute.jit
def part_of(routes: Int32, index: Int32, parts: Constexpr[int]):
    """Begin and end of part `index` of `routes` routes: equal multiples of 32, later parts short or empty."""
    per_part = ((routes + (parts * LANES - 1)) // (parts * LANES)) * LANES
    begin = cutlass.min(index * per_part, routes)
    return begin, cutlass.min(begin + per_part, routes)


@cute.jit
def expert_of(low: Int32, high: Int32, num_experts: Constexpr[int]):
    """Bin of an id given as sign-extended 64-bit value, and whether the id is legal.

    The bin is the expert, or `num_experts` for -1 (no route) and for ids outside [-1, num_experts), which are illegal.
    """
    extends = high == (low >> 31)
    inside = low >= 0 and low < num_experts
    expert = low if extends and inside else Int32(num_experts)
    return expert, extends and (inside or low == NO_ROUTE)


@cute.jit
def here(ids: Ids, shape: Constexpr):
    """The calling thread's place in the launch."""
    thread, _, _ = cute.arch.thread_idx()
    cluster, _, _ = cute.arch.cluster_idx()
    cta = cute.arch.block_idx_in_cluster()
    index = cute.arch.make_warp_uniform(thread // LANES)
    routes = ids.words.shape[0] * shape.top_k
    begin, end = part_of(routes, cta * shape.warps + index, shape.cluster_ctas * shape.warps)
    batch = LANES * shape.routes_per_lane
    return Place(cluster, cta, index, thread % LANES, thread, begin, end, (end - begin + (batch - 1)) // batch)


@cute.jit
def load_experts(experts: cute.Tensor, invalid: Int32, ids: Ids, first: Int32, place: Place, shape: Constexpr):
    """Bins of routes first + lane, + 32, ... into `experts` (routes_per_lane,); returns the first invalid route so far.

    All loads are issued before the first use. Lanes past the end of the part read its last id and count as no route.
    """
    low = cute.make_rmem_tensor(shape.routes_per_lane, Int32)
    high = cute.make_rmem_tensor(shape.routes_per_lane, Int32)
    for i in range_constexpr(shape.routes_per_lane):
        route = cutlass.min(first + i * LANES, place.end - 1)
        word = ids.words.iterator + route * ids.words_per_id
        low[i] = cute.arch.load(word, Int32)
        high[i] = cute.arch.load(word + (ids.words_per_id - 1), Int32)
    for i in range_constexpr(shape.routes_per_lane):
        route = first + i * LANES
        sign = high[i] if ids.words_per_id == 2 else low[i] >> 31
        expert, legal = expert_of(low[i], sign, shape.num_experts)
        experts[i] = expert if route < place.end else Int32(shape.num_experts)
        invalid = cutlass.min(invalid, Int32(NO_INVALID) if legal or route >= place.end else route)
    return invalid


@cute.jit
def is_own_share(batch: Int32, place: Place, shape: Constexpr):
    """Whether this cluster places the batch; the clusters take turns."""
    return batch % shape.clusters == place.cluster


@cute.jit
def clear_counters(tables: Tables, place: Place, shape: Constexpr):
    """Zero every counter word of the forward launch that follows."""
    threads = shape.warps * LANES
    words = cute.size(tables.counters)
    first = (place.cluster * shape.cluster_ctas + place.cta) * threads + place.thread
    for word in cutlass.range(first, words, shape.clusters * shape.cluster_ctas * threads, unroll=1):
        tables.counters[word] = Int32(0)


@cute.jit
def count_part(ids: Ids, counts: Counts, tables: Tables, place: Place, shape: Constexpr):
    """Count the routes of this warp's part into its row of `counts.part`, in route order.

    Leaves each route's rank among the part's routes of the same expert in `slot_row`, which `place_routes` replaces.
    """
    part = counts.part[place.warp, None]
    for bin in cutlass.range(place.lane, shape.num_experts + 1, LANES, unroll=1):
        part[bin] = Int32(0)
    cute.arch.sync_warp()
    invalid = Int32(NO_INVALID)
    experts = cute.make_rmem_tensor(shape.routes_per_lane, Int32)
    for batch in cutlass.range(place.batches, unroll=1):
        first = place.begin + batch * (LANES * shape.routes_per_lane) + place.lane
        invalid = load_experts(experts, invalid, ids, first, place, shape)
        own = is_own_share(batch, place, shape)
        for i in range_constexpr(shape.routes_per_lane):
            rank, equals = warp.rank_among_equals(experts[i])
            seen = part[experts[i]]
            cute.arch.sync_warp()
            if rank == 0:
                part[experts[i]] = seen + equals
            cute.arch.sync_warp()
            if own and first + i * LANES < place.end:
                tables.slot_row[first + i * LANES] = seen + rank
    invalid = warp.min_int(invalid)
    if place.lane == 0:
        counts.invalid[place.warp] = invalid


@cute.jit
def open_mailbox(counts: Counts, place: Place):
    """Initialise `counts.arrived` and tell the cluster. A CTA sends after `cluster_wait`."""
    if place.thread == 0:
        cute.arch.mbarrier_init(counts.arrived, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()


@cute.jit
def send(counts: Counts, bin: Int32, value: Int32, place: Place, shape: Constexpr):
    """One of this CTA's counts to every CTA of the cluster, itself among them."""
    own = counts.ctas.iterator + (place.cta * (shape.num_experts + 1) + bin)
    for c in range_constexpr(shape.cluster_ctas):
        cute.arch.store_async_dsmem(own, value, counts.arrived, Int32(c))


@cute.jit
def sum_warps(counts: Counts, place: Place, shape: Constexpr):
    """Turn each warp's counts into the sum over lower warps, and send the sum over all to the cluster.

    The mailbox's one arrival comes here and says how many bytes to expect; bytes that landed before it are counted too,
    and the phase cannot end without it.
    """
    if place.thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(counts.arrived, 4 * shape.cluster_ctas * (shape.num_experts + 1))
    threads = shape.warps * LANES
    for expert in cutlass.range(place.thread, shape.num_experts, threads, unroll=1):
        routes = [counts.part[w, expert] for w in range(shape.warps)]
        running = Int32(0)
        for w in range_constexpr(shape.warps):
            counts.part[w, expert] = running
            running = running + routes[w]
        send(counts, expert, running, place, shape)
    if place.warp == shape.warps - 1:
        invalid = Int32(NO_INVALID)
        if place.lane < shape.warps:
            invalid = counts.invalid[place.lane]
        invalid = warp.min_int(invalid)
        if place.lane == 0:
            send(counts, Int32(shape.num_experts), invalid, place, shape)


@cute.jit
def sum_ctas(counts: Counts, place: Place, shape: Constexpr):
    """Routes per expert over all CTAs, and in `base` the routes of lower CTAs. Every CTA computes this for itself.

    A CTA that has received everything needs its peers no more, and they nothing of it but what is under way to them.
    """
    cute.arch.mbarrier_wait(counts.arrived, 0)
    for expert in cutlass.range(place.thread, shape.num_experts, shape.warps * LANES, unroll=1):
        total, lower = Int32(0), Int32(0)
        for c in range_constexpr(shape.cluster_ctas):
            routes = counts.ctas[c, expert]
            lower = lower + (routes if c < place.cta else Int32(0))
            total = total + routes
        counts.total[expert] = total
        counts.base[expert] = lower


@cute.jit
def start_experts(counts: Counts, place: Place, shape: Constexpr):
    """First row block of each expert (prefix sum of row blocks), and the first row of this CTA's routes in `base`.

    A thread reads only what it wrote itself in `sum_ctas`: both take expert = thread, + threads, ...
    """
    carry = Int32(0)
    for chunk in range_constexpr((shape.num_experts + shape.warps * LANES - 1) // (shape.warps * LANES)):
        expert = chunk * (shape.warps * LANES) + place.thread
        blocks = Int32(0)
        if expert < shape.num_experts:
            blocks = (counts.total[expert] + (shape.tile_m - 1)) // shape.tile_m
        prefix = warp.inclusive_scan(blocks, place.lane)
        if const_expr(chunk > 0):
            cute.arch.sync_threads()  # the previous chunk's sums have been read
        if place.lane == LANES - 1:
            counts.scan[place.warp] = prefix
        cute.arch.sync_threads()
        warp_sum = Int32(0)
        if place.lane < shape.warps:
            warp_sum = counts.scan[place.lane]
        lower_warps = warp.sum_int(warp_sum if place.lane < place.warp else Int32(0))
        start = carry + lower_warps + prefix - blocks
        carry = carry + warp.sum_int(warp_sum)
        if expert < shape.num_experts:
            counts.start[expert] = start
            counts.base[expert] = counts.base[expert] + start * shape.tile_m
    if place.thread == 0:
        counts.start[shape.num_experts] = carry
        counts.base[shape.num_experts] = Int32(0)
    cute.arch.sync_threads()


@cute.jit
def write_blocks(counts: Counts, tables: Tables, place: Place, shape: Constexpr):
    """The tables of row blocks, and -1 into the padding rows of used blocks. One warp per expert."""
    index = (place.cluster * shape.cluster_ctas + place.cta) * shape.warps + place.warp
    for expert in cutlass.range(index, shape.num_experts, shape.clusters * shape.cluster_ctas * shape.warps, unroll=1):
        start, rows = counts.start[expert], counts.total[expert]
        blocks = counts.start[expert + 1] - start
        if place.lane == 0:
            tables.block_start[expert] = start
        for block in cutlass.range(place.lane, blocks, LANES, unroll=1):
            tables.block_expert[start + block] = expert
            tables.block_rows[start + block] = cutlass.min(rows - block * shape.tile_m, Int32(shape.tile_m))
        for row in cutlass.range(rows + place.lane, blocks * shape.tile_m, LANES, unroll=1):
            tables.row_token[start * shape.tile_m + row] = Int32(NO_ROUTE)
    if index == 0 and place.lane == 0:
        tables.block_start[shape.num_experts] = counts.start[shape.num_experts]


@cute.jit
def place_routes(ids: Ids, counts: Counts, tables: Tables, place: Place, shape: Constexpr):
    """Row of every route of this cluster's share into `slot_row`, and its token into `row_token`."""
    part = counts.part[place.warp, None]
    experts = cute.make_rmem_tensor(shape.routes_per_lane, Int32)
    ranks = cute.make_rmem_tensor(shape.routes_per_lane, Int32)
    for batch in cutlass.range(place.cluster, place.batches, shape.clusters, unroll=1):
        first = place.begin + batch * (LANES * shape.routes_per_lane) + place.lane
        load_experts(experts, Int32(NO_INVALID), ids, first, place, shape)
        for i in range_constexpr(shape.routes_per_lane):
            ranks[i] = Int32(0)
            if first + i * LANES < place.end:
                ranks[i] = tables.slot_row[first + i * LANES]
        for i in range_constexpr(shape.routes_per_lane):
            route = first + i * LANES
            placed = experts[i] < shape.num_experts
            row = counts.base[experts[i]] + part[experts[i]] + ranks[i]
            if route < place.end:
                tables.slot_row[route] = row if placed else Int32(NO_ROUTE)
            if placed:
                tables.row_token[row] = Int32(Uint32(route) // shape.top_k)


@cute.jit
def report_invalid(ids: Ids, counts: Counts, error_address: Int64, place: Place, shape: Constexpr):
    """Record the first id outside [-1, E) in the pinned words [flag, token, slot, low, high], unless one stands there.

    The flag is written last, so that who sees it sees the rest.
    """
    if place.cluster == 0 and place.cta == 0 and place.warp == 0:
        route = Int32(NO_INVALID)
        if place.lane < shape.cluster_ctas:
            route = counts.ctas[place.lane, shape.num_experts]
        route = warp.min_int(route)
        if place.lane == 0 and route != NO_INVALID and error_address != 0:
            record = cute.make_ptr(Int32, error_address, AddressSpace.gmem, assumed_align=4)
            if cute.arch.load(record, Int32, sem="relaxed", scope="sys") == 0:
                word = ids.words.iterator + route * ids.words_per_id
                low, high = cute.arch.load(word, Int32), cute.arch.load(word + (ids.words_per_id - 1), Int32)
                token = Int32(Uint32(route) // shape.top_k)
                cute.arch.store(record + 1, token)
                cute.arch.store(record + 2, route - token * shape.top_k)
                cute.arch.store(record + 3, low)
                cute.arch.store(record + 4, high if ids.words_per_id == 2 else low >> 31)
                cute.arch.store(record, Int32(1), sem="release", scope="sys")
