"""Row 72 of the field reports: a weight sync left out parameters, and nobody noticed."""

from pathlib import Path

import pytest
import torch

from isomodels.checkpoint import load_checkpoint, open_checkpoint
from isomodels.errors import CheckpointError
from isomodels.vllm.weights import convert
from isomodels.weights_conv.rules import Carried, Tied
from isomodels.weights_conv.tables import to_hf
from tests.checkpoints import make_mimo, make_qwen3, make_qwen3_moe

MAKERS = {
    "qwen3": make_qwen3,
    "qwen3-tied": lambda path, dtype: make_qwen3(path, dtype, tied=True),
    "mimo": make_mimo,
    "qwen3-moe": make_qwen3_moe,
    "qwen3-moe-fused": lambda path, dtype: make_qwen3_moe(path, dtype, fused=True),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_row_72_the_trainer_sends_what_the_engine_has(kind: str, tmp_path: Path) -> None:
    opened = open_checkpoint(MAKERS[kind](tmp_path, torch.bfloat16))
    trainer = load_checkpoint(tmp_path, carry_mtp=True)
    engine = opened.build(carry_mtp=False)

    sent = to_hf(opened.rules, trainer.state_dict())
    assert sent.keys() == opened.tensors.keys()
    cpu = torch.device("cpu")
    received = dict(convert(opened.spec, opened.config, sent.items(), torch.bfloat16, cpu))
    assert received.keys() == dict(engine.named_parameters()).keys()

    optional = {rule.name for rule in opened.rules if isinstance(rule, Tied)}
    for lost in sent.keys() - optional:
        rest = [(name, tensor) for name, tensor in sent.items() if name != lost]
        with pytest.raises(CheckpointError, match="missing"):
            convert(opened.spec, opened.config, rest, torch.bfloat16, cpu)
    carried = {rule.name for rule in opened.rules if isinstance(rule, Carried)}
    assert not carried & received.keys()
