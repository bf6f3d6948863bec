"""Requested, installed and served: each that is not the others' is a fault of the report."""

import json

import pytest
import torch

from isomodels.contract import Contract, contract_of
from isomodels.contract.served import ServedOperations
from isomodels.kernels.linear import linear
from isomodels.kernels.swiglu import swiglu
from isomodels.layers import linear as linear_layers
from isomodels.parity.operations import answer, operation_faults
from tests.dense.models import load_ours, make, run_packed, tokens
from tests.parity.test_cases import _clean_report


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make("qwen3", tmp_path_factory.mktemp("c") / "qwen3", torch.bfloat16)


def said(folder) -> dict:
    """What a trainer says after one forward."""
    model, ids = load_ours(folder), tokens(9)
    served = ServedOperations(model)
    with torch.no_grad():
        model.token_logprobs(run_packed(model, ids), ids)
    served.close()
    assert not model._forward_hooks
    return json.loads(json.dumps(answer(contract_of(folder), served)))


def test_a_sound_side_has_no_fault(folder):
    assert operation_faults(contract_of(folder), "trainer", said(folder)) == []


def test_another_operation_that_serves_is_a_fault(folder, monkeypatch):
    requested = contract_of(folder)
    monkeypatch.setattr(linear_layers, "row_linear", linear)
    *contract, fault = operation_faults(requested, "trainer", said(folder))
    assert "the trainer's forward served other operations" in fault
    assert "0 row_linear instead of" in fault
    # a contract is read from a run of the module, so the side's own tells it too
    assert any("schedules.row_linear" in one for one in contract)


def test_another_kernel_under_the_same_name_is_a_fault(folder):
    other = torch.library.Library("isomodels", "IMPL")
    try:
        other.impl("swiglu", lambda x: swiglu._init_fn(x), "CPU", allow_override=True)
        (fault,) = operation_faults(contract_of(folder), "trainer", said(folder))
    finally:
        other._destroy()
    assert "swiglu was registered by" in fault
    assert "test_operations.py" in fault


def test_a_side_of_another_contract_and_one_that_counted_nothing_are_faults(folder):
    one = said(folder)
    requested = contract_of(folder)
    (fault,) = operation_faults(requested, "engine", {**one, "served": one["served"][:1]} | {})[:1]
    assert "counted no" in fault
    assert len(operation_faults(requested, "trainer", {**one, "served": []})) == 2
    other = contract_of(folder, dtype=torch.float32)
    faults = operation_faults(requested, "trainer", {**one, "contract": other.to_json()})
    assert any("numerical_policy.dtype" in fault for fault in faults)
    assert Contract.from_json(one["contract"]).digests == requested.digests


def test_the_report_has_them_among_its_faults():
    report = _clean_report()
    assert report.faults() == []
    report.operation_faults = ["the engine's forward served other operations"]
    assert report.faults() == report.operation_faults
