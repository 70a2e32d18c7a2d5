"""A stage graph as an SVG picture: one column per depth, one box per stage in the colour of its launch."""

from __future__ import annotations

from html import escape

from mokgen.ir.graph import StageGraph

BOX_WIDTH, BOX_HEIGHT = 130, 44
COLUMN, ROW, MARGIN = 250, 90, 30
COLOURS = ("#dbe9f6", "#e3f1dd", "#fbe6cf", "#eadff2", "#f6dcdc")  # by launch, in launch order
CALLER = "#eeeeee"


def draw(graph: StageGraph) -> str:
    """The whole SVG document."""
    places = _places(graph)
    width = max(x for x, _ in places.values()) + BOX_WIDTH + MARGIN
    height = max(y for _, y in places.values()) + BOX_HEIGHT + MARGIN
    launches = graph.kernels()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#666"/></marker></defs>',
    ]
    parts += _edges(graph, places)
    for node, (x, y) in places.items():
        launch = graph.kernel_of(node)
        colour = COLOURS[launches.index(launch) % len(COLOURS)] if launch in launches else CALLER
        parts.append(_box(x, y, node, f"{launch} launch" if launch else "caller", colour))
    return "\n".join([*parts, "</svg>", ""])


def _places(graph: StageGraph) -> dict[str, tuple[int, int]]:
    """Top left corner of every node."""
    nodes = graph.nodes()
    depth = graph.depth(nodes)
    rows: dict[int, int] = {}
    places = {}
    for node in nodes:
        column = depth[node]
        row = rows.get(column, 0)
        rows[column] = row + 1
        # Odd columns sit half a row lower, so that an edge over two columns passes beside the box between.
        places[node] = (MARGIN + column * COLUMN, MARGIN + row * ROW + (column % 2) * ROW // 2)
    return places


def _edges(graph: StageGraph, places: dict[str, tuple[int, int]]) -> list[str]:
    """One curve per pair of nodes, labelled with all tensors between them."""
    tensors: dict[tuple[str, str], list[str]] = {}
    for producer, consumer, tensor in graph.edges():
        tensors.setdefault((producer, consumer), []).append(tensor.name)
    parts = []
    for (producer, consumer), names in tensors.items():
        x0, y0 = places[producer][0] + BOX_WIDTH, places[producer][1] + BOX_HEIGHT // 2
        x1, y1 = places[consumer][0], places[consumer][1] + BOX_HEIGHT // 2
        bend = (x1 - x0) // 2
        parts.append(
            f'<path d="M{x0},{y0} C{x0 + bend},{y0} {x1 - bend},{y1} {x1},{y1}" fill="none" stroke="#666" '
            f'marker-end="url(#tip)"/>'
        )
        for line, name in enumerate(names):
            y = (y0 + y1) // 2 - 6 - 11 * (len(names) - 1 - line)
            parts.append(
                f'<text x="{(x0 + x1) // 2}" y="{y}" font-size="10" text-anchor="middle">{escape(name)}</text>'
            )
    return parts


def _box(x: int, y: int, name: str, note: str, colour: str) -> str:
    middle = x + BOX_WIDTH // 2
    return (
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{colour}" stroke="#444"/>'
        f'<text x="{middle}" y="{y + 19}" font-size="13" text-anchor="middle">{escape(name)}</text>'
        f'<text x="{middle}" y="{y + 34}" font-size="10" fill="#555" text-anchor="middle">{escape(note)}</text>'
    )
