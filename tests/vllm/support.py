"""The reference of these tests: the module, loaded without vLLM and run as one packed forward."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from isomodels.batch import Batch
from isomodels.config import read_config
from isomodels.registry import load_object
from isomodels.vllm import Result
from isomodels.vllm.versions import V2_RUNNER_VERSIONS, vllm_version
from isomodels.weights_conv.tables import to_module

# For tests of what only these versions have.
needs_v2_runner = pytest.mark.skipif(
    vllm_version() not in V2_RUNNER_VERSIONS, reason="the V2 runner of this vLLM is refused"
)


def load_core(path: Path, device: str = "cpu") -> nn.Module:
    spec, config = read_config(path)
    core = load_object(spec.model)(config, dtype=config.torch_dtype, device=device)
    rules = load_object(spec.weights)(config)
    core.load_state_dict(to_module(rules, load_file(path / "model.safetensors"), carried=False))
    return core.requires_grad_(False)


def packed_logprobs(
    core: nn.Module, sequences: Sequence[Sequence[int]], temperatures: Sequence[float]
) -> list[Tensor]:
    """One packed forward -> for each sequence [T, V] fp32."""
    device = next(core.parameters()).device
    lengths = torch.tensor([0, *map(len, sequences)], device=device)
    cu_seqlens = lengths.cumsum(0).to(torch.int32)
    ids = torch.tensor([i for sequence in sequences for i in sequence], device=device)
    hidden = core(ids, Batch.positions(cu_seqlens), Batch.packed(cu_seqlens))
    parts = hidden.split([len(sequence) for sequence in sequences])
    return [core.logprobs(h, t or 1.0).cpu() for h, t in zip(parts, temperatures, strict=True)]


def bits(values: Sequence[float] | Tensor) -> np.ndarray:
    """fp32 bit patterns; a Python float that is no fp32 value fails."""
    exact = np.asarray(values, dtype=np.float64)
    assert np.array_equal(exact.astype(np.float32).astype(np.float64), exact)
    return exact.astype(np.float32).view(np.int32)


def assert_equal_bits(
    core: nn.Module, results: Sequence[Result], temperature: Sequence[float] | float = 1.0
) -> int:
    """Compares all logprobs of `results` with the packed forward; returns how many there were."""
    if not isinstance(temperature, Sequence):
        temperature = [temperature] * len(results)
    sequences = [[*r.prompt, *(t.id for t in r.tokens)] for r in results]
    compared = 0
    expected_of = packed_logprobs(core, sequences, temperature)
    for result, sequence, expected in zip(results, sequences, expected_of, strict=True):
        chosen = expected[:-1].gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        first = len(result.prompt) - 1
        got = [*(result.prompt_logprobs or chosen[:first]), *(t.logprob for t in result.tokens)]
        differ = np.nonzero(bits(got) != bits(chosen))[0]
        assert not len(differ), f"request {result.request}: tokens {differ + 1} differ"
        compared += len(result.tokens) + len(result.prompt_logprobs or ())
    return compared


def draw(length: int, seed: int, vocab: int = 500) -> list[int]:
    """Random token ids."""
    source = random.Random(seed)
    return [source.randrange(vocab) for _ in range(length)]
