"""The recipes of docs/recipes.md against calls as the frameworks make them.

The frameworks are stand-ins; the model, Megatron's wrappers and the logprobs are real.
"""

import importlib
import inspect
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from isomodels.contract import Contract, contract_of
from isomodels.errors import UnsupportedError
from tests.recipes.packed import (
    ALIGN,
    assert_same,
    assert_trains,
    left_padded,
    packed,
    rows_of,
)
from tests.recipes.recipes import load, recipes, stand_in

PACKED = "from_parallel_logits_to_logprobs_packed_sequences"
NEXT = "get_next_token_logprobs_from_logits"
SKYRL = "skyrl.backends.skyrl_train.workers.megatron"
VERL_FUSED = "verl.models.mcore.model_forward_fused"
NEMO_LOSS = "nemo_rl.algorithms.loss.loss_input"
SLIME = "slime.utils.ppo_utils"
REPLACED = {
    "skyrl": [
        (f"{SKYRL}.megatron_worker", "AutoBridge"),
        (f"{SKYRL}.megatron_model_wrapper", PACKED),
    ],
    "verl": [
        ("verl.models.mcore.bridge", "AutoBridge"),
        (VERL_FUSED, "fused_output_processor"),
        (VERL_FUSED, "_get_patching_model"),
    ],
    "nemo_rl": [
        ("nemo_rl.models.megatron.train", PACKED),
        (NEMO_LOSS, PACKED),
        (NEMO_LOSS, NEXT),
    ],
    "slime": [(SLIME, "_calculate_log_probs_and_entropy_chunk")],
}


@pytest.fixture
def skyrl(bridge, monkeypatch, tmp_path):
    """Modules of SkyRL's Megatron worker, with the recipe installed."""
    worker = stand_in(monkeypatch, f"{SKYRL}.megatron_worker", AutoBridge=None)
    wrapper = stand_in(monkeypatch, f"{SKYRL}.megatron_model_wrapper", **{PACKED: None})
    load("isomodels_skyrl", tmp_path, monkeypatch).install()
    return worker, wrapper


@pytest.mark.parametrize("training", [False, True])
def test_skyrl(trainer, sequences, bridge, skyrl, training):
    worker, wrapper = skyrl
    worker.AutoBridge.from_hf_pretrained("PATH", trust_remote_code=True)
    assert bridge == [("PATH", {"trust_remote_code": True})]

    tokens, mask = left_padded(sequences)
    ids, params = packed(sequences)
    with torch.set_grad_enabled(training):
        logits = trainer.ddp(ids, None, None, packed_seq_params=params)
        found = wrapper.from_parallel_logits_to_logprobs_packed_sequences(
            logits,
            ids,
            params.cu_seqlens_q_padded,
            tokens.shape[1],
            vocab_start_index=0,
            vocab_end_index=logits.shape[-1],
            group=None,
            inference_only=not training,
            cp_group=None,
            chunk_size=None,
            attention_mask=mask,
            sub_seq_lengths=None,
        )
    assert found.shape == (len(sequences), tokens.shape[1] - 1)
    for row, wanted in zip(found, trainer.score(sequences), strict=True):
        kept = row[len(row) - len(wanted) :]
        assert_same(kept, wanted)
        assert (row[: len(row) - len(wanted)] == 0).all()
    if training:
        assert_trains(trainer, found)


def test_what_packed_logprobs_cannot_do_is_refused(monkeypatch, tmp_path):
    logprobs = load("isomodels_logprobs", tmp_path, monkeypatch)
    given = (torch.zeros(1, 4, 8), torch.zeros(1, 4, dtype=torch.long), torch.tensor([0, 4]), 4)
    for changed, named in (
        ({"sub_seq_lengths": [[2, 2]]}, "several sequences in one row"),
        ({"return_packed_layout": True}, "several sequences in one row"),
        ({"sampling_params": Sampling(top_p=0.9)}, "top-p"),
        ({"sampling_params": Sampling(top_k=20)}, "top-k"),
    ):
        with pytest.raises(NotImplementedError, match=named):
            logprobs.packed_logprobs(*given, **changed)
    for harmless in (None, Sampling(), Sampling(top_k=-1), Sampling(temperature=2.0)):
        logprobs.packed_logprobs(*given, sampling_params=harmless)


@pytest.mark.parametrize("name", ["skyrl", "verl", "nemo_rl", "slime"])
def test_a_framework_without_the_hook_is_refused(bridge, monkeypatch, tmp_path, name):
    """Each name that a recipe replaces, missing: then nobody would call ours."""
    replaced = REPLACED[name]
    for missing in replaced:
        for other, _ in replaced:
            monkeypatch.delitem(sys.modules, other, raising=False)
        for module, attribute in replaced:
            known = {} if (module, attribute) == missing else {attribute: None}
            stand_in(monkeypatch, module, **known)
        if name == "verl":
            stand_in(monkeypatch, VERL_FUSED, unwrap_model=None)
        if name == "slime":
            stand_in(monkeypatch, "megatron.training", get_args=None)
        with pytest.raises(ImportError, match=rf"{missing[0]} has no {missing[1]}"):
            getattr(load(f"isomodels_{name}", tmp_path, monkeypatch), "install", print)()


@dataclass
class Output:
    """As transformers' output classes: of the given fields, open for more."""

    hidden_states: Tensor | None = None


@dataclass
class Context:
    temperature: float


class GPTModel(torch.nn.Module):
    """Megatron's own, which verl asks for by type."""


def verl_looks_for_the_processor(fused, model, monkeypatch) -> bool:
    """How verl chooses between Megatron's `output_processor` and a forward of its own.

    It notes its choice on the model when it builds, and reads it below the wrappers when it runs.
    """
    found = fused._get_patching_model(model)
    if found is not None:
        names = inspect.signature(found.forward).parameters
        has = {"output_processor", "output_processor_context"} <= names.keys()
        mode = "hook" if has else "legacy"
        monkeypatch.setattr(found, "_verl_fused_forward_mode", mode, raising=False)
    return getattr(unwrap_model(model), "_verl_fused_forward_mode", "legacy") == "hook"


def unwrap_model(model):
    while hasattr(model, "module"):
        model = model.module
    return model


@pytest.fixture
def verl(monkeypatch):
    """verl's two modules: the bridge, and the fused forward that takes a `GPTModel` alone."""

    def patching_model(model):
        return model if isinstance(unwrap_model(model), GPTModel) else None

    mcore = "verl.models.mcore"
    return stand_in(monkeypatch, f"{mcore}.bridge", AutoBridge=None), stand_in(
        monkeypatch,
        VERL_FUSED,
        CausalLMOutputForPPO=Output,
        fused_output_processor=None,
        unwrap_model=unwrap_model,
        _get_patching_model=patching_model,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_verl(trainer, sequences, bridge, verl, monkeypatch, tmp_path, temperature):
    theirs, fused = verl
    assert not verl_looks_for_the_processor(fused, trainer.ddp, monkeypatch)  # without the recipe
    load("isomodels_verl", tmp_path, monkeypatch)
    theirs.AutoBridge.from_hf_pretrained("PATH", trust_remote_code=False)
    assert bridge == [("PATH", {"trust_remote_code": False})]

    assert verl_looks_for_the_processor(fused, trainer.ddp, monkeypatch)
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
    assert_trains(trainer, torch.cat(found))


@pytest.fixture
def nemo_rl(bridge, monkeypatch, tmp_path):
    """NeMo-RL's scoring and loss modules, with the recipe installed."""
    train = stand_in(monkeypatch, "nemo_rl.models.megatron.train", **{PACKED: None})
    loss = stand_in(monkeypatch, NEMO_LOSS, **{PACKED: None, NEXT: None})
    package = importlib.import_module("isomodels.megatron")
    monkeypatch.setattr(
        package, "bridge", importlib.import_module("isomodels.megatron.bridge"), raising=False
    )
    load("isomodels_nemo_rl", tmp_path, monkeypatch).install()
    return train, loss


@dataclass
class Sampling:
    """As NeMo-RL's `TrainingSamplingParams`."""

    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0


@pytest.mark.parametrize("pre_rolled", [None, False, True], ids=["scoring", "rolled", "fused loss"])
def test_nemo_rl_packed(trainer, sequences, nemo_rl, pre_rolled):
    train, loss = nemo_rl
    ids, params = packed(sequences)
    logits = trainer.ddp(
        input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=params
    )
    bounds, length = params.cu_seqlens_q_padded, max(map(len, sequences)) + ALIGN
    common = {"vocab_start_index": 0, "vocab_end_index": logits.shape[-1], "group": None}
    common |= {"cp_group": None, "chunk_size": None, "sampling_params": Sampling()}
    if pre_rolled is None:
        found = train.from_parallel_logits_to_logprobs_packed_sequences(
            logits,
            target=ids,
            cu_seqlens_padded=bounds,
            unpacked_seqlen=length,
            inference_only=True,
            **common,
        )
    else:
        found = loss.from_parallel_logits_to_logprobs_packed_sequences(
            logits,
            ids.roll(-1, 1) if pre_rolled else ids,
            tuple(bounds.tolist()),
            length,
            inference_only=False,
            target_is_pre_rolled=pre_rolled,
            return_packed_layout=False,
            **common,
        )
        assert_trains(trainer, found)
    for row, wanted in zip(found, trainer.score(sequences), strict=True):
        assert_same(row[: len(wanted)], wanted)


def test_nemo_rl_loss_of_each_sequence(trainer, sequences, nemo_rl):
    _, loss = nemo_rl
    ids, params = packed(sequences)
    logits = trainer.ddp(
        input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=params
    )
    bounds = params.cu_seqlens_q_padded.tolist()
    rows = [
        loss.get_next_token_logprobs_from_logits(
            input_ids=torch.tensor([sequence]),
            next_token_logits=logits.narrow(1, start, end - start),
            seq_index=None,
            vocab_parallel_rank=0,
            vocab_parallel_group=None,
            context_parallel_group=None,
            sampling_params=Sampling(),
            chunk_size=None,
            cp_sharder=None,
        )
        for sequence, start, end in zip(sequences, bounds, bounds[1:], strict=False)
    ]
    for row, wanted in zip(rows, trainer.score(sequences), strict=True):
        assert row.shape == (1, len(wanted))
        assert_same(row[0], wanted)
    assert_trains(trainer, torch.cat(rows, 1))


def slime_chunks(utils, logits, ids, chunk_size=7, **given):
    """As slime's `calculate_log_probs_and_entropy` calls it, a part of the packed row at a time."""
    given = {"with_entropy": False, "with_entropy_grad": True, "log_prob_keep_mask": None} | given
    pieces = (logits.squeeze(0).contiguous(), ids[0].roll(-1))
    for logits_part, tokens_part in zip(*(x.split(chunk_size) for x in pieces), strict=True):
        yield utils._calculate_log_probs_and_entropy_chunk(logits_part, tokens_part, None, **given)


@pytest.mark.parametrize("with_grad", [True, False])
def test_the_entropy_of_slime(trainer, sequences, monkeypatch, tmp_path, with_grad):
    stand_in(monkeypatch, "megatron.training", get_args=None)
    utils = stand_in(monkeypatch, SLIME, _calculate_log_probs_and_entropy_chunk=None)
    load("isomodels_slime", tmp_path, monkeypatch)
    ids, params = packed(sequences)
    logits = trainer.ddp(ids, None, None, packed_seq_params=params)
    chunks = list(slime_chunks(utils, logits, ids, with_entropy=True, with_entropy_grad=with_grad))
    entropy = torch.cat([one for _, one in chunks])
    exact = torch.distributions.Categorical(logits=logits.detach()[0].double()).entropy()
    torch.testing.assert_close(entropy.detach().double(), exact, atol=1e-5, rtol=0)
    assert entropy.requires_grad == with_grad
    assert_trains(trainer, torch.cat([one for one, _ in chunks]))
    assert all(one is None for _, one in slime_chunks(utils, logits, ids))
    with pytest.raises(NotImplementedError, match="top-p"):
        next(slime_chunks(utils, logits, ids, log_prob_keep_mask=torch.ones(1, dtype=torch.bool)))


def test_slime(checkpoint, sequences, trainer, monkeypatch, tmp_path):
    args = SimpleNamespace(
        custom_model_provider_path="isomodels_slime.provider",
        hf_checkpoint=str(checkpoint),
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
        sequence_parallel=False,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    stand_in(monkeypatch, "megatron.training", get_args=lambda: args)
    utils = stand_in(monkeypatch, SLIME, _calculate_log_probs_and_entropy_chunk=None)
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
    rows = torch.cat([row for row, _ in slime_chunks(utils, logits, ids)])
    assert rows.shape == (ids.shape[1], 1)
    rows = rows.squeeze(-1)
    for row, wanted in zip(rows_of(params, rows, sequences), trainer.score(sequences), strict=True):
        assert_same(row, wanted)
    assert model.config.hidden_size == trainer.config.hidden_size  # a critic's head needs it
    head = torch.nn.Linear(model.config.hidden_size, 1)
    head.forward = lambda x, weight=None, runtime_gather_output=None: (
        x.float().sum(-1, True),
        None,
    )
    model.output_layer = head
    assert model(ids, packed_seq_params=params).shape == (*ids.shape, 1)


def test_the_sync_by_rpc(checkpoint, trainer, monkeypatch, tmp_path):
    calls: list[tuple[str, dict]] = []
    sync = load("isomodels_sync", tmp_path, monkeypatch)
    sender = sync.sender(checkpoint, lambda method, kwargs: calls.append((method, kwargs)), "cpu")
    (shake,) = calls
    assert shake[0] == "init_weight_transfer_engine"
    told = Contract.from_json(shake[1]["init_info"]["contract"], "the contract")
    assert told.digests == contract_of(checkpoint, "cpu").digests
    sync.send(sender, trainer.wrapped, "step 3")
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
