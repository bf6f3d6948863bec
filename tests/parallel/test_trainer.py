"""Megatron's trainer in parallel layouts, over gloo: the logprobs of one process, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from isomodels.errors import UnsupportedError
from isomodels.megatron.degrees import Degrees
from isomodels.parity.ranks import Ranks
from tests.megatron.bits import assert_all_same_bits

LAYERS = {"num_hidden_layers": 4}
EIGHT_HEADS = {**LAYERS, "num_attention_heads": 8, "head_dim": 16}
HYBRID = {
    **LAYERS,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
MODELS = {
    "qwen3": ("Qwen3ForCausalLM", {**LAYERS, "tie_word_embeddings": True}),
    "mimo": ("MiMoForCausalLM", EIGHT_HEADS),
    "qwen3_moe": ("Qwen3MoeForCausalLM", EIGHT_HEADS),
    "deepseek": ("DeepseekV3ForCausalLM", LAYERS),
    "glm": ("Glm4MoeLiteForCausalLM", LAYERS),
    "qwen3_5": ("Qwen3_5ForCausalLM", HYBRID),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", HYBRID),
    "qwen3_next": ("Qwen3NextForCausalLM", HYBRID),
}
WITHOUT_EXPERTS = ("Qwen3ForCausalLM", "MiMoForCausalLM", "Qwen3_5ForCausalLM")
CASES = ("forward", "score", "recompute")
ALONE: dict[tuple, dict[str, Any]] = {}


def alone(
    trainers: Callable[[int], Ranks], path: Path, dtype: str, sequences: list[list[int]]
) -> dict[str, Any]:
    """One process without parallelism: what every layout must give."""
    if (path, dtype) not in ALONE:
        ALONE[path, dtype] = trainers(1).call("bits", str(path), dtype, "tp1", sequences)
    return ALONE[path, dtype]


DENSE = [
    *[("qwen3", d, w) for d in ("float32", "bfloat16") for w in ("tp2", "tp2,sp", "pp2")],
    ("qwen3", "bfloat16", "pp2,vpp2"),
    ("qwen3", "bfloat16", "dp2"),
    ("mimo", "bfloat16", "tp2,sp"),
    ("mimo", "bfloat16", "tp4"),
    ("mimo", "bfloat16", "tp8"),
    ("mimo", "bfloat16", "tp2,sp,pp2"),
]
EXPERTS = [
    ("qwen3_moe", "bfloat16", "tp2"),
    ("qwen3_moe", "bfloat16", "tp2,sp,ep2"),
    ("qwen3_moe", "bfloat16", "tp2,sp,dp2,ep4"),
    ("qwen3_moe", "bfloat16", "dp2,ep2"),
    ("qwen3_moe", "bfloat16", "pp2"),
    ("deepseek", "bfloat16", "tp2,ep2"),
    ("deepseek", "bfloat16", "tp4"),
    ("glm", "bfloat16", "tp2,sp"),
    ("glm", "bfloat16", "tp2,sp,pp2,ep2"),
]
HYBRIDS = [
    ("qwen3_5", "bfloat16", "tp2,sp"),
    ("qwen3_5", "bfloat16", "pp2"),
    ("qwen3_5_moe", "bfloat16", "tp4"),
    ("qwen3_5_moe", "bfloat16", "dp2,ep2"),
    ("qwen3_next", "bfloat16", "tp2,ep2"),
]
FAST = [*DENSE, *EXPERTS, *HYBRIDS]
LAYOUTS = ("tp2", "tp2,sp", "tp4", "tp4,sp", "pp2", "pp2,vpp2", "tp2,pp2", "tp2,sp,pp2,vpp2", "dp2")
OF_EXPERTS = ("dp2,ep2", "tp2,ep2", "tp2,sp,ep2", "dp4,ep4", "tp2,dp2,ep4", "tp4,sp,ep4")
EIGHT = [
    *[("mimo", layout) for layout in ("tp8,sp", "tp4,pp2", "tp2,sp,pp2,dp2")],
    *[("qwen3_moe", layout) for layout in ("tp8", "tp8,sp,ep8", "tp2,pp2,dp2,ep4")],
]
EVERY = [
    *[
        (model, "bfloat16", layout)
        for model, (architecture, _) in MODELS.items()
        for layout in (*LAYOUTS, *(OF_EXPERTS if architecture not in WITHOUT_EXPERTS else ()))
    ],
    *[(model, "bfloat16", layout) for model, layout in EIGHT],
    *[("mimo", "float32", layout) for layout in ("tp4,sp", "tp8")],
    *[(model, "float32", "tp2,sp,ep2") for model in ("qwen3_moe", "glm", "qwen3_next")],
]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in FAST]


@pytest.mark.parametrize(("model", "dtype", "layout"), [*FAST, *SLOW])
def test_every_rank_has_the_bits_of_one_process(trainers, tiny, sequences, model, dtype, layout):
    architecture, fields = MODELS[model]
    path = tiny(architecture, dtype, **fields)
    expected = alone(trainers, path, dtype, sequences)
    ranks = trainers(Degrees.parse(layout).ranks)
    ranks.submit("bits", str(path), dtype, layout, sequences)
    for got in ranks.results():
        for case in CASES:
            assert_all_same_bits(got[case], expected[case])


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("qwen3", "tp2,pp2"),  # tied: the last stage's copy stays
        ("glm", "tp2,sp,pp2,ep2"),
        ("qwen3_moe", "dp2,ep2"),
        ("qwen3_moe", "tp2,dp2"),
    ],
)
def test_ranks_send_each_bit_of_the_model_once(trainers, tiny, model, layout):
    architecture, fields = MODELS[model]
    path = tiny(architecture, "bfloat16", **fields)
    ranks = trainers(Degrees.parse(layout).ranks)
    ranks.submit("pieces", str(path), "bfloat16", layout)
    assert ranks.results() == [True, *[None] * (len(ranks.remotes) - 1)]


STEPS = [
    *[("qwen3", layout, {}) for layout in ("tp2", "tp2,sp", "pp2", "pp2,vpp2")],
    *[("qwen3_moe", layout, {}) for layout in ("tp2", "tp2,sp,ep2", "dp2,ep2")],
    # in the norm, each of these once: key heads that ranks share, latents and experts that all have
    ("mimo", "tp4,dp2", {}),
    ("mimo", "tp8", {}),
    ("glm", "tp2,sp", {}),
    ("mimo", "tp4", {"distributed_optimizer": False}),
    ("qwen3_moe", "tp2", {"distributed_optimizer": False}),
    ("qwen3_moe", "tp2,dp2,ep2", {"distributed_optimizer": False}),
    ("qwen3", "tp2,pp2", {"distributed_optimizer": False}),
    ("qwen3_5", "tp2,sp", {}),
    ("qwen3_moe", "tp2,sp,dp2,ep4", {}),
    *[
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("qwen3", "dp2", {"overlap": True}),
            ("qwen3", "tp2,sp,pp2,vpp2", {}),
            ("qwen3", "tp2,sp,pp2,dp2", {}),
            ("mimo", "tp4,sp", {}),
            ("qwen3_moe", "dp4,ep4", {}),
            ("qwen3_moe", "tp2,dp2,ep4", {}),
            ("qwen3_moe", "tp4,sp,ep4", {}),
            ("qwen3_moe", "pp2,dp2,ep2", {}),
            ("deepseek", "tp2,pp2,ep2", {}),
            ("deepseek", "tp4,sp,ep4", {}),
            ("glm", "dp2,ep2", {}),
            ("qwen3_5", "pp2,vpp2", {}),
            ("qwen3_5_moe", "tp4,sp", {}),
            ("qwen3_5_moe", "tp2,sp,ep2", {}),
            ("qwen3_next", "dp2,ep2", {}),
            ("qwen3_next", "tp2,pp2", {}),
        )
    ],
]


@pytest.mark.parametrize(("model", "layout", "how"), STEPS)
def test_steps_in_a_layout_are_those_of_one_process(
    trainers, tiny, tmp_path, sequences, model, layout, how
):
    """Two optimizer steps in fp32 agree to rounding; all ranks end with the same bits."""
    architecture, fields = MODELS[model]
    path = tiny(architecture, "float32", **fields)
    long_enough = [s for s in sequences if len(s) > 1]
    out = str(tmp_path / "many")
    expected = trained_alone(trainers, path, long_enough, str(tmp_path))
    ranks = trainers(Degrees.parse(layout).ranks)
    ranks.submit("train", str(path), "float32", layout, long_enough, out, **how)
    first, *others = ranks.results()
    assert first["losses"] == pytest.approx(expected["losses"], rel=2e-6)
    assert first["norms"][0] == pytest.approx(expected["norms"][0], rel=2e-6)
    # Adam moves a weight as far for a tiny gradient, with its rounding, as for a large one
    assert first["norms"][1:] == pytest.approx(expected["norms"][1:], rel=2e-5)
    for other in others:
        assert_all_same_bits(other["score"], first["score"])
    # the exported weights are those that the ranks trained
    written = trainers(1).call("bits", out, "float32", "tp1", long_enough)
    assert_all_same_bits(written["score"], first["score"])


TRAINED: dict[Path, dict[str, Any]] = {}


def trained_alone(
    trainers: Callable[[int], Ranks], path: Path, sequences: list[list[int]], out: str
) -> dict[str, Any]:
    if path not in TRAINED:
        TRAINED[path] = trainers(1).call("train", str(path), "float32", "tp1", sequences, out)
    return TRAINED[path]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp2,xp3", "'xp3' is none of"),
        ("tp2,tp4", "states tp twice"),
        ("sp", "give tpN"),
        ("vpp2", "give ppN"),
        ("tp2,ep3", "use one of 1, 2"),
    ],
)
def test_layouts_that_are_none(text, message):
    with pytest.raises(UnsupportedError, match=message):
        Degrees.parse(text)
    assert Degrees.parse("sp,pp2,tp2,dp3").ranks == 12
    assert Degrees.parse(str(Degrees.parse("tp2,sp,pp2"))) == Degrees(tp=2, sp=True, pp=2)
