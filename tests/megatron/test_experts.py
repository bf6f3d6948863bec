"""Experts in Megatron: its config, marked parameters, the load-balancing loss, routes."""

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from isomodels.config import read_config
from isomodels.errors import ConfigError, UnsupportedError
from isomodels.layers.load_balancing import load_balancing_loss
from isomodels.layers.routes import record_routes, replay_routes, routers
from isomodels.megatron import Trainer, model_provider, transformer_config
from isomodels.megatron.checks import check_transformer_config
from isomodels.megatron.packing import pack
from isomodels.megatron.process import start_process, stop_process
from tests.checkpoints import make_qwen3_moe
from tests.megatron.bits import assert_all_same_bits, assert_same_bits
from tests.megatron.test_training import BATCH, assert_same, core_grads, main_grads, weights

BALANCE = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}


@pytest.fixture
def megatron():
    start_process()
    yield
    stop_process()


def hf_config(checkpoint):
    return read_config(checkpoint("qwen3_moe", "fp32"))[1]


def test_the_config_says_what_the_checkpoint_says(checkpoint):
    built = transformer_config(hf_config(checkpoint))
    assert built.num_moe_experts == 8
    assert built.moe_ffn_hidden_size == 48
    assert built.moe_router_topk == 3
    assert built.moe_layer_freq == [0, 1, 1]
    assert built.moe_router_score_function == "softmax"
    assert built.moe_router_pre_softmax is False  # the chosen scores are divided by their sum
    assert built.moe_router_load_balancing_type == "none"


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"norm_topk_prob": False}, {"moe_router_pre_softmax": True}),
        ({"num_experts_per_tok": 1}, {"moe_router_pre_softmax": True}),
        ({"mlp_only_layers": []}, {"moe_layer_freq": [1, 1, 1]}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": []}, {"moe_layer_freq": [0, 1, 0]}),
    ],
)
def test_other_routers_and_layers(tmp_path, changes, fields):
    _, config = read_config(make_qwen3_moe(tmp_path / "c", **changes))
    built = transformer_config(config)
    assert {name: getattr(built, name) for name in fields} == fields


def test_a_layer_frequency_may_be_a_number(tmp_path):
    _, config = read_config(make_qwen3_moe(tmp_path / "c", mlp_only_layers=[]))
    check_transformer_config(transformer_config(config, moe_layer_freq=1), config)
    for other in (2, [1, 1, 0]):
        with pytest.raises(ConfigError, match="moe_layer_freq"):
            transformer_config(config, moe_layer_freq=other)


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ({"num_moe_experts": 16}, ConfigError),
        ({"moe_router_topk": 2}, ConfigError),
        ({"moe_ffn_hidden_size": 64}, ConfigError),
        ({"moe_router_score_function": "sigmoid"}, ConfigError),
        ({"moe_router_pre_softmax": True}, ConfigError),
        ({"moe_shared_expert_gate": True}, ConfigError),
        ({"moe_router_dtype": "fp64"}, UnsupportedError),
        ({"moe_router_topk_scaling_factor": 2.5}, ConfigError),
        ({"moe_router_num_groups": 4, "moe_router_group_topk": 2}, ConfigError),
        ({"expert_tensor_parallel_size": 2}, UnsupportedError),
        ({"moe_router_load_balancing_type": "seq_aux_loss"}, UnsupportedError),
        ({"moe_router_load_balancing_type": "sinkhorn"}, UnsupportedError),
        ({"moe_z_loss_coeff": 1e-3}, UnsupportedError),
        ({"moe_input_jitter_eps": 1e-2}, UnsupportedError),
        ({"moe_expert_capacity_factor": 1.0, **BALANCE}, UnsupportedError),
        ({"moe_apply_probs_on_input": True, "moe_router_topk": 3}, UnsupportedError),
        ({"moe_router_force_load_balancing": True}, UnsupportedError),
        ({"moe_enable_routing_replay": True}, UnsupportedError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_honoured_is_named(checkpoint, override, error):
    with pytest.raises(error, match=next(iter(override))):
        transformer_config(hf_config(checkpoint), **override)


def is_expert(name: str) -> bool:
    return ".experts." in name


def test_parameters_of_experts_are_marked(checkpoint, megatron):
    model = model_provider(checkpoint("qwen3_moe", "fp32"))()
    named = dict(model.core.named_parameters())
    assert sum(map(is_expert, named)) == 4
    # Megatron keeps their gradients to the ranks of the same experts
    assert {n for n, p in named.items() if not getattr(p, "allreduce", True)} == set(
        filter(is_expert, named)
    )
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    own = {id(p) for buffer in ddp.expert_parallel_buffers for p in buffer.params}
    assert own == {id(p) for n, p in named.items() if is_expert(n)}


def test_the_router_is_where_helpers_look(checkpoint, megatron):
    model = model_provider(checkpoint("qwen3_moe", "fp32"))()
    found = [one.mlp.router for one in model.decoder.layers if hasattr(one.mlp, "router")]
    assert [router.layer_id for router in found] == [1, 2]
    assert found == routers(model.core)


# The load-balancing loss


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_loss_moves_no_bit_of_a_forward(checkpoint, sequences, dtype, recompute):
    path, kinds = checkpoint("qwen3_moe", dtype), []
    precision = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for coefficient in (0.0, 0.5):
        with Trainer(
            path, dtype=precision, load_balancing=coefficient, recompute=recompute
        ) as trainer:
            kinds.append([*trainer.forward_logprobs(sequences), *trainer.score(sequences)])
            assert sorted(trainer.model.load_balancing_losses) == ([1, 2] if coefficient else [])
    assert_all_same_bits(*kinds)


@pytest.mark.parametrize("recompute", [False, True])
def test_its_gradients_are_added_to_those_of_the_loss(checkpoint, recompute):
    """Against the core with the same loss written out, summed over tokens as Megatron has it."""
    coefficient = 0.5
    with Trainer(
        checkpoint("qwen3_moe", "fp32"),
        dtype=torch.float32,
        load_balancing=coefficient,
        recompute=recompute,
    ) as trainer:
        (one,) = pack(BATCH, 100)
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
        mine = main_grads(trainer, [one])
        losses = []

        def note(logits, ids, weights):
            losses.append(load_balancing_loss(logits, ids, trainer.core.config.routing))
            return weights

        for router in routers(trainer.core):
            router.attach_loss = note
        trainer.ddp.zero_grad_buffer()
        with trainer.without_recompute():
            loss = trainer.ddp(
                one.input_ids, None, None, labels=one.targets, packed_seq_params=one.params
            )
        tokens = one.input_ids.numel()
        total = loss.view(-1)[one.keep].sum() + coefficient * tokens * sum(losses)
        total.backward()
        for name, parameter in trainer.core.named_parameters():
            torch.testing.assert_close(mine[name], parameter.main_grad, msg=name)
        plain = core_grads(trainer, one)
        gate = "model.layers.2.mlp.gate.weight"
        assert not torch.allclose(mine[gate], plain[gate])


def test_training_for_balance_spreads_the_tokens(checkpoint, sequences):
    """With a coefficient that drowns the language loss, towards the 1 of an even router."""
    with Trainer(
        checkpoint("qwen3_moe", "fp32"), dtype=torch.float32, load_balancing=1e3, lr=1e-4
    ) as trainer:
        seen = []
        for _ in range(4):
            trainer.step(sequences)
            seen.append(sum(trainer.model.load_balancing_losses.values()).item())
        assert seen == sorted(seen, reverse=True)
        assert seen[0] - 2 > 2 * (seen[-1] - 2)


# Routes


@pytest.mark.parametrize("recompute", [False, True])
def test_row_33_replay_of_own_routes_is_a_no_op(checkpoint, recompute):
    with Trainer(
        checkpoint("qwen3_moe", "bf16"), dtype=torch.bfloat16, recompute=recompute
    ) as trainer:
        packs = pack(BATCH, 100)
        with record_routes(trainer.core) as recorded:
            plain = trainer.forward_logprobs(BATCH)
        routes = recorded.take()[: sum(map(len, BATCH))]
        grads = main_grads(trainer, packs)
        with replay_routes(trainer.core, routes):
            assert_all_same_bits(trainer.forward_logprobs(BATCH), plain)
            assert_same(main_grads(trainer, packs), grads)
        with replay_routes(trainer.core, (routes + 1) % 8):
            moved = trainer.forward_logprobs(BATCH)
        assert not torch.equal(moved[0], plain[0])


def test_row_32_scoring_and_training_choose_the_same_experts(checkpoint, sequences):
    with Trainer(checkpoint("qwen3_moe", "bf16"), dtype=torch.bfloat16, max_tokens=100) as trainer:
        found = []
        for run in (trainer.score, trainer.forward_logprobs):
            with record_routes(trainer.core) as recorded:
                run(sequences)
                found.append(recorded.take())
        assert found[0].shape == (sum(map(len, sequences)), 2, 3)
        assert torch.equal(*found)


def test_a_step_changes_router_and_experts(checkpoint):
    with Trainer(checkpoint("qwen3_moe", "bf16"), dtype=torch.bfloat16, lr=1e-3) as trainer:
        before = weights(trainer)
        trainer.step(BATCH)
        after = {name: t for name, t in weights(trainer).items() if ".mlp." in name}
        assert sum(map(is_expert, after)) == 4
        for name, tensor in after.items():
            assert not torch.equal(tensor, before[name]), name


def test_an_unused_expert_is_left_alone(checkpoint):
    """Its gradient is zero, and Adam without decay does not move it."""
    with Trainer(checkpoint("qwen3_moe", "fp32"), dtype=torch.float32) as trainer:
        with record_routes(trainer.core) as recorded:
            trainer.score([[5, 9]])
        used = recorded.take()[:, 0].unique().tolist()
        idle = [expert for expert in range(8) if expert not in used]
        assert idle
        experts = trainer.core.model.layers[1].mlp.experts
        before = experts.down_proj.detach().clone()
        trainer.step([[5, 9]])
        assert_same_bits(experts.down_proj[idle], before[idle])
        assert not torch.equal(experts.down_proj[used], before[used])
