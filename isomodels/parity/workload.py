"""What parity asks of the engine: prompts that lead into every case, and text to draw them from."""

import inspect
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isomodels.errors import CheckpointError, UnsupportedError
from isomodels.layers.gated_delta import state_layout
from isomodels.layers.hybrid_config import HybridConfig
from isomodels.vllm.results import Request

BLOCK_SIZE = 16

_SHORT = (1, 2, 3, 7, 15, 16, 17, 31, 33, 47, 63, 64, 65, 100)
_LONG = (257, 300, 400)
# Around and beyond the 2,048 keys after which the GPU's attention merges segments.
_LONGER = (1000, 2047, 2048, 2049, 4095, 4096, 4097, 5003, 6200)

_STATE_CROWD = 8, 100  # requests and tokens, at least: most of their memory are states
_SPARE = 16  # pages, where a page holds many tokens

_EMPTYING_LEAST = 8  # tokens of the first to end: by then all have come


@dataclass(frozen=True)
class Workload:
    """Sizes of a run.

    Attributes:
        max_model_len: longest sequence.
        max_num_batched_tokens: rows of one step: longer prompts are cut into chunks.
        max_num_seqs: largest batch.
        num_blocks: pages of 16 tokens, too few for the sequences of the round that preempts.
        scored: lengths of the prompts whose logprobs are compared.
        prefixes: (length, requests that share it).
        crowded: requests that need more than all pages.
        crowd_tokens: what each of them samples.
        emptying: requests of the batch that decodes until one is left, with CUDA graphs and
            without.
        emptying_tokens: what the longest of them samples.
        microbatch: tokens of a microbatch of the trainer.
        crossing: requests of the crowd whose sequences end in their second page, where only
            these ask for more pages than they began with.
        page: tokens of a page.
        apart: steps between two requests that share a prefix.
    """

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    num_blocks: int
    scored: tuple[int, ...]
    prefixes: tuple[tuple[int, int], ...]
    crowded: int
    emptying: int
    emptying_tokens: int
    microbatch: int
    crossing: int = 0
    page: int = BLOCK_SIZE
    crowd_tokens: int = 100
    apart: int = 5

    def engine_limits(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        return {
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": self.num_blocks,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "skip_tokenizer_init": True,
        }


WORKLOADS = {
    # each of the cases that need 200 logprobs has few more
    "short": Workload(
        max_model_len=320,
        max_num_batched_tokens=128,
        max_num_seqs=8,
        num_blocks=30,
        scored=(*_SHORT, 257),
        prefixes=((144, 9),),
        apart=2,
        crowded=7,
        crowd_tokens=76,
        emptying=7,
        emptying_tokens=80,
        microbatch=4096,
    ),
    "quick": Workload(
        max_model_len=512,
        max_num_batched_tokens=128,
        max_num_seqs=8,
        num_blocks=36,
        scored=(*_SHORT, *_LONG),
        prefixes=((160, 9),),
        crowded=8,
        emptying=7,
        emptying_tokens=80,
        microbatch=4096,
    ),
    "full": Workload(
        max_model_len=8192,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        num_blocks=2048,
        scored=(*_SHORT, *_LONG, *range(20, 620, 10), *_LONGER),
        prefixes=((160, 24), (2100, 12), (4200, 6)),
        crowded=256,
        emptying=256,
        emptying_tokens=128,
        microbatch=8192,
    ),
}


def page_of(config: HybridConfig, device: str, ranks: int = 1) -> tuple[int, int]:
    """Tokens and bytes of a page of one attention layer: as large as one recurrent state.

    As vLLM makes them equal, from `BLOCK_SIZE` on, on each of the ranks of tensor parallelism. A
    page is shorter where they share key heads, since the states are always cut.
    """
    heads = max(1, config.num_key_value_heads // ranks)
    token = 2 * heads * config.head_dim * config.torch_dtype.itemsize
    layout = state_layout(config, config.torch_dtype, device, ranks)
    state = sum(16 * -(-math.prod(shape) * dtype.itemsize // 16) for shape, dtype in layout)
    tokens = BLOCK_SIZE * -(-state // (BLOCK_SIZE * token))
    return tokens, tokens * token


def with_states(workload: Workload, config: HybridConfig, device: str, ranks: int = 1) -> Workload:
    """The workload for a model with recurrent states.

    vLLM then ends each step of a prompt at the edge of a block, so that only prompts within one
    are computed at once, and a prefix is found only where a step ended.

    Args:
        workload: that of a model without.
        config: of the model.
        device: "cpu" or "cuda": each keeps states of its own form.
        ranks: of the engine's tensor parallelism.

    Raises:
        UnsupportedError: if no sequence of the workload would reach its second page.
    """
    counts = [len(config.layers_of(kind)) for kind in ("linear_attention", "full_attention")]
    groups = -(-counts[0] // counts[1])  # of recurrent layers, each with its own blocks
    page, _ = page_of(config, device, ranks)
    if page > workload.crowd_tokens:
        if (
            page + workload.crowd_tokens > workload.max_model_len
            or page > workload.max_num_batched_tokens
        ):
            raise UnsupportedError(
                f"a recurrent state of this model fills a page of {page} tokens, which no step of "
                "this workload does: use --workload full"
            )
        spare = min(_SPARE, workload.crowded // 3)
        return replace(
            workload,
            # every sequence has a page of keys and a state a group; vLLM keeps one
            num_blocks=(1 + groups) * workload.max_num_seqs + 1 + spare,
            crossing=3 * spare,
            page=page,
        )
    return replace(
        workload,
        # of each sequence, the running state and the one that is copied to the next block
        num_blocks=-(-workload.num_blocks * BLOCK_SIZE // page)
        + 2 * groups * workload.max_num_seqs,
        scored=(*workload.scored, *range(5, BLOCK_SIZE), *(BLOCK_SIZE,) * 5),
        prefixes=tuple((length, count + 4) for length, count in workload.prefixes),
        crowded=max(workload.crowded, _STATE_CROWD[0]),
        crowd_tokens=max(workload.crowd_tokens, _STATE_CROWD[1]),
        page=page,
    )


@dataclass(frozen=True)
class Round:
    """Requests that run together, and the cases they are made for."""

    aim: str
    requests: list[Request]
    graphs: bool = True


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


def rounds(source: PromptSource, device: str, workload: Workload) -> Iterator[Round]:
    """Runs of the engine; arrivals are spread so that steps mix prefill and decode."""
    yield Round(
        "prompts scored whole and in chunks",
        [
            Request(source.draw(n), max_tokens=24, prompt_logprobs=True, arrival=2 * i)
            for i, n in enumerate(workload.scored)
        ],
    )
    yield Round(
        "shared prefixes from the cache",
        [
            request
            for length, count in workload.prefixes
            for request in _sharing(source, length, count, workload.apart)
        ],
    )
    yield Round("more sequences than pages", _crowd(source, workload))
    if device == "cuda":
        yield Round("a batch that empties, with CUDA graphs", _emptying(source, workload))
        yield Round("a batch that empties, without", _emptying(source, workload), graphs=False)


def _crowd(source: PromptSource, workload: Workload) -> list[Request]:
    edge = workload.page - workload.crowd_tokens + 1  # their samples cross it
    lengths = [edge + i % 64 for i in range(workload.crossing)]
    lengths += [60 + i % 64 for i in range(workload.crossing, workload.crowded)]
    return [Request(source.draw(n), max_tokens=workload.crowd_tokens) for n in lengths]


def _sharing(source: PromptSource, length: int, count: int, apart: int) -> Iterator[Request]:
    prefix = source.draw(length)
    for i in range(count):
        yield Request(
            prefix + source.draw(5 + 7 * i),
            max_tokens=32,
            temperature=0.7 if i % 2 else 1.0,
            top_p=0.9 if i % 3 == 0 else 1.0,
            n=2 if i == 4 else 1,
            arrival=apart * i,
        )


def _emptying(source: PromptSource, workload: Workload) -> list[Request]:
    """Requests that end one after another, so that the batch takes many sizes down to one."""
    count, more = workload.emptying, workload.emptying_tokens - _EMPTYING_LEAST
    return [
        # Every fourth goes on for a step more: the sizes are even and odd.
        Request(
            source.draw(9 + i % 32), max_tokens=_EMPTYING_LEAST + i * more // count + (i % 4 == 3)
        )
        for i in range(count)
    ]
