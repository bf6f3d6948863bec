"""Every tensor lands where it belongs: logits against transformers, from the same files.

A q and k exchanged, a bias dropped or halves swapped would move logits by their own size, so the
bound can be loose; accuracy is tested with the architectures.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from isomodels.batch import Batch
from isomodels.checkpoint import load_checkpoint
from tests.checkpoints import make_mimo, make_qwen3
from tests.weights.support import edit_config


def reference_logits(checkpoint: Path, architecture: str, ids: torch.Tensor) -> torch.Tensor:
    """transformers' logits [T, V] in fp64."""
    import transformers

    config = json.loads((checkpoint / "config.json").read_text())
    config = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    model = getattr(transformers, architecture)
    model = model(model.config_class(**config)).double()
    hf = load_file(checkpoint / "model.safetensors")
    used = {name: t.double() for name, t in hf.items() if "mtp_layers" not in name}
    missing, unexpected = model.load_state_dict(used, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert unexpected == []
    model.tie_weights()
    with torch.no_grad():
        return model(ids[None]).logits[0]


@pytest.mark.parametrize(
    ("make", "architecture"),
    [
        (lambda path: make_qwen3(path), "Qwen3ForCausalLM"),
        (lambda path: make_qwen3(path, tied=True), "Qwen3ForCausalLM"),
        # Rows 71 and 75: MiMo is Qwen2 (bias on q, k, v, no qk-norm); transformers lacks it.
        (lambda path: make_mimo(path), "Qwen2ForCausalLM"),
        # Row 70: a theta that is not transformers' default.
        (lambda path: edit_config(make_qwen3(path), rope_theta=300.0), "Qwen3ForCausalLM"),
    ],
    ids=["qwen3", "qwen3-tied", "mimo", "qwen3-theta"],
)
def test_logits_agree(tmp_path: Path, make, architecture: str) -> None:
    checkpoint = make(tmp_path / "checkpoint")
    module = load_checkpoint(checkpoint)
    ids = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(3))
    batch = Batch.packed(torch.tensor([0, len(ids)], dtype=torch.int32))
    with torch.no_grad():
        logits = module.logits(module(ids, torch.arange(len(ids)), batch)).double()
    expected = reference_logits(checkpoint, architecture, ids)
    error = (logits - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error < 1e-5, error.item()
    if architecture == "Qwen2ForCausalLM":
        hf = load_file(checkpoint / "model.safetensors")
        assert hf["model.layers.0.self_attn.k_proj.bias"].abs().min() > 0
