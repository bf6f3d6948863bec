"""Weights of a trainer in any layout into an engine of two workers, which take their own parts."""

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

from isomodels.batch import Batch
from isomodels.checkpoint import load_checkpoint
from isomodels.contract import contract_of
from isomodels.errors import CheckpointError
from isomodels.layers.parallel import named_tensors
from isomodels.parity.checkpoints import random_checkpoint, tiny_config
from isomodels.sync import Network, WeightSender
from isomodels.vllm import Engine, LLMSyncClient, Request
from tests.megatron.bits import assert_same_bits
from tests.vllm.support import draw

LIMITS = {
    "max_model_len": 64,
    "num_gpu_blocks_override": 16,
    "block_size": 16,
    "skip_tokenizer_init": True,  # a drawn checkpoint has none
}


def tensors(folder):
    return dict(named_tensors(load_checkpoint(folder)))


def check(engine, folder):
    core = load_checkpoint(folder).requires_grad_(False)
    (result,) = engine.run([Request(draw(20, 1), max_tokens=4)])
    ids = torch.tensor([*result.prompt, *(token.id for token in result.tokens)])
    bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
    hidden = core(ids, Batch.positions(bounds), Batch.packed(bounds))
    got = torch.tensor([token.logprob for token in result.tokens])
    assert_same_bits(got, core.token_logprobs(hidden[:-1], ids[1:])[-len(got) :])


# Slow: for a process of its own, where no other engine has taken the cores.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "how"),
    [
        ("Qwen3ForCausalLM", {}),
        ("Glm4MoeLiteForCausalLM", {"enable_expert_parallel": True}),
    ],
)
def test_two_workers_take_their_parts(tmp_path, architecture, how):
    raw = {**tiny_config(architecture), "num_hidden_layers": 2}
    folders = [random_checkpoint(tmp_path / str(i), raw, "bfloat16", seed=i) for i in (1, 2)]
    contract = contract_of(folders[0])
    with Engine(
        folders[0],
        dtype="bfloat16",
        tensor_parallel_size=2,
        weight_transfer_config={"backend": "isomodels"},
        **how,
        **LIMITS,
    ) as engine:
        client = LLMSyncClient(engine.llm)
        sender = WeightSender(client, contract)
        new = tensors(folders[1])
        name = next(iter(new))
        with pytest.raises(CheckpointError, match=f"{name} is"):
            sender.send({**new, name: new[name].float()}, "refused")
        check(engine, folders[0])  # both workers refused, and answer in step
        sender.send(new, "new")
        assert client.weight_version() == "new"
        check(engine, folders[1])
        sender = WeightSender(client, contract, Network("127.0.0.1", 2, timeout_s=60.0))
        sender.send(tensors(folders[0]), "by network")
        check(engine, folders[0])
