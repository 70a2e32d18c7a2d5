"""What is emitted: the committed text of every spec, and every knob in the text of the kernel it concerns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from layers import resolved

from mokgen.cache import key
from mokgen.codegen.emit import emit
from mokgen.driver import Prepared, build_key_of, plan_of, prepare
from mokgen.facts.arch import ARCHS
from mokgen.lower.layer import ResolvedLayer
from mokgen.plan.tiles import KNOBS
from mokgen.spec.load import shipped_names

ARCH = "sm_90a"


@pytest.mark.parametrize("name", shipped_names())
def test_committed_text_is_what_its_spec_gives(root: Path, name: str) -> None:
    prepared = prepare(name, ARCH)
    folder = root / "generated" / prepared.stem
    committed = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir() if path.is_file()}
    assert committed.keys() == prepared.bundle.files.keys()
    for file, text in prepared.bundle.files.items():
        assert committed[file] == text, f"mokgen build --emit-only --out generated {name}"


def test_every_committed_folder_has_a_spec(root: Path) -> None:
    folders = {path.name for path in (root / "generated").iterdir() if path.is_dir()}
    assert folders == {Path(name).name for name in shipped_names()}


# Kernel whose text names the knob's value. Several slabs, row gathers, a router: a layer where every knob is free.
CONCERNS = {
    "slab_tiles": "forward",
    "group_blocks": "forward",
    "reduce_tokens": "forward",
    "stages": "forward",
    "consumer_lag": "forward",
    "gathers_in_flight": "forward",
    "task_slots": "forward",
    "schedule_clusters": "schedule",
    "schedule_ctas": "schedule",
    "schedule_warps": "schedule",
    "route_warps": "route",
}
FREE = resolved(300, hidden_size=768, router={"input": "logits", "top_k": 2})


def prepared_with(layer: ResolvedLayer, **knobs: int) -> Prepared:
    return prepare(replace(layer, knobs=tuple(knobs.items())), ARCH)


def test_every_knob_concerns_a_kernel() -> None:
    assert CONCERNS.keys() == KNOBS.keys()


@pytest.mark.parametrize("knob", KNOBS)
def test_every_legal_value_of_a_knob_changes_text_and_keys(knob: str) -> None:
    """Other kernels keep their text, but for what a workspace of another size changes in all of them."""
    chosen = {choice.name: choice.value for choice in plan_of(FREE, ARCH).plan.choices}[knob]
    before = prepared_with(FREE)
    values = [value for value in KNOBS[knob].legal(FREE, ARCHS[ARCH]) if value != chosen]
    assert values
    texts, layer_keys, build_keys = {before.kernels[f"{CONCERNS[knob]}.py"]}, {before.layer_key}, {build_key_of(before)}
    for value in values:
        after = prepared_with(FREE, **{knob: value})
        texts.add(after.kernels[f"{CONCERNS[knob]}.py"])
        layer_keys.add(after.layer_key)
        build_keys.add(build_key_of(after))
        if CONCERNS[knob] != "route":
            assert after.kernels["route.py"] == before.kernels["route.py"]
    assert len(texts) == len(layer_keys) == len(build_keys) == len(values) + 1


@pytest.mark.parametrize("knob", KNOBS)
def test_a_knob_set_to_its_default_keeps_the_text(knob: str) -> None:
    chosen = {choice.name: choice.value for choice in plan_of(FREE, ARCH).plan.choices}[knob]
    assert prepared_with(FREE, **{knob: chosen}).kernels == prepared_with(FREE).kernels


def test_the_build_key_is_made_of_the_text_of_every_file() -> None:
    files = emit(plan_of(FREE, ARCH).plan, "layer").files

    def made(texts: dict[str, str]) -> str:
        return key.build_key(texts, "device", {}, ARCH, "layer")

    for name in files:
        assert made({**files, name: files[name] + "\n"}) != made(files)
