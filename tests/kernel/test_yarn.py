"""YaRN against transformers: the same frequencies, bit for bit, and the same two factors."""

import math
from dataclasses import replace

import pytest
import torch

from isomodels.kernels.rope import rope_table
from isomodels.kernels.yarn import Yarn, yarn_table
from tests.kernel.battery import assert_same_bits

DEEPSEEK = Yarn(
    factor=40,
    original_max_position_embeddings=4096,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=1.0,
)
# (rotary size, theta, constants): as published; other mscale values; ramps that are cut at either
# end, or have no width
CASES = [
    (64, 10000.0, DEEPSEEK),
    (64, 50000.0, replace(DEEPSEEK, mscale=0.707, mscale_all_dim=0.707)),
    (64, 10000.0, replace(DEEPSEEK, mscale=0.707, mscale_all_dim=1.0)),
    (64, 10000.0, replace(DEEPSEEK, mscale=1.0, mscale_all_dim=0.0)),
    (64, 10000.0, replace(DEEPSEEK, mscale=0.0, mscale_all_dim=1.0)),
    (16, 10000.0, replace(DEEPSEEK, original_max_position_embeddings=128, factor=4.5)),
    (8, 1e6, replace(DEEPSEEK, beta_fast=2.0, beta_slow=1.9)),
    (32, 10000.0, replace(DEEPSEEK, factor=1.0)),
]


def theirs(dim, theta, yarn):
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    stated = {"rope_type": "yarn", "rope_theta": theta, **vars(yarn)}
    longest = int(yarn.factor * yarn.original_max_position_embeddings)
    config = DeepseekV3Config(
        qk_rope_head_dim=dim, rope_parameters=stated, max_position_embeddings=longest
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    return frequencies, factor, yarn_apply_mscale(config.rope_parameters, 1.0)


@pytest.mark.parametrize(("dim", "theta", "yarn"), CASES)
def test_row_58_frequencies_and_factors(dim, theta, yarn):
    frequencies, table_factor, softmax_factor = theirs(dim, theta, yarn)
    assert_same_bits(yarn.frequencies(dim, theta), frequencies)
    assert yarn.table_factor == table_factor
    assert yarn.softmax_factor == softmax_factor


def test_row_58_the_two_factors_are_not_one():
    yarn = replace(DEEPSEEK, mscale=0.707, mscale_all_dim=1.0)
    log = math.log(40)
    assert yarn.table_factor == (0.0707 * log + 1) / (0.1 * log + 1)
    assert yarn.softmax_factor == (0.1 * log + 1) ** 2
    assert DEEPSEEK.table_factor == 1.0


def test_tables():
    yarn = replace(DEEPSEEK, mscale=0.707)
    table = yarn_table(64, 10000.0, 300, yarn)
    positions = torch.arange(300, dtype=torch.float32)
    angles = (positions[:, None] * yarn.frequencies(64, 10000.0)).double()
    right = torch.cat((angles.cos(), angles.sin()), 1) * yarn.table_factor
    assert_same_bits(table, right.float())
    plain = yarn_table(64, 10000.0, 300, None)
    assert_same_bits(plain, rope_table(64, 10000.0, 300))


def test_the_comparison_can_fail():
    wrong = replace(DEEPSEEK, beta_fast=16)
    with pytest.raises(AssertionError):
        assert_same_bits(wrong.frequencies(64, 10000.0), theirs(64, 10000.0, DEEPSEEK)[0])
