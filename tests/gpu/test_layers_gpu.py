"""The published layers at full size on a GPU: the body of their generated tests, and equal bits over many runs."""

from __future__ import annotations

import pytest
import torch

from mokgen.reference.inputs import make_inputs
from mokgen.settings import shipped
from mokgen.testing import check_layer, open_subject
from mokgen.testing.guarded import run

pytestmark = pytest.mark.gpu

SPECS = ("tiny", "dsv3_slice", "qwen3_30b_a3b", "gpt_oss_20b", "sonic_7b")
RUNS = 200


@pytest.mark.parametrize("stem", SPECS)
def test_layer_at_full_size(stem):
    torch.cuda.empty_cache()
    report = check_layer(open_subject(shipped("specs") / f"{stem}.yaml"))
    assert "kernels on" in report.note
    assert len(report.cases) >= 50


@pytest.mark.parametrize(("stem", "tokens"), [("tiny", 777), ("dsv3_slice", 1111)])
def test_many_runs_with_other_cta_counts_give_equal_bits(stem, tokens):
    subject = open_subject(shipped("specs") / f"{stem}.yaml")
    inputs = make_inputs(subject.resolved, tokens, "zipf", subject.device)
    sms = torch.cuda.get_device_properties(subject.device).multi_processor_count
    first = run(subject, inputs)
    assert first.fault is None and bool(first.out.isfinite().all())
    for turn in range(RUNS):
        again = run(subject, inputs, 1 + (turn * 37) % (2 * sms))
        assert again.fault is None
        assert torch.equal(first.out, again.out), f"run {turn}"
        assert torch.equal(first.regions["slot_row"], again.regions["slot_row"])
