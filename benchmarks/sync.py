"""The sync row: a trainer's weights into a running engine of another process, on one GPU.

Whole calls of `WeightSender.send`, digests and the engine's own calls included, against a copy of
the same bytes at the bandwidth that a large copy has in the same run. The engine has CUDA graphs
captured over its first weights; after the last sync its logprobs are compared, by bits, with the
trainer's module. The trainer's parameters lie in one buffer, as Megatron's do, or each apart.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Timing, bandwidth, row, summary
from benchmarks.qwen3_8b import config, draw

TEST = "tests/sync/test_gpu.py"
BASELINE = "measured memory bandwidth"
SYNCS = 7
LAYERS = 36
PROMPTS, TOKENS = 4, 16


class TimedClient:
    """`LLMSyncClient` that notes how long each call takes.

    Attributes:
        seconds: of the last call of each name.
    """

    def __init__(self, client: Any):
        self.client = client
        self.seconds: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds[name] = time.perf_counter() - begin

        return timed


def in_one_buffer(core: nn.Module) -> None:
    """Give all parameters room in one allocation, each at a multiple of 256 bytes; none a value."""
    parameters = list(core.parameters())
    step = 256 // parameters[0].element_size()
    sizes = [-(-p.numel() // step) * step for p in parameters]
    flat = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, part in zip(parameters, flat.split(sizes), strict=True):
        parameter.data = part[: parameter.numel()].view(parameter.shape)


def fill(tensors: Mapping[str, Tensor], seed: int) -> None:
    """Draw all weights."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for name, tensor in tensors.items():
        tensor.copy_(draw(name, tuple(tensor.shape), generator))


def differing(llm: Any, core: Any, seed: int) -> tuple[int, int, list[float]]:
    """Logprobs of the engine's decodes: how many, how many not of the module's bits, and all."""
    from vllm import SamplingParams

    from isomodels.batch import Batch

    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1000, (PROMPTS, 40), generator=generator).tolist()
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    compared, differ, told = 0, 0, []
    for prompt, output in zip(prompts, llm.generate(inputs, params, use_tqdm=False), strict=True):
        (sample,) = output.outputs
        ids = list(sample.token_ids)
        entries = zip(sample.logprobs, ids, strict=True)
        got = torch.tensor([entry[token].logprob for entry, token in entries])
        whole = torch.tensor([*prompt, *ids], device="cuda")
        bounds = torch.tensor([0, len(whole)], dtype=torch.int32, device="cuda")
        with torch.no_grad():
            hidden = core(whole, Batch.positions(bounds), Batch.packed(bounds))
            expected = core.token_logprobs(hidden[:-1], whole[1:])[-len(ids) :].cpu()
        compared += len(ids)
        differ += int((got.view(torch.int32) != expected.view(torch.int32)).sum())
        told += got.tolist()
    return compared, differ, told


def start_engine(folder: Path) -> Any:
    from vllm import LLM

    from isomodels.vllm.weights import LOADED_LATER

    return LLM(
        str(folder),
        model_impl="isomodels",
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.02,  # only asked to be free: a trainer has the rest
        kv_cache_memory_bytes=4 << 30,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        weight_transfer_config={"backend": "isomodels"},
        additional_config={LOADED_LATER: True},
    )


def measure(llm: Any, sender: Any, client: TimedClient, tensors: Mapping[str, Tensor]) -> Any:
    """Milliseconds of whole syncs and of the engine's stop, after one that is not counted."""
    whole, stopped, calls = [], [], []
    for number in range(SYNCS + 1):
        sent = sender.send(tensors, f"step {number}")
        whole.append(1e3 * sent.seconds)
        stopped.append(1e3 * client.seconds["update_weights"])
        calls.append({name: 1e3 * s for name, s in client.seconds.items()})
    print(f"the first sync took {whole[0]:.1f} ms; calls of the last: "
          + ", ".join(f"{k} {v:.2f}" for k, v in calls[-1].items()))  # fmt: skip
    return summary(whole[1:]), summary(stopped[1:]), sent


@row("sync", TEST)
def sync(layers: int = LAYERS) -> Iterator[Timing]:
    from isomodels.config import read_config
    from isomodels.contract import contract_of
    from isomodels.layers.parallel import named_tensors
    from isomodels.registry import load_object
    from isomodels.sync import CudaIpc, WeightSender
    from isomodels.vllm import LLMSyncClient

    raw = config(layers)
    with tempfile.TemporaryDirectory() as name:
        Path(name, "config.json").write_text(json.dumps(raw))
        llm = start_engine(Path(name))
        spec, parsed = read_config(raw)
        core = load_object(spec.model)(parsed, dtype=torch.bfloat16, device=torch.device("cuda"))
        core.requires_grad_(False)
        client = TimedClient(LLMSyncClient(llm))
        sender = WeightSender(client, contract_of(raw, "cuda", dtype=torch.bfloat16), CudaIpc())
        before: list[float] = []
        for seed, layout in enumerate(("each parameter apart", "one buffer")):
            if layout == "one buffer":
                in_one_buffer(core)
                torch.cuda.empty_cache()
            tensors = named_tensors(core)
            fill(tensors, seed)
            (ms, spread), (stop, stop_spread), sent = measure(llm, sender, client, tensors)
            compared, differ, told = differing(llm, core, 3)
            if differ or told == before:
                raise RuntimeError(f"{differ} of {compared} logprobs have not the trainer's bits")
            before = told
            copy = 2 * sent.bytes / bandwidth()
            shape = f"Qwen3-8B shapes, {layers} layers, {sent.bytes / 1e9:.1f} GB, {layout}"
            note = (
                f"{sent.transport}, {sent.bytes / ms / 1e6:.0f} GB/s; "
                f"{compared} logprobs from CUDA graphs, 0 differ from the trainer's"
            )
            floor = 0.6 if layout == "one buffer" else 0.0
            yield Timing(
                "sync", f"{shape}: the whole call", BASELINE, ms, copy, floor, spread, note
            )
            yield Timing(
                "sync", f"{shape}: the engine stopped", BASELINE, stop, copy, floor, stop_spread
            )
        sender.close()
    yield from kernels()


def kernels(nbytes: int = 16 << 30) -> Iterator[Timing]:
    """What bounds a sync: the trainer's digests, and the engine's copy with its digests, alone."""
    from isomodels.sync.digest import copy_and_digest, digests

    source = [torch.randn(nbytes // 64 // 2, device="cuda").bfloat16() for _ in range(64)]
    target = [torch.empty_like(x) for x in source]
    moved = sum(x.nbytes for x in source)
    for name, call, units in (
        ("the trainer's digests alone", lambda: digests(source), 1),
        ("the engine's copy with its digests alone", lambda: copy_and_digest(source, target), 2),
    ):
        times = []
        for _ in range(SYNCS + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - begin))
        ms, spread = summary(times[1:])
        shape = f"{moved / 1e9:.1f} GB in {len(source)} tensors: {name}"
        note = f"a large copy moved {bandwidth() / 1e9:.2f} TB/s"
        yield Timing("sync", shape, BASELINE, ms, units * moved / bandwidth(), 0.6, spread, note)
