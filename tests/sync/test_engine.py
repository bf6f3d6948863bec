"""Weights from a trainer into a running engine: contract first, all or nothing, equal bits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vllm is not installed")

from isomodels.contract import Contract, contract_of
from isomodels.errors import CheckpointError, ContractError
from isomodels.layers.pieces import pieces
from isomodels.sync import WeightSender, digest
from isomodels.sync.blocks import Block, Whole, to_text
from isomodels.sync.digest import Spans, digests
from isomodels.vllm import Engine, LLMSyncClient, Request, weight_transfer
from isomodels.vllm.incoming import check_blocks
from tests.vllm.support import assert_equal_bits, draw, load_core

PROMPTS = [draw(60, 1), draw(33, 2), draw(7, 3)]


def weights(folder: Path) -> dict[str, Tensor]:
    core = load_core(folder)
    return {**dict(core.named_parameters()), **dict(core.named_buffers())}


def check(engine: Engine, folder: Path) -> None:
    results = engine.run([Request(prompt, max_tokens=6) for prompt in PROMPTS])
    assert assert_equal_bits(load_core(folder), results) > 0


def test_synced_weights_give_the_bits_of_their_own_model(engine: Engine, folders: list[Path]):
    check(engine, folders[0])  # fills the prefix cache
    sender = WeightSender(LLMSyncClient(engine.llm), contract_of(folders[0]))
    where = {n: p.data_ptr() for n, p in engine._model.core.named_parameters()}
    sent = sender.send(weights(folders[1]), "step 1")
    assert {n: p.data_ptr() for n, p in engine._model.core.named_parameters()} == where
    assert sent.bytes == sum(t.nbytes for t in weights(folders[1]).values())
    assert engine.llm.get_weight_version() == "step 1"
    check(engine, folders[1])
    sender.send(weights(folders[0]), "step 2")
    check(engine, folders[0])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lack model\.norm\.weight"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(7)}), "model.norm.weight is"),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float()}), "float32"),
    ],
)
def test_a_refused_sync_keeps_the_old_weights(engine: Engine, folders: list[Path], fault, message):
    sender = WeightSender(LLMSyncClient(engine.llm), contract_of(folders[0]))
    sender.send(weights(folders[0]), "before")
    tensors = weights(folders[1])
    fault(tensors)
    with pytest.raises(CheckpointError, match=message):
        sender.send(tensors, "refused")
    assert engine.llm.get_weight_version() == "before"
    check(engine, folders[0])


def test_the_names_on_both_sides_must_be_equal(folders: list[Path]):
    core = load_core(folders[0])
    tensors = weights(folders[0])
    parameters = {name: list(t.shape) for name, t in tensors.items()}
    blocks = [Block.of(Whole(name, t), 0, 0) for name, t in tensors.items()]
    check_blocks(blocks, parameters, pieces(core))
    with pytest.raises(CheckpointError, match=f"missing: {blocks[0].name}"):
        check_blocks(blocks[1:], parameters, pieces(core))
    more = Block.of(Whole("c", torch.zeros(1)), 0, 0)
    with pytest.raises(CheckpointError, match="left over: c"):
        check_blocks([*blocks, more], parameters, pieces(core))
    with pytest.raises(CheckpointError, match=f"not filled exactly once: {blocks[0].name}"):
        check_blocks([*blocks, blocks[0]], parameters, pieces(core))


def test_what_only_a_trainer_carries_stays_there(engine: Engine, folders: list[Path]):
    sender = WeightSender(LLMSyncClient(engine.llm), contract_of(folders[0]))
    sender.send({**weights(folders[0]), "model.mtp_layers.0.weight": torch.zeros(3)}, "carried")
    check(engine, folders[0])


def test_damage_on_the_way_is_seen_before_anything_changes(
    engine: Engine, folders: list[Path], monkeypatch: pytest.MonkeyPatch
):
    import isomodels.sync.shared as module

    sender = WeightSender(LLMSyncClient(engine.llm), contract_of(folders[0]))
    write = module._write

    def damaged(path, size, blocks, places):
        write(path, size, blocks, places)
        with open(path, "r+b") as file:
            file.seek(places[3][1] + 5)
            byte = file.read(1)
            file.seek(places[3][1] + 5)
            file.write(bytes([byte[0] ^ 1]))

    monkeypatch.setattr(module, "_write", damaged)
    with pytest.raises(CheckpointError, match=r"damaged on the way .*keeps its old"):
        sender.send(weights(folders[0]), "damaged")
    check(engine, folders[0])


def test_contracts_are_compared_first(engine: Engine, folders: list[Path]):
    contract = contract_of(folders[0])
    schedules = {**contract.numerical_policy["schedules"]}
    linear = schedules["linear"]
    schedules["linear"] = {**linear, "constants": {**linear["constants"], "k_partition": 2}}
    policy = {**contract.numerical_policy, "schedules": schedules}
    with pytest.raises(
        ContractError, match=r"schedules\.linear\.constants\.k_partition: 2 against 1"
    ):
        WeightSender(LLMSyncClient(engine.llm), replace(contract, numerical_policy=policy))
    raw = json.loads((folders[0] / "config.json").read_text())
    with pytest.raises(ContractError, match=r"semantic.*rms_norm_eps"):
        WeightSender(LLMSyncClient(engine.llm), contract_of({**raw, "rms_norm_eps": 1e-3}))
    sender = WeightSender(LLMSyncClient(engine.llm), contract)
    sender.contract = replace(contract, numerical_policy=policy)
    with pytest.raises(ContractError, match="another contract"):
        sender.send(weights(folders[0]), "after a change")


def test_an_interrupted_copy_stops_serving(engine: Engine, folders: list[Path], monkeypatch):
    sender = WeightSender(LLMSyncClient(engine.llm), contract_of(folders[0]))
    real = weight_transfer.copy_in_place

    def failing(plan, come, expected):
        targets = Spans.of([piece.tensor for piece in plan.mine[:3]])
        some = replace(plan, mine=plan.mine[:3], whole=plan.whole[:3], targets=targets)
        real(some, come, expected)
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(weight_transfer, "copy_in_place", failing)
    with pytest.raises(RuntimeError, match="the device is lost"):
        sender.send(weights(folders[1]), "lost")
    assert "interrupted" in engine._model.refusal
    with pytest.raises(CheckpointError, match="interrupted"):
        engine._model.compute_logits(torch.zeros(1, 128))
    monkeypatch.undo()
    sender.send(weights(folders[0]), "whole again")
    check(engine, folders[0])


def test_other_bits_after_the_copy_stop_serving(engine: Engine, folders: list[Path], monkeypatch):
    import isomodels.vllm.incoming as module

    sender = WeightSender(LLMSyncClient(engine.llm), contract_of(folders[0]))
    real = module.copy_spans

    def changed(sources, targets, tensors):
        _, *values = real(sources, targets, tensors)
        _, first = tensors(0)
        first.view(torch.int16).view(-1)[7] ^= 1
        return [digest(first), *values]

    monkeypatch.setattr(module, "copy_spans", changed)
    with pytest.raises(CheckpointError, match="differ from the trainer's: the engine serves noth"):
        sender.send(weights(folders[1]), "wrong")
    assert engine._model.refusal is not None
    assert LLMSyncClient(engine.llm).weight_version() != "wrong"
    monkeypatch.undo()
    sender.send(weights(folders[0]), "whole again")
    check(engine, folders[0])


def test_the_engine_tells_its_contract(engine: Engine, folders: list[Path]):
    (text,) = engine.llm.collective_rpc("isomodels_contract")
    told, ours = Contract.from_json(text), contract_of(folders[0])
    for section in ("semantic", "numerical_policy"):
        assert told.digests[section] == ours.digests[section]
    assert told.deployment["host"]["name"] == "vllm"


def test_a_file_that_is_gone_or_cut_is_refused(engine: Engine, folders: list[Path], tmp_path):
    contract = contract_of(folders[0])
    client = LLMSyncClient(engine.llm)
    client.init_weight_transfer_engine({"contract": contract.to_json()})
    cut = tmp_path / "cut"
    cut.write_bytes(b"short")
    tensors = weights(folders[0])
    blocks = [Block.of(Whole(name, tensor), 0, 0) for name, tensor in tensors.items()]
    for path, message in ((tmp_path / "absent", "cannot be read"), (cut, "5 bytes instead of")):
        client.start_weight_update()
        info = {
            "transport": "shared_memory",
            "sources": [{"path": str(path), "bytes": 1 << 20}],
            "blocks": to_text(blocks),
            "digests": [str(value) for value in digests(list(tensors.values()))],
            "contract": contract.digests["numerical_policy"],
            "version": "x",
        }
        with pytest.raises(CheckpointError, match=message):
            client.update_weights(info)
    for field, value, message in (
        ("transport", "pigeon", "no weights travel by 'pigeon'"),
        ("transport", "network", "no network was joined"),
    ):
        client.start_weight_update()
        with pytest.raises(CheckpointError, match=message):
            client.update_weights({**info, field: value})
    check(engine, folders[0])
