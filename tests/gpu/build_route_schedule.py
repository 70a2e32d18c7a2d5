"""Build the route and schedule kernels of several layers without a GPU, for check_route_schedule.py to run on one.

    python tests/gpu/build_route_schedule.py OUT [NAME ...]

writes OUT/NAME/{route.py, schedule.py, kernels.so, config.json} for each configuration (default: all).
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from layers import router_plan  # noqa: E402

from mokgen.codegen.emit import emit_route, emit_schedule  # noqa: E402
from mokgen.compile.pool import compile_bundle  # noqa: E402
from mokgen.lower.layer import RouterLayer  # noqa: E402
from mokgen.plan.model import LayerPlan  # noqa: E402

ARCH = "sm_90a"

PLAIN = RouterLayer(
    input="logits", top_k=8, score="softmax", order="score_then_topk", normalize=False, scale=1.0,
    selection_bias=False, logit_bias=False, groups=1, top_groups=1, group_score="max", weight_dtype="fp32",
    logits_dtype="bf16",
)  # fmt: skip
DEEPSEEK = replace(
    PLAIN, score="sigmoid", normalize=True, scale=2.5, selection_bias=True, groups=8, top_groups=4,
    group_score="top2_sum", logits_dtype="fp32",
)  # fmt: skip

# name: (max tokens, experts, router, launch numbers of the schedule)
CONFIGS: dict[str, tuple[int, int, RouterLayer, dict[str, int]]] = {
    "dsv3_slice": (8192, 32, PLAIN, {}),
    "dsv3": (8192, 256, DEEPSEEK, {}),
    "sonic_7b": (24576, 128, PLAIN, {}),
    "qwen3": (32768, 128, replace(PLAIN, normalize=True), {}),
    "gpt_oss": (16384, 32, replace(PLAIN, top_k=4, order="topk_then_score", logit_bias=True), {}),
    "mixtral": (4096, 8, replace(PLAIN, top_k=2, normalize=True, logits_dtype="fp32"), {}),
    "odd": (1000, 7, replace(PLAIN, top_k=3, score="sigmoid", order="topk_then_score", scale=0.5), {}),
    "odd_groups": (600, 90, replace(DEEPSEEK, top_k=5, groups=9, top_groups=3), {}),
    "max_groups": (600, 96, replace(DEEPSEEK, top_k=6, groups=48, top_groups=7, group_score="max"), {}),
    "wide": (2048, 512, replace(PLAIN, top_k=40, normalize=True), {}),
    "huge": (700, 3000, replace(PLAIN, top_k=4, score="sigmoid", selection_bias=True), {}),
    "all_experts": (300, 33, replace(PLAIN, top_k=33, logit_bias=True), {}),
    "million": (131072, 16, replace(PLAIN, top_k=8), {}),
    # the same layers under other launch numbers: which is fastest, and do the tables stay the same
    "qwen3_1x16": (32768, 128, replace(PLAIN, normalize=True), {"clusters": 1}),
    "qwen3_2x16": (32768, 128, replace(PLAIN, normalize=True), {"clusters": 2}),
    "qwen3_8x16": (32768, 128, replace(PLAIN, normalize=True), {"clusters": 8}),
    "qwen3_4x8": (32768, 128, replace(PLAIN, normalize=True), {"clusters": 4, "cluster_ctas": 8}),
    "qwen3_8x8": (32768, 128, replace(PLAIN, normalize=True), {"clusters": 8, "cluster_ctas": 8}),
    "qwen3_4x16_r8": (32768, 128, replace(PLAIN, normalize=True), {"clusters": 4, "routes_per_lane": 8}),
    "dsv3_slice_2x16": (8192, 32, PLAIN, {"clusters": 2}),
    "dsv3_slice_4x16": (8192, 32, PLAIN, {"clusters": 4}),
    "dsv3_slice_1x8": (8192, 32, PLAIN, {"clusters": 1, "cluster_ctas": 8}),
    "dsv3_slice_4x8": (8192, 32, PLAIN, {"clusters": 4, "cluster_ctas": 8}),
    "dsv3_slice_1x16_r2": (8192, 32, PLAIN, {"clusters": 1, "routes_per_lane": 2}),
}


def plan_of(name: str) -> LayerPlan:
    """Plan of one configuration; ids in flight per lane are no knob and are set in the plan itself."""
    max_tokens, num_experts, router, changes = CONFIGS[name]
    knobs = {f"schedule_{what}": value for what, value in changes.items() if what != "routes_per_lane"}
    plan = router_plan(num_experts, router, max_tokens, **knobs)
    kernel = plan.kernel("schedule")
    lanes = changes.get("routes_per_lane", kernel.constant("ROUTES_PER_LANE"))
    constants = tuple(
        replace(entry, value=lanes) if entry.name == "ROUTES_PER_LANE" else entry for entry in kernel.constants
    )
    kernels = tuple(replace(entry, constants=constants) if entry is kernel else entry for entry in plan.kernels)
    return replace(plan, kernels=kernels)


def write_config(name: str, folder: Path) -> None:
    """Texts and config.json of one configuration."""
    plan = plan_of(name)
    kernel, layer = plan.kernel("schedule"), plan.layer
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "route.py").write_text(emit_route(plan, name))
    (folder / "schedule.py").write_text(emit_schedule(plan, name))
    tables = [region for region in plan.regions if region.writer == "schedule"]
    launch = {"clusters": "CLUSTERS", "cluster_ctas": "CLUSTER_CTAS", "num_warps": "NUM_WARPS"}
    config = {
        "name": name,
        "arch": plan.arch,
        "max_tokens": layer.max_tokens,
        "num_experts": layer.num_experts,
        "router": asdict(layer.router),
        "launch": {
            what: kernel.constant(constant)
            for what, constant in {**launch, "routes_per_lane": "ROUTES_PER_LANE"}.items()
        },
        "offsets": {region.name: region.offset for region in tables},
        "words": {region.name: region.bytes // 4 for region in tables},
        "workspace_bytes": plan.workspace_bytes,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", default=list(CONFIGS), help="configurations; default: all")
    args = parser.parse_args()
    for name in args.names:
        folder = args.out / name
        write_config(name, folder)
        for report in compile_bundle(folder, ARCH):
            faults = "; ".join(report.findings()) or "clean"
            print(
                f"{name:20s} {report.kernel:9s} {report.registers:4d} registers {report.smem_bytes:7d} B shared "
                f"{report.seconds:5.1f} s  {faults}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
