"""Build the route and schedule kernels of several layers without a GPU, for check_route_schedule.py to run on one.

    python tests/gpu/build_route_schedule.py OUT [NAME ...]

writes OUT/NAME/{route.py, schedule.py, kernels.so, config.json} for each configuration (default: all).
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import jinja2

from mokgen.codegen import small_kernels
from mokgen.compile.pool import compile_bundle
from mokgen.lower.layer import RouterLayer

ROOT = Path(__file__).resolve().parents[2]
ARCH = "sm_90a"
TILE_M = 128
ALIGN = 1024
COUNTER_HEADER = 96
FEW_SLABS = 8

PLAIN = RouterLayer(
    input="logits", top_k=8, score="softmax", order="score_then_topk", normalize=False, scale=1.0,
    selection_bias=False, logit_bias=False, groups=1, top_groups=1, group_score="max", weight_dtype="fp32",
    logits_dtype="bf16",
)  # fmt: skip
DEEPSEEK = replace(
    PLAIN, score="sigmoid", normalize=True, scale=2.5, selection_bias=True, groups=8, top_groups=4,
    group_score="top2_sum", logits_dtype="fp32",
)  # fmt: skip

# name: (max tokens, experts, router, changes of the schedule's launch numbers)
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


def workspace_layout(max_tokens: int, num_experts: int, top_k: int) -> dict[str, object]:
    """Offsets of the regions that the schedule writes, one after the other, and what depends on them."""
    routes = max_tokens * top_k
    max_row_blocks = (routes + (TILE_M - 1) * min(num_experts, routes)) // TILE_M
    counter_words = COUNTER_HEADER + max_row_blocks + FEW_SLABS
    words = {
        "counters": counter_words,
        "block_start": num_experts + 1,
        "block_expert": max_row_blocks,
        "block_rows": max_row_blocks,
        "row_token": max_row_blocks * TILE_M,
        "slot_row": routes,
    }
    offsets, end = {}, 0
    for name, count in words.items():
        offsets[name] = end
        end += -(-4 * count // ALIGN) * ALIGN
    return {
        "max_row_blocks": max_row_blocks,
        "counter_words": counter_words,
        "offsets": offsets,
        "words": words,
        "workspace_bytes": end,
    }


def render(template: str, context: dict[str, object]) -> str:
    """Text of one of the project's templates."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template(template).render(context)


def write_config(name: str, folder: Path) -> None:
    """Texts and config.json of one configuration."""
    max_tokens, num_experts, router, changes = CONFIGS[name]
    layout = workspace_layout(max_tokens, num_experts, router.top_k)
    launch = replace(small_kernels.schedule_launch(num_experts, max_tokens * router.top_k), **changes)
    schedule = small_kernels.schedule_context(
        name,
        ARCH,
        num_experts=num_experts,
        top_k=router.top_k,
        max_tokens=max_tokens,
        tile_m=TILE_M,
        max_row_blocks=layout["max_row_blocks"],
        offsets=layout["offsets"],
        counter_words=layout["counter_words"],
        workspace_bytes=layout["workspace_bytes"],
        launch=launch,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schedule.py").write_text(render("schedule.py.jinja", schedule))
    route = small_kernels.route_context(name, ARCH, num_experts, router)
    (folder / "route.py").write_text(render("route.py.jinja", route))
    config = {
        "name": name,
        "arch": ARCH,
        "max_tokens": max_tokens,
        "num_experts": num_experts,
        "router": asdict(router),
        "launch": asdict(launch),
        **layout,
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
