"""The loader: places, duplicate keys, extends, overrides, exact types."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from mokgen.errors import SpecError, UsageError
from mokgen.spec.load import load_spec, load_with_places, shipped_names
from mokgen.spec.moe import ExpertSpec, MoeSpec, RouterLogits, SharedSpec
from mokgen.spec.parts import PrecisionSpec, TargetSpec, TopologySpec

BASE = """\
hidden_size: 256
experts: {num: 8, intermediate_size: 256}
router:
  input: logits
  top_k: 2
"""


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str, name: str = "layer.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


def fault(path: Path, *overrides: str):
    with pytest.raises(SpecError) as caught:
        load_spec(path, overrides)
    return caught.value.diagnostics


def test_loads_the_base(write):
    spec = load_spec(write(BASE))
    assert (spec.hidden_size, spec.experts.num, spec.router.top_k, spec.passes) == (256, 8, 2, ("forward",))


@pytest.mark.parametrize(
    ("old", "new", "place", "what", "hint"),
    [
        ("hidden_size: 256", 'hidden_size: "4096"', "1:1", "not a whole number", "write 4096 without quotes"),
        ("hidden_size: 256", "hidden_size: 4096.0", "1:1", "4096.0 is not a whole number", "write 4096"),
        ("hidden_size: 256", "hidden_size: true", "1:1", "true is not a whole number", "give a whole number"),
        ("hidden_size: 256", "hidden_size: 0", "1:1", "0 is out of range", ">= 1"),
        ("top_k: 2", "top_k: 2\n  normalize: yes", "6:3", 'the text "yes" is not true or false', "true and false only"),
        ("top_k: 2", "topk: 2", "5:3", "unknown key (did you mean top_k?)", "allowed: input, top_k"),
        ("  top_k: 2\n", "", "3:1", "router.top_k: missing", "add top_k: to router"),
        ("top_k: 2", "top_k: 9", "5:3", "9 is above experts.num = 8", "1 to 8"),
        ("top_k: 2", "top_k: 2\n  score: softmx", "6:3", "did you mean softmax?", "one of softmax, sigmoid"),
        ("input: logits", "input: logit", "4:3", "did you mean logits?", "one of ids, logits"),
        ("  input: logits\n", "", "3:1", "router.input: missing", "input: ids or input: logits"),
        ("top_k: 2", "top_k: 2\n  scale: .nan", "6:3", "is not a finite number", "give a finite number"),
        ("num: 8", "num: 8, clamp: -1.0", "2:19", "-1.0 is out of range", "> 0"),
        ("num: 8", "num: 8, alpha: 1.0e+39", "2:19", "1e+39 is out of range", "<= 3.40282e+38"),
        ("num: 8", "num: 8, activation: gelu", "2:19", 'the text "gelu" is not allowed', "one of swiglu, swigluoai"),
        ("experts: {num: 8, intermediate_size: 256}", "experts: 8", "2:1", "8 is not a map of keys", "a map"),
        ("hidden_size: 256", "hidden_size: 256\nplan: {stages: true}", "2:8", "not a whole number or text", "give"),
        ("hidden_size: 256", "hidden_size: 256\npasses: forward", "2:1", 'the text "forward" is not a list', "list"),
        ("hidden_size: 256", "hidden_size: 256\npasses: [forwards]", "2:10", "did you mean forward?", "one of"),
        ("hidden_size: 256", "hidden_size: 256\npasses: []", "2:1", "an empty list", "at least one"),
        ("hidden_size: 256", "hidden_size: 256\nhiden_size: 8", "2:1", "did you mean hidden_size?", "allowed"),
        ("hidden_size: 256", "hidden_size: 256\nhidden_size: 8", "2:1", "duplicate key", "keep one"),
        ("hidden_size: 256", "hidden_size: [256", "2:8", "not YAML", ""),
        ("hidden_size: 256", "hidden_size: !int8 256", "1:1", "tag", "plain values"),
        ("hidden_size: 256", "hidden_size: 256\npasses: !run [forward]", "2:1", "the YAML tag !run", "plain values"),
        ("experts: {num", "experts: !run {num", "2:1", "the YAML tag !run", "plain values"),
        ("hidden_size: 256", "8: 256", "1:1", "the key 8 is not a word", "field names"),
    ],
)
def test_refusals_name_place_value_and_way_out(write, old, new, place, what, hint):
    path = write(BASE.replace(old, new))
    found = {entry.where: entry for entry in fault(path)}
    assert f"{path}:{place}" in found
    entry = found[f"{path}:{place}"]
    assert what in entry.what
    assert hint in entry.hint


def test_faults_come_together(write):
    path = write("experts: {num: 8, intermediate_size: x}\nrouter: {input: ids, top_k: 2, score: softmax}\nsave: no\n")
    found = {entry.what.split(":")[0]: entry for entry in fault(path)}
    assert set(found) == {"hidden_size", "experts.intermediate_size", "router.score", "save"}
    assert "belong to input: logits" in found["router.score"].hint


def test_ids_router_takes_top_k_and_weight_dtype_only(write):
    text = BASE.replace("input: logits", "input: ids")
    assert load_spec(write(text + "  weight_dtype: bf16\n")).router.weight_dtype == "bf16"
    for extra in ("score: softmax", "groups: 2", "scale: 1.0", "logits_dtype: fp32", "normalize: true"):
        assert "unknown key" in fault(write(text + f"  {extra}\n"))[0].what


@pytest.mark.parametrize(
    ("field", "value", "neighbours"),
    [("hidden_size", 100, "96 or 104"), ("hidden_size", 4097, "4096 or 4104"), ("hidden_size", 3, "8")],
)
def test_row_rule_names_neighbours(write, field, value, neighbours):
    (only,) = fault(write(BASE), f"{field}={value}")
    assert f"{value} is not a multiple of 8" in only.what
    assert only.hint == f"nearest legal values: {neighbours}"
    assert only.where == f"--set {field}={value}"


@pytest.mark.parametrize("size", [8, 64, 192, 768, 1408, 2688, 2880, 3584, 7168])
def test_sizes_that_are_no_multiples_of_a_tile_are_legal(write, size):
    assert load_spec(write(BASE), [f"hidden_size={size}", f"experts.intermediate_size={size}"]).hidden_size == size


@pytest.mark.parametrize(
    ("overrides", "field", "hint"),
    [
        (["router.groups=3"], "router.groups", "nearest legal values: 2 or 4"),
        (["router.groups=4", "router.top_groups=5"], "router.top_groups", "1 to 4"),
        (["router.groups=4", "router.top_groups=1", "router.top_k=3"], "router.top_groups", "top_groups 2 to 4"),
        (["router.groups=8", "router.top_groups=4", "router.group_score=top2_sum"], "router.group_score", "at most 4"),
        (["router.order=topk_then_score", "router.selection_bias=true"], "router.selection_bias", "score_then_topk"),
        (["router.order=topk_then_score", "router.groups=2"], "router.groups", "score_then_topk"),
        (["topology.ep_size=3", "topology.transport=virtual"], "topology.ep_size", "a divisor of 8"),
        (["topology.ep_size=2"], "topology.transport", "virtual"),
        (["determinism=batch_invariant", "topology.capacity=drop"], "determinism", "dropless"),
        (["topology.max_tokens_per_rank=1100000000"], "topology.max_tokens_per_rank", "1 to 1073741315"),
        (["passes=[backward]"], "passes", "[forward, backward]"),
        (["passes=[forward, forward]"], "passes", "[forward, backward]"),
        (["target.archs=[sm_90a, sm_90a]"], "target.archs", "once"),
        (["shared.num=1", "shared.intermediate_size=100"], "shared.intermediate_size", "96 or 104"),
        (["experts.num=5000"], "experts.num", "1 to 4096"),
        (["hidden_size=1048584"], "hidden_size", "at most 1048576"),
    ],
)
def test_rules_between_fields(write, overrides, field, hint):
    (only,) = fault(write(BASE), *overrides)
    assert only.what.startswith(f"{field}: ")
    assert hint in only.hint


def test_broken_rules_come_together(write):
    found = [entry.what.split(":")[0] for entry in fault(write(BASE), "hidden_size=100", "router.top_k=9")]
    assert found == ["hidden_size", "router.top_k"]


def test_largest_pool_that_the_hint_names_is_legal(write):
    assert load_spec(write(BASE), ["topology.max_tokens_per_rank=1073741315"])


def test_extends_merges_maps_and_replaces_the_rest(write):
    write(BASE + "passes: [forward, backward]\nplan: {a: 1, b: 2}\n", "base.yaml")
    spec = load_spec(write("extends: base.yaml\nrouter: {top_k: 4}\npasses: [forward]\nplan: {b: x}\n"))
    assert (spec.router.top_k, spec.router.input, spec.passes) == (4, "logits", ("forward",))
    assert spec.plan == {"a": 1, "b": "x"}


def test_null_takes_back_what_a_base_set(write):
    write(BASE + "  score: sigmoid\nshared: {num: 1}\n", "base.yaml")
    spec = load_spec(write("extends: base.yaml\nrouter: {score: null}\nshared: null\n"))
    assert (spec.router.score, spec.shared.num) == ("softmax", 0)
    gone = fault(write("extends: base.yaml\nrouter:\n  top_k: null\n", "gone.yaml"))[0]
    assert gone.what == "router.top_k: missing"
    assert gone.where.endswith("gone.yaml:3:3")


def test_faults_of_an_extended_spec_point_to_the_file_that_wrote_the_key(write):
    base = write(BASE.replace("hidden_size: 256", "hidden_size: 100"), "base.yaml")
    top = write("# one\nextends: base.yaml\nrouter: {top_k: 99}\n")
    assert [entry.where for entry in fault(top)] == [f"{base}:1:1", f"{top}:3:10"]


def test_extends_chain_cycle_and_missing_file(write):
    write(BASE, "a.yaml")
    write("extends: a.yaml\nrouter: {top_k: 3}\n", "b.yaml")
    assert load_spec(write("extends: b.yaml\n", "c.yaml")).router.top_k == 3
    loop = write("extends: loop2.yaml\n", "loop.yaml")
    write("extends: loop.yaml\n", "loop2.yaml")
    assert "leads back to itself" in fault(loop)[0].what
    assert "no file" in fault(write("extends: none.yaml\n"))[0].what
    assert "one file name" in fault(write("extends: [a.yaml]\n"))[0].what


def test_overrides_go_last_and_are_yaml(write):
    spec = load_spec(write(BASE), ["router.top_k=4", "router.top_k=3", "router.scale=2.5", "target={archs: [sm_90a]}"])
    assert (spec.router.top_k, spec.router.scale, spec.target.archs) == (3, 2.5, ("sm_90a",))


@pytest.mark.parametrize("text", ["router.top_k", "=4", "router..top_k=4", "router.top_k=[1"])
def test_malformed_overrides(write, text):
    assert fault(write(BASE), text)[0].where.startswith(f"--set {text}")


def test_override_of_an_unknown_field(write):
    (only,) = fault(write(BASE), "router.topk=4")
    assert (only.where, only.what) == ("--set router.topk=4", "router.topk: unknown key (did you mean top_k?)")


def test_files_that_cannot_be_read(write, tmp_path):
    with pytest.raises(UsageError, match="did you mean dsv3"):
        load_spec(tmp_path / "dsv33.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot read"):
        load_spec(tmp_path / "binary.yaml")
    assert "a map of keys" in fault(write("- 1\n"))[0].what
    assert "a map of keys" in fault(write(""))[0].what
    assert "nested too deeply" in fault(write(BASE + "plan: " + "[" * 3000 + "\n"))[0].what


def test_anchors_and_merge_keys_work(write):
    spec = load_spec(
        write(
            "hidden_size: &h 256\nexperts: &e {num: 8, intermediate_size: *h}\n"
            "router: {input: ids, top_k: 2}\nshared: {num: 1, intermediate_size: *h}\n"
        )
    )
    assert spec.shared.intermediate_size == 256


def test_a_map_of_merged_keys_alone(write):
    base = "hidden_size: 256\nexperts: &e {num: 8, intermediate_size: 64}\nrouter: {input: ids, top_k: 2}\n"
    assert load_spec(write(base + "shared: {<<: *e}\n")).shared.num == 8
    (only,) = fault(write(base + "topology: {<<: {ep_sise: 1}}\n"))
    assert "unknown key (did you mean ep_size?)" in only.what


def test_the_merged_width_of_shared_experts_has_a_limit(write):
    assert load_spec(write(BASE), ["shared.num=4096"]).shared.num == 4096
    (only,) = fault(write(BASE), "shared.num=4097")
    assert "4097 experts of 256 merge into a width of 1048832" in only.what
    assert (only.where, only.hint) == ("--set shared.num=4097", "0 to 4096")


def test_extends_is_no_override(write):
    (only,) = fault(write(BASE), "extends=dsv3.yaml")
    assert "stands in a file only" in only.what


def test_bare_names_are_shipped_specs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert load_spec("dsv3").hidden_size == 7168
    assert load_spec("ablations/dsv3_top4").router.top_k == 4
    assert {"tiny", "dsv3", "dsv3_slice", "qwen3_30b_a3b", "gpt_oss_20b", "sonic_7b"} <= set(shipped_names())


def test_a_file_in_the_way_wins_over_a_shipped_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").write_text(BASE.replace("256", "64"))
    assert load_spec("tiny").hidden_size == 64


def test_located_errors_keep_their_class(write):
    from mokgen.errors import UnsupportedError

    path = write(BASE + "topology:\n  capacity: drop\n")
    error = load_with_places(path).located(UnsupportedError("no kernels", "topology.capacity", "dropless"))
    assert isinstance(error, UnsupportedError)
    assert error.where == f"{path}:7:3: topology.capacity"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["ids", "logits", "sm_90a", "", "a.b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    (*name, leaf)
    for name, model in {
        (): MoeSpec,
        ("experts",): ExpertSpec,
        ("router",): RouterLogits,
        ("shared",): SharedSpec,
        ("topology",): TopologySpec,
        ("target",): TargetSpec,
        ("precision",): PrecisionSpec,
    }.items()
    for leaf in model.model_fields
]


@settings(max_examples=300, deadline=None)
@given(changes=st.lists(st.tuples(st.sampled_from(FIELDS), VALUES), min_size=1, max_size=3))
def test_any_value_in_any_field_is_taken_or_refused_with_its_place(tmp_path_factory, changes):
    data = YAML(typ="safe").load(BASE)
    for (*parents, leaf), value in changes:
        node = data
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                node[parent] = {}
            node = node[parent]
        node[leaf] = value
    path = tmp_path_factory.mktemp("fuzz") / "layer.yaml"
    with path.open("w") as stream:
        YAML(typ="safe").dump(data, stream)
    try:
        spec = load_spec(path)
    except SpecError as error:
        assert all(entry.where.startswith(str(path)) and entry.what for entry in error.diagnostics)
    else:
        assert spec.hidden_size % 8 == 0
