"""What the two sides give without isomodels: vLLM's own class against transformers' own model."""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isomodels.config import DTYPES, load_config_dict, read_config
from isomodels.parity.engine import device_limits
from isomodels.parity.workload import BLOCK_SIZE
from isomodels.registry import ArchSpec, load_object
from isomodels.vllm.engine import Engine, Request
from isomodels.weights_conv.files import read_tensors
from isomodels.weights_conv.rules import Carried, Stack, Tied, resolve

_MAX_MODEL_LEN = 512  # longer sequences are cut


@dataclass(frozen=True)
class StockDifference:
    """Logprobs of the same tokens: how many differ in a bit, and by how much (natural log)."""

    compared: int
    differ: int
    mean_abs: float
    max_abs: float


def what_stock_lacks(spec: ArchSpec, config: Any, device: str) -> str | None:
    """What stock vLLM's class of an architecture needs and does not find here, or None."""
    # Its text-only Qwen3.5 lies in one file with the multimodal one.
    if spec.model_type.startswith("qwen3_5") and importlib.util.find_spec("torchvision") is None:
        return "torchvision, which is not installed"
    if spec.family == "hybrid" and device == "cpu" and config.linear_key_head_dim <= 32:
        return "wider heads than a tiny model's for its delta rule on the CPU"
    return None


class Stock:
    """Runs both stock implementations on given tokens, in a process of its own."""

    def compare(
        self, checkpoint: str, dtype: str, device: str, sequences: Sequence[Sequence[int]]
    ) -> StockDifference:
        """Score every token of `sequences` with both."""
        sequences = [s[:_MAX_MODEL_LEN] for s in sequences]
        hf = _transformers_logprobs(Path(checkpoint), dtype, device, sequences)
        pages = 8 * _MAX_MODEL_LEN // BLOCK_SIZE
        limits = {**device_limits(checkpoint, device, pages), "enforce_eager": True}
        if device == "cpu":
            # Its own latent attention has kernels for the sizes of released models only.
            os.environ.setdefault("VLLM_MLA_DISABLE", "1")
        with Engine(
            checkpoint,
            dtype=dtype,
            model_impl="vllm",
            max_model_len=_MAX_MODEL_LEN,
            skip_tokenizer_init=True,
            **limits,
        ) as engine:
            longest = _MAX_MODEL_LEN - 1  # vLLM samples at least one token more
            requests = [Request(s[:longest], prompt_logprobs=True) for s in sequences]
            results = engine.run(requests)
        vllm = np.array([x for r in results for x in r.prompt_logprobs or ()], np.float32)
        kept = np.array([x for row in hf for x in row[: longest - 1]], np.float32)
        distance = np.abs(vllm.astype(np.float64) - kept)
        return StockDifference(
            compared=len(vllm),
            differ=int((vllm.view(np.int32) != kept.view(np.int32)).sum()),
            mean_abs=float(distance.mean()),
            max_abs=float(distance.max()),
        )


@torch.no_grad()
def _transformers_logprobs(
    checkpoint: Path, dtype: str, device: str, sequences: Sequence[Sequence[int]]
) -> list[list[float]]:
    """transformers' model, one sequence at a time, log-softmax in fp32."""
    model = load_transformers(checkpoint, DTYPES[dtype]).to(device)
    rows = []
    for sequence in sequences:
        ids = torch.tensor(sequence, device=device)
        logprobs = model(ids[None]).logits[0].float().log_softmax(-1)
        rows.append(logprobs[:-1].gather(1, ids[1:, None]).squeeze(1).tolist())
    return rows


def load_transformers(checkpoint: Path, dtype: torch.dtype) -> Any:
    """The transformers model that computes what this checkpoint's architecture computes.

    Tensors that are only carried (MTP) are left out: transformers does not run them either.
    """
    import transformers

    spec, config = read_config(checkpoint)
    model_class = getattr(transformers, spec.transformers)
    raw = load_config_dict(checkpoint)
    fields = {k: v for k, v in raw.items() if k not in ("architectures", "model_type")}
    model = model_class(model_class.config_class(**fields)).eval()
    for parameter in model.parameters():  # not the buffers: transformers loads them in fp32
        parameter.data = parameter.data.to(dtype)
    hf = read_tensors(checkpoint)
    state = {}
    for rule in resolve(load_object(spec.weights)(config), hf):
        if isinstance(rule, Stack):  # in memory transformers has them as the module has
            state[rule.name] = rule.join([hf[source.name] for source in rule.sources])
        elif not isinstance(rule, Carried | Tied):
            state |= {source.name: hf[source.name] for source in rule.sources}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model
