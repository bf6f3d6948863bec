"""What parity asks of the engine: prompts that lead into every case, and text to draw them from."""

import inspect
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isomodels.errors import CheckpointError
from isomodels.vllm.engine import Request

BLOCK_SIZE = 16
MAX_TOKENS_A_STEP = 128
MAX_MODEL_LEN = 512
# Too few pages for the sequences of the last round: the scheduler has to preempt.
NUM_BLOCKS = 36

ENGINE_LIMITS: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": MAX_TOKENS_A_STEP,
    "max_num_seqs": 8,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": NUM_BLOCKS,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "skip_tokenizer_init": True,
}
# The trainer and the stock model need room on the same GPU.
DEVICE_LIMITS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "cuda": {"enforce_eager": False, "gpu_memory_utilization": 0.3},
}

_SHORT = (1, 2, 3, 7, 15, 16, 17, 31, 33, 47, 63, 64, 65, 100)
_LONG = (257, 300, 400)
_SHARED_PREFIX = 160


@dataclass(frozen=True)
class Round:
    """Requests that run together, and the cases they are made for."""

    aim: str
    requests: list[Request]


class PromptSource:
    """Token ids: windows of the standard library's documentation, or uniform draws where the
    checkpoint has no tokenizer for it."""

    def __init__(self, checkpoint: Path, vocab_size: int, seed: int):
        self.random = random.Random(seed)
        self.vocab_size = vocab_size
        self.text = _documentation_ids(checkpoint, vocab_size)

    def draw(self, length: int) -> list[int]:
        """`length` token ids."""
        if len(self.text) > length:
            start = self.random.randrange(len(self.text) - length)
            return self.text[start : start + length]
        return [self.random.randrange(self.vocab_size) for _ in range(length)]


def _documentation_ids(checkpoint: Path, vocab_size: int) -> list[int]:
    if not (checkpoint / "tokenizer.json").exists():
        return []
    import argparse
    import asyncio
    import collections
    import pathlib
    import string

    from tokenizers import Tokenizer

    modules = (argparse, asyncio, collections, inspect, pathlib, random, string)
    text = "\n\n".join(inspect.getdoc(value) or "" for m in modules for value in vars(m).values())
    try:
        tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    except Exception as error:  # the library raises nothing more special
        raise CheckpointError(f"{checkpoint / 'tokenizer.json'} cannot be read: {error}") from None
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if max(ids, default=0) >= vocab_size:
        raise CheckpointError(
            f"{checkpoint / 'tokenizer.json'} gives token {max(ids)}, the model has {vocab_size}"
        )
    # A tokenizer without words for this text would give one token again and again.
    return ids if len(set(ids)) > 100 else []


def rounds(source: PromptSource, device: str) -> list[Round]:
    """Runs of the engine; arrivals are spread so that steps mix prefill and decode."""
    scored = [
        Request(source.draw(n), max_tokens=24, prompt_logprobs=True, arrival=2 * i)
        for i, n in enumerate((*_SHORT, *_LONG))
    ]
    prefix = source.draw(_SHARED_PREFIX)
    shared = [
        Request(
            prefix + source.draw(5 + 7 * i),
            max_tokens=32,
            temperature=0.7 if i % 2 else 1.0,
            top_p=0.9 if i % 3 == 0 else 1.0,
            n=2 if i == 4 else 1,
            arrival=5 * i,
        )
        for i in range(9)
    ]
    crowded = [Request(source.draw(60 + i), max_tokens=100) for i in range(8)]
    found = [
        Round("prompts scored whole and in chunks", scored),
        Round("a shared prefix from the cache", shared),
        Round("more sequences than pages", crowded),
    ]
    if device == "cuda":
        # A step with a prefill in it replays no graph: its other rows are decoded eagerly.
        decoding = [Request(source.draw(9 + i), max_tokens=55) for i in range(6)]
        passing = [Request(source.draw(60), max_tokens=1, arrival=3 + i) for i in range(50)]
        found.append(Round("decode beside prefill, without graphs", decoding + passing))
    return found
