"""StageGraph: stages are nodes, tensors are named edges of a networkx MultiDiGraph.

Every listing is in lexicographical topological order, so that equal graphs give equal plans, texts and keys.
"""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx

from mokgen.errors import PlanError
from mokgen.ir.tensor import TensorRef
from mokgen.lower.layer import ResolvedLayer

INPUT = "input"
OUTPUT = "output"


class StageGraph:
    """Stages of one layer and the tensors between them; `input` and `output` stand for the caller."""

    def __init__(self, layer: ResolvedLayer) -> None:
        self.layer = layer
        self._graph: nx.MultiDiGraph[str] = nx.MultiDiGraph()

    def add_stage(self, name: str, kernel: str) -> None:
        if name in self._graph:
            raise PlanError(f"stage {name} is added twice", where="stage graph")
        self._graph.add_node(name, kernel=kernel)

    def add_edge(self, producer: str, consumer: str, tensor: TensorRef) -> None:
        for end in (producer, consumer):
            if end not in self._graph:
                raise PlanError(f"{tensor.name}: no stage {end}", where="stage graph", hint=self._known())
        if self._graph.has_edge(producer, consumer, key=tensor.name):
            raise PlanError(f"{producer} -> {consumer}: tensor {tensor.name} is added twice", where="stage graph")
        self._graph.add_edge(producer, consumer, key=tensor.name, tensor=tensor)

    def _known(self) -> str:
        return "stages: " + ", ".join(sorted(self._graph))

    def check(self) -> None:
        """Raise PlanError unless every stage is reached, used, and no tensor flows in a circle."""
        if not nx.is_directed_acyclic_graph(self._graph):
            cycle = " -> ".join(edge[0] for edge in nx.find_cycle(self._graph))
            raise PlanError(f"tensors flow in a circle: {cycle}", where="stage graph")
        used = nx.ancestors(self._graph, OUTPUT)
        dead = sorted(set(self._graph) - used - {OUTPUT, INPUT})
        if dead:
            raise PlanError(f"nothing uses the result of {', '.join(dead)}", where="stage graph")

    def nodes(self) -> tuple[str, ...]:
        """All nodes, `input` and `output` included, in lexicographical topological order."""
        return tuple(nx.lexicographical_topological_sort(self._graph))

    def stages(self) -> tuple[str, ...]:
        return tuple(node for node in self.nodes() if node not in (INPUT, OUTPUT))

    def kernel_of(self, stage: str) -> str:
        return str(self._graph.nodes[stage]["kernel"])

    def kernels(self) -> tuple[str, ...]:
        """Launches in order of their first stage."""
        return tuple(dict.fromkeys(self.kernel_of(stage) for stage in self.stages()))

    def edges(self) -> tuple[tuple[str, str, TensorRef], ...]:
        """(producer, consumer, tensor) in order of producer, consumer, tensor name."""
        order = {node: index for index, node in enumerate(self.nodes())}
        found = [(u, v, data["tensor"]) for u, v, data in self._graph.edges(data=True)]
        return tuple(sorted(found, key=lambda edge: (order[edge[0]], order[edge[1]], edge[2].name)))

    def producer_of(self, tensor: str) -> str:
        for producer, _, found in self.edges():
            if found.name == tensor:
                return producer
        raise PlanError(f"no stage makes {tensor}", where="stage graph", hint=self._known())

    def consumers_of(self, tensor: str) -> tuple[str, ...]:
        return tuple(consumer for _, consumer, found in self.edges() if found.name == tensor)

    def depth(self, among: Iterable[str]) -> dict[str, int]:
        """Longest path of tensors from any of the given stages, counted inside them: 0 for those that need none."""
        keep = set(among)
        level: dict[str, int] = {}
        for node in self.nodes():
            if node in keep:
                before = [level[u] for u in self._graph.predecessors(node) if u in keep]
                level[node] = 1 + max(before, default=-1)
        return level

    def to_text(self) -> str:
        """One line per stage with its tensors, for people and golden tests."""
        lines = []
        for stage in self.stages():
            reads = [found.text() for _, consumer, found in self.edges() if consumer == stage]
            writes = list(dict.fromkeys(found.text() for producer, _, found in self.edges() if producer == stage))
            lines.append(f"{stage} [{self.kernel_of(stage)}]")
            lines += [f"  reads  {text}" for text in reads] + [f"  writes {text}" for text in writes]
        return "\n".join(lines) + "\n"

    def to_mermaid(self) -> str:
        """Mermaid flowchart with one subgraph per launch."""
        lines = ["flowchart LR", f"  {INPUT}([{INPUT}])"]
        for kernel in self.kernels():
            lines.append(f"  subgraph {kernel}_launch[{kernel} launch]")
            # Stage and subgraph ids share a namespace in Mermaid; the suffix keeps `schedule` the stage apart.
            lines += [f"    {stage}[{stage}]" for stage in self.stages() if self.kernel_of(stage) == kernel]
            lines.append("  end")
        lines.append(f"  {OUTPUT}([{OUTPUT}])")
        lines += [f"  {producer} -- {found.name} --> {consumer}" for producer, consumer, found in self.edges()]
        return "\n".join(lines) + "\n"
