"""The recipes of docs/recipes.md against calls as the frameworks make them.

The frameworks are stand-ins; the model, Megatron's wrappers and the logprobs are real.
"""

import importlib
import inspect
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.packed_seq_params import PackedSeqParams

from isomodels.contract import Contract, contract_of
from isomodels.errors import UnsupportedError
from isomodels.megatron import Trainer
from isomodels.validate.bits import bits
from tests.checkpoints import make_qwen3
from tests.recipes.recipes import load, recipes, stand_in

LENGTHS = (5, 1, 17, 9)
ALIGN = 8  # frameworks pad each packed sequence to a multiple


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("checkpoint") / "qwen3", torch.bfloat16, tied=True)


@pytest.fixture(scope="module")
def trainer(checkpoint):
    with Trainer(checkpoint, dtype=torch.bfloat16) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(512, (n,), generator=generator).tolist() for n in LENGTHS]


def packed(sequences: list[list[int]]) -> tuple[Tensor, PackedSeqParams]:
    """[1, T] tokens and bounds, each sequence padded to a multiple of `ALIGN`."""
    padded = [[*s, *[0] * (-len(s) % ALIGN)] for s in sequences]
    edges, real = ([0], [0])
    for long, short in zip(padded, sequences, strict=True):
        edges.append(edges[-1] + len(long))
        real.append(real[-1] + len(short))
    bounds, given = (torch.tensor(e, dtype=torch.int32) for e in (edges, real))
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=given,
        cu_seqlens_kv=given,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=max(map(len, padded)),
        max_seqlen_kv=max(map(len, padded)),
    )
    return torch.tensor([list(chain.from_iterable(padded))]), params


def expected(trainer: Trainer, sequences: list[list[int]]) -> list[Tensor]:
    return trainer.score(sequences)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(bits(found), bits(wanted))


def rows_of(params: PackedSeqParams, rows: Tensor, sequences: list[list[int]]) -> list[Tensor]:
    """[T] -> for each sequence the logprobs of its tokens but the first."""
    starts = params.cu_seqlens_q_padded.tolist()
    return [rows[s : s + len(q) - 1] for s, q in zip(starts, sequences, strict=False)]


def left_padded(sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Tokens and mask [B, S], as SkyRL holds them."""
    longest = max(map(len, sequences)) + 2
    pads = [longest - len(s) for s in sequences]
    tokens = [[0] * pad + s for pad, s in zip(pads, sequences, strict=True)]
    mask = [[0] * pad + [1] * len(s) for pad, s in zip(pads, sequences, strict=True)]
    return torch.tensor(tokens), torch.tensor(mask)


@pytest.fixture
def bridge(monkeypatch):
    """What the recipes import where Megatron-Bridge is missing: it notes how it is called."""
    calls: list[tuple] = []

    def iso_bridge(checkpoint, **kwargs):
        calls.append((checkpoint, kwargs))
        return SimpleNamespace()

    module = "isomodels.megatron.bridge"
    stand_in(monkeypatch, module, iso_bridge=iso_bridge, IsoAutoBridge=SimpleNamespace())
    return calls


def test_skyrl(trainer, sequences, bridge, monkeypatch, tmp_path):
    workers = "skyrl.backends.skyrl_train.workers.megatron"
    worker = stand_in(monkeypatch, f"{workers}.megatron_worker", AutoBridge=None)
    wrapper = stand_in(monkeypatch, f"{workers}.megatron_model_wrapper")
    load("isomodels_skyrl", tmp_path, monkeypatch).install()
    worker.AutoBridge.from_hf_pretrained("PATH", trust_remote_code=True)
    assert bridge == [("PATH", {"trust_remote_code": True})]

    tokens, mask = left_padded(sequences)
    ids, params = packed(sequences)
    logits = trainer.ddp(ids, None, None, packed_seq_params=params)
    found = wrapper.from_parallel_logits_to_logprobs_packed_sequences(
        logits,
        ids,
        params.cu_seqlens_q_padded,
        tokens.shape[1],
        vocab_start_index=0,
        vocab_end_index=logits.shape[-1],
        group=None,
        inference_only=True,
        cp_group=None,
        chunk_size=None,
        attention_mask=mask,
        sub_seq_lengths=None,
    )
    assert found.shape == (len(sequences), tokens.shape[1] - 1)
    for row, wanted in zip(found, expected(trainer, sequences), strict=True):
        kept = row[len(row) - len(wanted) :]
        assert_same(kept, wanted)
        assert (row[: len(row) - len(wanted)] == 0).all()


@dataclass
class Output:
    """As transformers' output classes: of the given fields, open for more."""

    hidden_states: Tensor | None = None


@dataclass
class Context:
    temperature: float


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_verl(trainer, sequences, bridge, monkeypatch, tmp_path, temperature):
    mcore = "verl.models.mcore"
    theirs = stand_in(monkeypatch, f"{mcore}.bridge", AutoBridge=None)
    fused = stand_in(monkeypatch, f"{mcore}.model_forward_fused", CausalLMOutputForPPO=Output)
    load("isomodels_verl", tmp_path, monkeypatch)
    theirs.AutoBridge.from_hf_pretrained("PATH", trust_remote_code=False)
    assert bridge == [("PATH", {"trust_remote_code": False})]

    forward = inspect.signature(trainer.model.forward).parameters  # how verl chooses its path
    assert {"output_processor", "output_processor_context"} <= forward.keys()
    ids, params = packed(sequences)
    out = trainer.ddp(
        input_ids=ids,
        attention_mask=None,
        position_ids=None,
        packed_seq_params=params,
        labels=ids.roll(-1, 1),
        output_processor=fused.fused_output_processor,
        output_processor_context=Context(temperature),
    )
    found = rows_of(params, out.log_probs[0], sequences)
    for row, wanted in zip(found, trainer.score(sequences, temperature), strict=True):
        assert_same(row, wanted)
    assert out.entropy.shape == ids.shape
    assert (out.entropy > 0).all()
    trainer.ddp.zero_grad_buffer()
    torch.cat(found).sum().backward()
    gradient = trainer.core.model.embed_tokens.weight.main_grad
    assert gradient.abs().sum() > 0
    trainer.ddp.zero_grad_buffer()


def test_nemo_rl(trainer, sequences, bridge, monkeypatch, tmp_path):
    train = stand_in(monkeypatch, "nemo_rl.models.megatron.train")
    package = importlib.import_module("isomodels.megatron")
    monkeypatch.setattr(
        package, "bridge", importlib.import_module("isomodels.megatron.bridge"), raising=False
    )
    load("isomodels_nemo_rl", tmp_path, monkeypatch).install()
    ids, params = packed(sequences)
    logits = trainer.ddp(
        input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=params
    )
    length = max(map(len, sequences)) + ALIGN
    found = train.from_parallel_logits_to_logprobs_packed_sequences(
        logits, ids, params.cu_seqlens_q_padded, length, 0, logits.shape[-1], None,
        inference_only=True, cp_group=None,
    )  # fmt: skip
    for row, wanted in zip(found, expected(trainer, sequences), strict=True):
        assert_same(row[: len(wanted)], wanted)


def test_slime(checkpoint, sequences, trainer, monkeypatch, tmp_path):
    args = SimpleNamespace(
        custom_model_provider_path="isomodels_slime.provider",
        hf_checkpoint=str(checkpoint),
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=1,
        sequence_parallel=False,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    stand_in(monkeypatch, "megatron.training", get_args=lambda: args)
    load("isomodels_slime", tmp_path, monkeypatch)
    module, _, name = args.custom_model_provider_path.rpartition(".")
    provider = getattr(importlib.import_module(module), name)
    assert "vp_stage" in inspect.signature(provider).parameters
    model = provider(pre_process=True, post_process=True, vp_stage=None)
    ids, params = packed(sequences)
    logits = model(
        input_ids=ids,
        position_ids=None,
        attention_mask=None,
        labels=None,
        packed_seq_params=params,
        loss_mask=torch.ones_like(ids),
    )
    compute_log_probs = load("isomodels_logprobs", tmp_path, monkeypatch).token_logprobs
    rows = compute_log_probs(logits.squeeze(0), ids[0].roll(-1))
    for row, wanted in zip(
        rows_of(params, rows, sequences), expected(trainer, sequences), strict=True
    ):
        assert_same(row, wanted)
    assert model.config.hidden_size == trainer.config.hidden_size  # a critic's head needs it
    head = torch.nn.Linear(model.config.hidden_size, 1)
    head.forward = lambda x, weight=None, runtime_gather_output=None: (
        x.float().sum(-1, True),
        None,
    )
    model.output_layer = head
    assert model(ids, packed_seq_params=params).shape == (*ids.shape, 1)


def test_the_sync_by_rpc(checkpoint, monkeypatch, tmp_path):
    calls: list[tuple[str, dict]] = []
    sync = load("isomodels_sync", tmp_path, monkeypatch)
    sender = sync.sender(checkpoint, lambda method, kwargs: calls.append((method, kwargs)), "cpu")
    (shake,) = calls
    assert shake[0] == "init_weight_transfer_engine"
    told = Contract.from_json(shake[1]["init_info"]["contract"], "the contract")
    assert told.digests == contract_of(checkpoint, "cpu").digests
    from isomodels.checkpoint import load_checkpoint

    sender.send(dict(load_checkpoint(checkpoint).state_dict()), "step 3")
    sender.close()
    assert [method for method, _ in calls[1:]] == [
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "shutdown_weight_transfer_engine",
    ]
    assert calls[2][1]["update_info"]["version"] == "step 3"


def test_a_padding_mask_is_refused_and_not_ignored(trainer, sequences):
    tokens, mask = left_padded(sequences)
    with pytest.raises(UnsupportedError, match="attention_mask"):
        trainer.ddp(tokens, None, mask.bool())


def test_every_recipe_is_run():
    assert set(recipes()) == {
        f"isomodels_{name}" for name in ("logprobs", "sync", "skyrl", "verl", "nemo_rl", "slime")
    }
