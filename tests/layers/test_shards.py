"""The arithmetic of layers cut for tensor parallelism, in one process: column shards, folded sums.

Over real ranks: tests/parallel.
"""

import pytest
import torch

from isomodels.config import read_config
from isomodels.errors import UnsupportedError
from isomodels.kernels.fixed_order import matmul_nt
from isomodels.kernels.linear import linear
from isomodels.kernels.row_linear import LEAVES, tree_sum
from isomodels.layers.linear import Linear
from isomodels.layers.mlp import MLP
from isomodels.layers.parallel import Layout, TensorParallel, check_layout, tensor_degrees
from isomodels.parity.checkpoints import tiny_config
from tests.kernel.battery import DTYPES, assert_same_bits, hard


def fold_over_ranks(x_of_rank, weight, ranks, dtype):
    """Each rank folds its own leaves in fp32; the ranks' sums are folded and rounded once."""
    partials = []
    for x, w in zip(x_of_rank, weight.chunk(ranks, 1), strict=True):
        count = LEAVES // ranks
        leaves = zip(x.chunk(count, 1), w.chunk(count, 1), strict=True)
        partials.append(tree_sum([matmul_nt(a, b) for a, b in leaves]))
    return tree_sum(partials).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [r for r in (2, 4, 8) if r <= LEAVES])
@pytest.mark.parametrize("intermediate", [64, 344])
def test_mlp_over_ranks(intermediate, ranks, dtype):
    mlp = MLP(48, intermediate, dtype=dtype).requires_grad_(False)
    for i, parameter in enumerate(mlp.parameters()):
        parameter.copy_(hard(*parameter.shape, kind="normal", seed=i) / 7)
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    for rows in (1, 20):
        x = hard(rows, 48, kind="normal", dtype=dtype)
        activated = [
            mlp.act(linear(x, torch.cat(pair)))
            for pair in zip(gate.chunk(ranks), up.chunk(ranks), strict=True)
        ]
        got = fold_over_ranks(activated, mlp.down_proj.weight, ranks, dtype)
        assert_same_bits(got, mlp(x), f"{ranks} ranks, {rows} rows")


def test_the_check_can_fail():
    # Adding rounded results of ranks, as an all-reduce in the model dtype does.
    mlp = MLP(48, 64, dtype=torch.bfloat16).requires_grad_(False)
    for i, parameter in enumerate(mlp.parameters()):
        parameter.copy_(hard(*parameter.shape, kind="normal", seed=i) / 7)
    x = hard(20, 48, kind="normal", dtype=torch.bfloat16)
    activated = mlp.act(mlp.gate_up_proj(x)).chunk(2, 1)
    halves = [
        linear(a, w) for a, w in zip(activated, mlp.down_proj.weight.chunk(2, 1), strict=True)
    ]
    with pytest.raises(AssertionError):
        assert_same_bits(halves[0] + halves[1], mlp(x))


def test_bias_of_a_column_shard():
    layer = Linear(40, 96, bias=True, dtype=torch.float32).requires_grad_(False)
    layer.weight.copy_(hard(96, 40))
    layer.bias.copy_(hard(96, seed=1))
    x = hard(5, 40, seed=2)
    parts = zip(layer.weight.chunk(8), layer.bias.chunk(8), strict=True)
    assert_same_bits(torch.cat([linear(x, w, b) for w, b in parts], 1), layer(x), "shards")


EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("fields", "ranks", "message"),
    [
        ({}, 3, r"3 does not divide the 4 leaves .* summed: use 1, 2 or 4$"),
        ({}, 8, "8 does not divide the 4 attention heads: use 1, 2 or 4"),
        (EIGHT, 16, "16 does not divide the 8 leaves in which the vocabulary .* 1, 2, 4 or 8"),
        ({**EIGHT, "num_key_value_heads": 8, "intermediate_size": 348}, 8, "intermediate_size"),
        (
            {**EIGHT, "num_attention_heads": 12, "num_key_value_heads": 3},
            4,
            "the 3 key-value heads",
        ),
        ({**EIGHT, "hidden_size": 132}, 8, None),
        ({**EIGHT, "vocab_size": 100}, 2, "the leaves of a vocabulary of 100: use 1$"),
    ],
)
def test_degrees_that_divide_a_model(fields, ranks, message):
    raw = {**tiny_config("Qwen3ForCausalLM"), "dtype": "bfloat16", **fields}
    _, config = read_config(raw)
    layout = Layout(TensorParallel(0, ranks))
    assert (ranks in tensor_degrees(config)) == (message is None)
    if message is None:
        check_layout(config, layout)
        return
    with pytest.raises(UnsupportedError, match=message):
        check_layout(config, layout)
