"""Weights from a trainer into a running engine: contract first, all or nothing, equal bits."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from isomodels.contract import Contract, contract_of
from isomodels.errors import CheckpointError, ContractError
from isomodels.sync import WeightSender, digest
from isomodels.vllm import Engine, LLMSyncClient, Request
from isomodels.vllm.weight_transfer import IsoModelsWeightTransfer, check_tensors
from tests.checkpoints import make_qwen3
from tests.vllm.support import assert_equal_bits, draw, load_core

PROMPTS = [draw(60, 1), draw(33, 2), draw(7, 3)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [
        make_qwen3(tmp_path_factory.mktemp("sync") / str(seed), torch.bfloat16, seed=seed)
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def engine(folders: list[Path]) -> Iterator[Engine]:
    with Engine(
        folders[0],
        dtype="bfloat16",
        max_model_len=256,
        num_gpu_blocks_override=64,
        block_size=16,
        enable_prefix_caching=True,
        weight_transfer_config={"backend": "isomodels"},
    ) as engine:
        yield engine


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


def test_the_names_on_both_sides_must_be_equal():
    own = {"a": torch.zeros(2), "b": torch.zeros(2)}
    digests = {name: str(digest(t)) for name, t in own.items()}
    check_tensors(own, own, digests)
    with pytest.raises(CheckpointError, match="missing: b"):
        check_tensors({"a": own["a"]}, own, digests)
    with pytest.raises(CheckpointError, match="left over: c"):
        check_tensors({**own, "c": torch.zeros(1)}, own, digests)


def test_what_only_a_trainer_carries_stays_there(engine: Engine, folders: list[Path]):
    sender = WeightSender(LLMSyncClient(engine.llm), contract_of(folders[0]))
    sender.send({**weights(folders[0]), "model.mtp_layers.0.weight": torch.zeros(3)}, "carried")
    check(engine, folders[0])


def test_damage_on_the_way_is_seen_before_anything_changes(
    engine: Engine, folders: list[Path], monkeypatch: pytest.MonkeyPatch
):
    import isomodels.sync.sender as module

    sender = WeightSender(LLMSyncClient(engine.llm), contract_of(folders[0]))
    real = module.published
    monkeypatch.setattr(module, "published", lambda t, f: real({**t, **flipped(t)}, f))

    def flipped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        one = tensors["model.norm.weight"].clone()
        one.view(torch.int16)[3] ^= 1
        return {"model.norm.weight": one}

    with pytest.raises(CheckpointError, match=r"damaged on the way: model\.norm\.weight"):
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
    core = engine._model.core
    copied = []

    class Failing(dict):
        def __getitem__(self, name):
            copied.append(name)
            if len(copied) > len(self) + 3:  # after the checks and three copies
                raise RuntimeError("the device is lost")
            return super().__getitem__(name)

    own = Failing({**dict(core.named_parameters()), **dict(core.named_buffers())})
    monkeypatch.setattr(IsoModelsWeightTransfer, "_own_tensors", lambda self: own)
    with pytest.raises(RuntimeError, match="the device is lost"):
        sender.send(weights(folders[1]), "lost")
    assert "interrupted" in engine._model.refusal
    with pytest.raises(CheckpointError, match="interrupted"):
        engine._model.compute_logits(torch.zeros(1, 128))
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
    tensors = weights(folders[0])
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    save_file(tensors, whole)
    shutil.copy(whole, cut)
    with cut.open("r+b") as file:
        file.truncate(whole.stat().st_size // 2)
    for path in (tmp_path / "absent", cut):
        client.start_weight_update()
        info = {
            "path": str(path),
            "digests": {n: str(digest(t)) for n, t in tensors.items()},
            "contract": contract.digests["numerical_policy"],
            "version": "x",
        }
        with pytest.raises(CheckpointError, match="cannot be read"):
            client.update_weights(info)
    check(engine, folders[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.int64])
def test_the_digest_sees_every_single_change(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 200, (37, 11), generator=generator).to(dtype)
    base = digest(x)
    assert digest(x.t().contiguous().t()) == base  # strides are no content
    words = x.clone().view(-1).view(torch.uint8)
    for place in range(0, len(words), 7):
        changed = words.clone()
        changed[place] ^= 1
        assert digest(changed.view(dtype).view(x.shape)) != base
    swapped = x.clone().view(-1)
    swapped[[0, 1]] = swapped[[1, 0]]
    assert (digest(swapped.view(x.shape)) != base) == bool((swapped != x.view(-1)).any())
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.zeros(3)) != digest(torch.zeros(4))
