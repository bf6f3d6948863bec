"""Gradients and optimizer steps through Megatron's wrappers."""

import contextlib

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from isomodels.batch import Batch
from isomodels.megatron import Trainer
from isomodels.megatron.packing import Pack, pack
from tests.megatron.bits import assert_same_bits
from tests.megatron.conftest import DTYPES

CASES = [("qwen3", "fp32"), ("qwen3_tied", "bf16"), ("mimo", "bf16"), ("qwen3_moe", "bf16")]
BATCH = [[5, 9, 3, 77, 12], [8, 1, 400, 2], [33, 2, 1, 1, 1, 90, 6], [17, 4]]


def main_grads(trainer: Trainer, packs: list[Pack]) -> dict[str, Tensor]:
    """fp32 gradients of the summed loss, accumulated by DDP over the packs."""
    trainer.ddp.zero_grad_buffer()
    for one in packs:
        loss = trainer.ddp(
            one.input_ids, None, None, labels=one.targets, packed_seq_params=one.params
        )
        loss.view(-1)[one.keep].sum().backward()
    return {name: param.main_grad.clone() for name, param in trainer.model.core.named_parameters()}


def core_grads(trainer: Trainer, one: Pack) -> dict[str, Tensor]:
    """Gradients of the core itself, in its own dtype, without Megatron."""
    core = type(trainer.core)(trainer.core.config, dtype=trainer.config.params_dtype)
    core.load_state_dict(trainer.core.state_dict(), strict=False)
    bounds = one.params.cu_seqlens_q
    hidden = core(one.input_ids[0], Batch.positions(bounds), Batch.packed(bounds))
    (-core.token_logprobs(hidden, one.targets[0]))[one.keep].sum().backward()
    return {name: param.grad for name, param in core.named_parameters()}


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in trainer.core.named_parameters()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert_same_bits(left[name], right[name], name)


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_main_grad_is_the_gradient_of_the_core(checkpoint, kind, dtype):
    with Trainer(checkpoint(kind, dtype), dtype=DTYPES[dtype]) as trainer:
        (one,) = pack(BATCH, 100)
        # The buffer starts at +0, to which a gradient of -0 adds nothing.
        own = {name: grad.float() + 0.0 for name, grad in core_grads(trainer, one).items()}
        assert_same(main_grads(trainer, [one]), own)
        assert all(grad.any() for grad in own.values())


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_recompute_gives_the_bits_of_plain_gradients(checkpoint, kind, dtype):
    grads = []
    for recompute in (False, True):
        with Trainer(checkpoint(kind, dtype), dtype=DTYPES[dtype], recompute=recompute) as trainer:
            grads.append(main_grads(trainer, pack(BATCH, 100)))
    assert_same(*grads)


def test_block_recompute_enters_only_the_first_layers(checkpoint):
    from isomodels.megatron.model import _recomputed_layers

    with Trainer(checkpoint("qwen3", "fp32"), dtype=torch.float32) as trainer:
        plain = main_grads(trainer, pack(BATCH, 100))
        trainer.config.recompute_granularity = "full"
        trainer.config.recompute_method = "block"
        trainer.config.recompute_num_layers = 2
        layers = trainer.core.model.layers
        trainer.model._recomputed = _recomputed_layers(trainer.config, layers)
        runs = dict.fromkeys(range(len(layers)), 0)

        def count(index: int) -> None:
            runs[index] += 1

        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, index=index: count(index))
        assert_same(main_grads(trainer, pack(BATCH, 100)), plain)
        assert runs == {0: 2, 1: 2, 2: 1}


def test_gradients_accumulate_over_microbatches(checkpoint):
    with Trainer(checkpoint("qwen3_tied", "bf16"), dtype=torch.bfloat16) as trainer:
        first, second = pack(BATCH[:2], 100)[0], pack(BATCH[2:], 100)[0]
        alone = [main_grads(trainer, [one]) for one in (first, second)]
        summed = {name: alone[0][name] + alone[1][name] for name in alone[0]}
        assert_same(main_grads(trainer, [first, second]), summed)


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_distributed_optimizer_equals_the_plain_one(checkpoint, kind, dtype):
    after = []
    for distributed in (False, True):
        with Trainer(
            checkpoint(kind, dtype),
            dtype=DTYPES[dtype],
            distributed_optimizer=distributed,
            clip_grad=0.0,  # the two sum the norm in another order
            weight_decay=0.1,
        ) as trainer:
            for _ in range(3):
                trainer.step(BATCH, num_microbatches=2)
            after.append(weights(trainer))
    assert_same(*after)


def test_steps_follow_adam_on_fp32_master_weights(checkpoint):
    """Against torch's AdamW on fp32 copies, fed with the gradients of the core."""
    with Trainer(
        checkpoint("qwen3", "bf16"), dtype=torch.bfloat16, clip_grad=0.0, lr=1e-3
    ) as trainer:
        master = {name: param.float() for name, param in weights(trainer).items()}
        adam = torch.optim.AdamW(master.values(), lr=1e-3, weight_decay=0.0)
        (one,) = pack(BATCH, 100)
        for _ in range(3):
            scale = 1.0 / int(one.keep.sum())
            for name, grad in core_grads(trainer, one).items():
                master[name].grad = grad.float() * scale
            adam.step()
            trainer.step(BATCH)
            rounded = {name: param.bfloat16() for name, param in master.items()}
            assert_same(weights(trainer), rounded)


def test_training_lowers_the_loss_and_scores_follow(checkpoint):
    with Trainer(checkpoint("qwen3", "bf16"), dtype=torch.bfloat16, lr=3e-4) as trainer:
        losses = [trainer.step(BATCH).loss for _ in range(4)]
        assert losses == sorted(losses, reverse=True)
        total = sum(float(row.double().sum()) for row in trainer.score(BATCH))
        assert -total / sum(len(sequence) - 1 for sequence in BATCH) < losses[-1]


def test_dense_batch_trains_too(checkpoint):
    with Trainer(checkpoint("qwen3", "fp32"), dtype=torch.float32) as trainer:
        ids = torch.randint(512, (2, 9), generator=torch.Generator().manual_seed(0))
        bounds = torch.tensor([0, 9, 18], dtype=torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        grads = []
        for row, params in ((ids, None), (ids.view(1, -1), packed)):
            trainer.ddp.zero_grad_buffer()
            trainer.ddp(row, None, None, labels=row, packed_seq_params=params).sum().backward()
            grads.append({n: p.main_grad.clone() for n, p in trainer.model.core.named_parameters()})
        assert_same(*grads)


def test_no_target_at_all_is_an_error(checkpoint):
    refused = pytest.raises(ValueError, match="two tokens")
    with Trainer(checkpoint("qwen3", "fp32"), dtype=torch.float32) as trainer, refused:
        trainer.step([[3], [4]])


def test_one_trainer_a_process(checkpoint):
    from isomodels.errors import HostError

    path = checkpoint("qwen3", "fp32")
    with Trainer(path, dtype=torch.float32), pytest.raises(HostError, match="close the other"):
        Trainer(path, dtype=torch.float32)


@pytest.mark.parametrize("fails", [True, False])
def test_a_rank_that_fails_waits_for_no_other(checkpoint, monkeypatch, fails):
    """With NCCL a group that is destroyed waits for ranks that wait for this one."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as distributed_c10d

    aborted = []

    def abort() -> None:
        aborted.append(dist.get_world_size())
        dist.destroy_process_group()

    monkeypatch.setattr(distributed_c10d, "_abort_process_group", abort)
    trainer = Trainer(checkpoint("qwen3", "fp32"), dtype=torch.float32)
    monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
    with contextlib.suppress(ZeroDivisionError), trainer:
        if fails:
            raise ZeroDivisionError
    assert aborted == [1] * fails
    assert not dist.is_initialized()
