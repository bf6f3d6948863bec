"""Latent attention, shared experts and the fp32 correction bias through Megatron."""

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from isomodels.checkpoint import load_checkpoint
from isomodels.layers.moe import Experts
from isomodels.layers.routes import record_routes
from isomodels.megatron import Trainer
from tests.dense.models import run_packed
from tests.kernel.battery import assert_same_bits
from tests.moe.mla.models import ARCHITECTURES, make


def alone(core, sequences):
    """[n - 1] logprobs of each sequence from the core itself, without Megatron."""
    found = []
    for sequence in sequences:
        ids = torch.tensor(sequence)
        with torch.no_grad():
            found.append(core.token_logprobs(run_packed(core, ids)[:-1], ids[1:]))
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_case_before_and_after_training(tmp_path, sequences, name):
    folder, used = make(name, tmp_path / "source", torch.bfloat16), sequences[2:6]
    with Trainer(folder, dtype=torch.bfloat16, recompute=True, max_tokens=150) as trainer:
        core = load_checkpoint(folder).requires_grad_(False)
        bias = core.model.layers[1].mlp.gate.e_score_correction_bias
        for _ in range(2):
            expected = alone(core, used)
            for way in ("score", "forward_logprobs", "recompute_logprobs"):
                for got, right in zip(getattr(trainer, way)(used), expected, strict=True):
                    assert_same_bits(got.detach(), right, way)
            # row 37: the bf16 wrapper, an optimizer step, a save and a load
            live = trainer.core.model.layers[1].mlp.gate.e_score_correction_bias
            assert_same_bits(live, bias, "correction bias")
            losses = [trainer.step(used).loss for _ in range(2)]
            assert losses[1] < losses[0]
            trainer.save_hf(tmp_path / "saved")
            core = load_checkpoint(tmp_path / "saved").requires_grad_(False)
            stored = core.model.layers[1].mlp.gate.e_score_correction_bias
            assert_same_bits(stored, bias, "saved correction bias")
            assert trainer.step(used).loss < losses[1]
            trainer.save_hf(tmp_path / "saved")
            core = load_checkpoint(tmp_path / "saved").requires_grad_(False)


def test_the_config_states_the_experts(tmp_path):
    folder = make("deepseek", tmp_path, torch.bfloat16)
    with Trainer(folder, dtype=torch.bfloat16) as trainer:
        config = trainer.config
        assert (config.num_moe_experts, config.moe_router_topk) == (16, 4)
        assert config.moe_router_enable_expert_bias
        assert config.moe_router_score_function == "sigmoid"
        assert (config.moe_router_num_groups, config.moe_router_group_topk) == (4, 2)
        assert config.moe_layer_freq == [0, 1, 1]
        assert config.moe_shared_expert_intermediate_size == 32
        marked = [m for m in trainer.core.modules() if isinstance(m, Experts)]
        assert len(marked) == 2
        assert all(hasattr(p, "allreduce") for m in marked for p in m.parameters())


def test_the_update_of_correction_biases(tmp_path, sequences):
    """Megatron's own, towards balance; no bit of a forward moves before the next step."""
    folder, used = make("deepseek", tmp_path / "source", torch.bfloat16), sequences[2:6]
    with Trainer(folder, dtype=torch.bfloat16, recompute=True, bias_update_rate=0.25) as trainer:
        core = load_checkpoint(folder).requires_grad_(False)
        for way in (trainer.forward_logprobs, trainer.recompute_logprobs, trainer.score):
            for got, right in zip(way(used), alone(core, used), strict=True):
                assert_same_bits(got.detach(), right, "of no step")
        gates = [core.model.layers[i].mlp.gate for i in (1, 2)]
        live = [trainer.core.model.layers[i].mlp.gate for i in (1, 2)]
        for update in trainer.model.bias_updates:
            assert not update.local_tokens_per_expert.any(), "counts of an evaluation are kept"
        with record_routes(core) as recorded:
            flat = torch.tensor([token for sequence in used for token in sequence])
            run_packed(core, flat, [len(sequence) for sequence in used])
        ids = recorded.take()  # [T, layers, k]
        before = [gate.e_score_correction_bias.clone() for gate in live]
        trainer.step(used)
        for layer, (gate, old) in enumerate(zip(live, before, strict=True)):
            counts = torch.bincount(ids[:, layer].reshape(-1), minlength=16).float()
            moved = old + torch.sign(counts.mean() - counts) * 0.25
            assert_same_bits(gate.e_score_correction_bias, moved, f"bias {layer}")
            assert_same_bits(old, gates[layer].e_score_correction_bias)
        trainer.save(tmp_path / "training")
        trainer.save_hf(tmp_path / "saved")
        kept = [gate.e_score_correction_bias.clone() for gate in live]
        trainer.step(used)
        trainer.load(tmp_path / "training")
        saved = load_checkpoint(tmp_path / "saved")
        for i, gate, bias in zip((1, 2), live, kept, strict=True):
            assert_same_bits(gate.e_score_correction_bias, bias, "resumed")
            stored = saved.model.layers[i].mlp.gate.e_score_correction_bias
            assert_same_bits(stored, bias, "saved")
