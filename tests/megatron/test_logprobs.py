"""One token, one history, one set of weights: the same bits from every way through Megatron."""

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from isomodels.batch import Batch
from isomodels.megatron import Trainer
from isomodels.megatron.packing import pack
from tests.megatron.bits import assert_all_same_bits, assert_same_bits
from tests.megatron.conftest import DTYPES

KINDS = ("qwen3", "qwen3_tied", "mimo", "qwen3_moe")


@pytest.fixture(params=[(kind, dtype) for kind in KINDS for dtype in DTYPES], ids="-".join)
def trainer(request, checkpoint):
    kind, dtype = request.param
    with Trainer(
        checkpoint(kind, dtype), dtype=DTYPES[dtype], recompute=True, max_tokens=150
    ) as made:
        yield made


def alone(trainer: Trainer, sequence: list[int], temperature: float = 1.0) -> Tensor:
    """[n - 1] logprobs from the core itself, one sequence, no Megatron."""
    ids = torch.tensor(sequence)
    bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
    with torch.no_grad():
        hidden = trainer.core(ids, torch.arange(len(ids)), Batch.packed(bounds))
        logprobs = trainer.core.logprobs(hidden, temperature)
    return logprobs[:-1].gather(1, ids[1:, None]).squeeze(1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_case_gives_the_bits_of_the_core_alone(trainer, sequences, temperature):
    expected = [alone(trainer, sequence, temperature) for sequence in sequences]
    assert_all_same_bits(trainer.score(sequences, temperature), expected)
    assert_all_same_bits(trainer.forward_logprobs(sequences, temperature), expected)
    assert_all_same_bits(trainer.recompute_logprobs(sequences, temperature), expected)


def test_dense_batch_has_the_bits_of_packed_sequences(trainer):
    ids = torch.randint(512, (3, 41), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    bounds = torch.arange(4, dtype=torch.int32) * 41
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    causal = torch.ones(1, 1, 41, 41, dtype=torch.bool).triu(1)
    positions = torch.arange(41).expand(3, 41)

    logits = trainer.ddp(ids, positions, causal)
    assert logits.shape == (3, 41, 512)
    assert logits.dtype == torch.float32
    flat = trainer.ddp(ids.view(1, -1), None, None, packed_seq_params=packed)
    assert_same_bits(flat.view(3, 41, 512), logits)

    loss = trainer.ddp(ids, positions, causal, labels=labels)
    assert loss.shape == (3, 41)
    assert_same_bits(loss, -trainer.model.logprobs(ids, labels))
    assert_same_bits(
        trainer.model.compute_language_model_loss(labels, logits.transpose(0, 1)), loss
    )
    flat_loss = trainer.ddp(
        ids.view(1, -1), None, None, labels=labels.view(1, -1), packed_seq_params=packed
    )
    assert_same_bits(flat_loss.view(3, 41), loss)


def test_padding_between_packed_sequences_moves_nothing(trainer, sequences):
    chosen = sequences[2:4]
    bounds, ids = [0], []
    for sequence in chosen:
        ids += [*sequence, *[9] * 5]
        bounds.append(len(ids))
    real = torch.tensor([0, len(chosen[0]), sum(map(len, chosen))], dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=torch.tensor(bounds, dtype=torch.int32),
        cu_seqlens_kv_padded=torch.tensor(bounds, dtype=torch.int32),
    )
    row = torch.tensor([ids])
    logprobs = trainer.model.logprobs(row, row.roll(-1, 1), params)[0]
    for start, sequence in zip(bounds[:-1], chosen, strict=True):
        assert_same_bits(logprobs[start : start + len(sequence) - 1], alone(trainer, sequence))


def test_trace_names_operations_and_sees_one_ulp(trainer, sequences):
    sequence = sequences[2]
    before = trainer.trace(sequence, 11)
    assert next(iter(before)) == "model.embed_tokens"
    assert list(before)[-1] == "lm_head"
    assert before == trainer.trace([*sequence[:12], 5, 6], 11)

    mlp = trainer.core.model.layers[1].mlp
    if hasattr(mlp, "experts"):
        weight, where = mlp.experts.down_proj, "experts"
    else:
        weight, where = mlp.down_proj.weight, "down_proj"
    integers = torch.int32 if weight.dtype == torch.float32 else torch.int16
    with torch.no_grad():
        weight.view(integers).add_(1)
    after = trainer.trace(sequence, 11)
    first = next(name for name in before if before[name] != after[name])
    assert first == f"model.layers.1.mlp.{where}"


def test_replaced_output_layer_is_called(trainer, sequences):
    class ValueHead(torch.nn.Module):
        def forward(self, hidden, weight=None, runtime_gather_output=None):
            return hidden[..., :1].float(), None

    trainer.model.output_layer = ValueHead()
    (one,) = pack(sequences[2:3], 150)
    values = trainer.ddp(one.input_ids, None, None, packed_seq_params=one.params)
    assert values.shape == (1, len(sequences[2]), 1)
