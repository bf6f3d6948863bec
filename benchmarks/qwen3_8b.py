"""Qwen3-8B's shapes: its config at any depth, and a checkpoint of random weights on disk."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from isomodels.config import read_config
from isomodels.registry import load_object
from isomodels.weights_conv.rules import Tied

SHARD_BYTES = 2 * 2**30
LOGIT_SPREAD = 3.0  # standard deviation of the logits, about a trained model's


def config(layers: int = 36, **overrides: Any) -> dict[str, Any]:
    """Content of config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "attention_bias": False,
        "dtype": "bfloat16",
        **overrides,
    }


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """One tensor, fp32 on the generator's device; by its name in the checkpoint or the module."""
    normal = torch.randn(shape, generator=generator, device=generator.device)
    if len(shape) == 1:
        return 1.0 + 0.2 * normal
    head = "embed_tokens" in name or "lm_head" in name
    return normal * ((LOGIT_SPREAD if head else 1.0) / shape[1] ** 0.5)


def write_checkpoint(folder: Path, raw: Mapping[str, Any], device: str, seed: int = 0) -> Path:
    """Draw all weights on a device and write them as sharded safetensors."""
    generator = torch.Generator(device).manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2))
    shards = list(_shards(raw, generator))
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    total = sum(x.nbytes for shard in shards for x in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _shards(raw: Mapping[str, Any], generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """HF name -> tensor, in parts of about `SHARD_BYTES`."""
    spec, parsed = read_config(raw)
    shard: dict[str, Tensor] = {}
    for rule in load_object(spec.weights)(parsed):
        for source in () if isinstance(rule, Tied) else rule.sources:
            shard[source.name] = draw(source.name, source.shape, generator).to(parsed.torch_dtype)
        if sum(x.nbytes for x in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard
