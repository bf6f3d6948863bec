"""The parity command over layouts of both sides; and the fault that a layout must not hide."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from isomodels.errors import UnsupportedError
from isomodels.megatron.degrees import Degrees
from isomodels.parity.run import check_engine_layout, run_parity
from isomodels.parity.workload import WORKLOADS

CASES = [
    ("Qwen3ForCausalLM", "tp2,sp", "tp2"),
    *[
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("MiMoForCausalLM", "tp2,sp,pp2", "tp1"),
            ("MiMoForCausalLM", "pp2,vpp2", "tp2"),
            ("Qwen3MoeForCausalLM", "tp2,sp,ep2", "tp2,ep2"),
            ("Qwen3MoeForCausalLM", "dp2,ep2", "tp2"),
            ("Glm4MoeLiteForCausalLM", "tp2,ep2", "tp1"),
            ("DeepseekV3ForCausalLM", "pp2", "tp2,ep2"),
            ("Qwen3ForCausalLM", "tp4", "tp4"),
            ("Glm4MoeLiteForCausalLM", "tp2,sp,dp2,ep4", "tp4,ep4"),
            ("Qwen3_5ForCausalLM", "tp2,sp,pp2", "tp1"),
            ("Qwen3_5MoeForCausalLM", "tp2,sp,ep2", "tp2,ep2"),
            ("Qwen3_5MoeForCausalLM", "dp2,ep2", "tp4"),  # workers share key heads: shorter pages
            ("Qwen3NextForCausalLM", "pp2,vpp2", "tp2"),
        )
    ],
]
HYBRID = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}


@pytest.mark.timeout(900)  # five processes start, on as few cores as there are
@pytest.mark.parametrize(("architecture", "trainer", "engine"), CASES)
def test_any_trainer_layout_against_any_engine_layout(tiny, architecture, trainer, engine):
    hybrid = architecture.startswith(("Qwen3_5", "Qwen3Next"))
    layers = 4 if hybrid or "pp" in trainer else 2
    report = run_parity(
        tiny(architecture, "bfloat16", num_hidden_layers=layers, **(HYBRID if hybrid else {})),
        stock=False,
        workload=WORKLOADS["short"],
        trainer_layout=Degrees.parse(trainer),
        engine_layout=Degrees.parse(engine),
    )
    assert report.faults() == []
    assert report.trainer_layout == str(Degrees.parse(trainer))
    assert sum(report.total(case).compared for case in report.cases) > 20_000


@pytest.mark.parametrize("layout", ["tp2,sp", "pp2", "dp2", "tp4,ep2"])
def test_layouts_that_an_engine_does_not_have(layout):
    with pytest.raises(UnsupportedError, match="an engine takes tpN, or tpN,epN"):
        check_engine_layout(Degrees.parse(layout))


@pytest.mark.parametrize(
    ("side", "layout", "words"),
    [
        ("trainer_layout", "tp3", "tensor parallelism of 3 .* use "),
        ("engine_layout", "tp3", "tensor parallelism of 3 .* use "),
        ("trainer_layout", "tp2,ep2", "the model has no experts, use 1"),
        ("engine_layout", "tp2,ep2", "the model has no experts, use 1"),
        ("trainer_layout", "pp4", "the 2 layers: use as many in all as one of 1, 2"),
        ("trainer_layout", "pp2,vpp2", "the 2 layers: use as many in all as one of 1, 2"),
    ],
)
def test_degrees_that_do_not_divide_are_refused_before_anything_starts(tiny, side, layout, words):
    checkpoint = tiny("Qwen3ForCausalLM", "bfloat16")
    with pytest.raises(UnsupportedError, match=words):
        run_parity(checkpoint, say=_must_not_start, **{side: Degrees.parse(layout)})


def _must_not_start(message: str) -> None:
    raise AssertionError(message)
