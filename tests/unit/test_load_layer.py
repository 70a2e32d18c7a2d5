"""What `load_layer` takes and what it refuses, on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch
from layers import resolved

import mokgen
from mokgen.cache.manifest import MANIFEST_NAME
from mokgen.errors import ToolchainError, UsageError
from mokgen.runtime import layer as runtime_layer

OVERRIDES = ("router.top_k=1",)


def test_overrides_change_a_file():
    assert mokgen.load_layer("tiny", overrides=OVERRIDES, device="cpu").top_k == 1


@pytest.mark.parametrize("source", [resolved(), mokgen.load_spec("tiny")], ids=["resolved layer", "spec"])
def test_overrides_of_an_object_are_refused(source):
    with pytest.raises(UsageError, match="overrides change a spec file"):
        mokgen.load_layer(source, overrides=OVERRIDES, device="cpu")
    assert mokgen.load_layer(source, device="cpu").top_k == 2


def test_overrides_of_an_artifact_are_refused(tmp_path):
    (tmp_path / MANIFEST_NAME).write_text("{}")
    with pytest.raises(UsageError, match="an artifact is built"):
        mokgen.load_layer(tmp_path, overrides=OVERRIDES)


@pytest.mark.parametrize("source", [None, 5, {"hidden_size": 64}])
def test_a_source_of_another_type_is_refused_by_name(source):
    with pytest.raises(UsageError, match=f"a {type(source).__name__} is no source of a layer"):
        mokgen.load_layer(source, device="cpu")


def test_a_torch_device_means_what_its_name_means(monkeypatch):
    """With a GPU in sight, torch.device("cpu") must lead to the executor as "cpu" does, not to a compile."""
    monkeypatch.setattr(runtime_layer.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime_layer, "layer_of_plan", lambda plan, stem, key: f"{stem} on the executor")
    assert mokgen.load_layer("tiny", device=torch.device("cpu")) == "tiny on the executor"


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(runtime_layer.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ToolchainError, match="torch finds no GPU"):
        mokgen.load_layer("tiny", device="cuda")
    with pytest.raises(UsageError, match="no kernels for xpu"):
        mokgen.load_layer("tiny", device="xpu")
