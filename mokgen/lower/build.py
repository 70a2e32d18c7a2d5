"""lower(layer): the stages a layer needs, joined by the tensors they name."""

from __future__ import annotations

from mokgen.errors import PlanError, UnsupportedError
from mokgen.ir.graph import INPUT, OUTPUT, StageGraph
from mokgen.lower.layer import ResolvedLayer
from mokgen.stages.registry import STAGES


def lower(layer: ResolvedLayer) -> StageGraph:
    """Stage graph of one layer's forward: every applicable stage, edges by tensor name."""
    _check_supported(layer)
    graph = StageGraph(layer)
    graph.add_stage(INPUT, "")
    present = [stage for stage in STAGES.values() if stage.applies(layer)]
    producer: dict[str, str] = {}
    for stage in present:
        graph.add_stage(stage.name, stage.kernel)
        for tensor in stage.outputs(layer):
            if tensor.name in producer:
                raise PlanError(f"{tensor.name} is made by {producer[tensor.name]} and by {stage.name}")
            producer[tensor.name] = stage.name
    graph.add_stage(OUTPUT, "")
    used = set()
    for stage in present:
        for tensor in stage.inputs(layer):
            graph.add_edge(producer.get(tensor.name, INPUT), stage.name, tensor)
            used.add(tensor.name)
    for stage in present:
        for tensor in stage.outputs(layer):
            if tensor.name not in used:  # nobody inside reads it: a result
                graph.add_edge(stage.name, OUTPUT, tensor)
    graph.check()
    return graph


def _check_supported(layer: ResolvedLayer) -> None:
    """Refuse what has no stages here, by name, so that nothing is left out silently."""
    faults = (
        (layer.ep_size == 1, f"ep_size {layer.ep_size}: dispatch and combine have no stages", "topology.ep_size: 1"),
        (layer.precision == "bf16", f"precision {layer.precision}: quantize has no stage", "precision.kind: bf16"),
        (layer.passes == ("forward",), f"passes {list(layer.passes)}: backward has no stages", "passes: [forward]"),
    )
    for good, what, nearest in faults:
        if not good:
            raise UnsupportedError(what, where="stage graph", hint=f"nearest supported: {nearest}")
