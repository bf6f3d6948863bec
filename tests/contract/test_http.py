"""The route of the contract; behind a live server it is tested in tests/vllm/test_serve.py."""

from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

from isomodels.contract import Contract, contract_of
from tests.contract.test_contract import tiny

fastapi = pytest.importorskip("fastapi")


def ask(model_impl, contracts):
    from fastapi.testclient import TestClient

    (found,) = entry_points(group="vllm.endpoint_plugins", name="isomodels")
    app = fastapi.FastAPI()
    found.load()().attach_router(app)

    async def collective_rpc(method):
        assert method == "isomodels_contract"
        return contracts

    config = SimpleNamespace(model_config=SimpleNamespace(model_impl=model_impl))
    app.state.engine_client = SimpleNamespace(vllm_config=config, collective_rpc=collective_rpc)
    return TestClient(app).get("/isomodels/contract")


def test_workers_that_agree_give_one_document():
    expected = contract_of(tiny("Qwen3ForCausalLM"))
    answer = ask("isomodels", [expected.to_json()] * 2)
    assert answer.status_code == 200
    assert Contract.from_json(answer.content).digests == expected.digests


def test_stock_models_and_workers_that_differ_are_refused():
    contracts = [
        contract_of(tiny(name)).to_json() for name in ("Qwen3ForCausalLM", "MiMoForCausalLM")
    ]
    for status, impl in ((404, "auto"), (500, "isomodels")):
        answer = ask(impl, contracts)
        assert answer.status_code == status
        assert answer.json()["error"]["message"].startswith("isomodels: ")
