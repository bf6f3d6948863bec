"""Runs a model in every layout that so many GPUs allow, each once, and compares what they dumped.

Equality is transitive: every dump is compared with that of one trainer process. The engines sample
the same tokens, since they draw from the same bits with the same seed; all trainers score these.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isomodels.config import load_config_dict, read_config
from isomodels.contract.operations import operators_of
from isomodels.layers.parallel import expert_degrees, tensor_degrees
from isomodels.megatron.degrees import Degrees
from isomodels.parity.cases import sequence
from isomodels.parity.checkpoints import random_checkpoint, tiny_config
from isomodels.parity.ranks import Ranks
from isomodels.parity.remote import Remote
from isomodels.parity.workload import (
    PromptSource,
    Round,
    Workload,
    page_of,
    rounds,
    with_states,
)
from isomodels.validate import require_validated
from isomodels.vllm.results import Result

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
SEED = 0

# Prompts within a chunk and beyond, and steps whose messages are gathered whole, or exchanged in
# slices.
_WORKLOAD = Workload(
    max_model_len=512,
    max_num_batched_tokens=256,
    max_num_seqs=8,
    num_blocks=256,
    scored=(1, 2, 15, 16, 17, 33, 64, 65, 100, 300, 400),
    prefixes=((160, 5),),
    crowded=0,
    emptying=7,
    emptying_tokens=32,
    microbatch=1024,
)
# a page is then as large as a recurrent state
_OF_STATES = replace(
    _WORKLOAD, max_model_len=2048, max_num_batched_tokens=2048, prefixes=((160, 5), (1200, 2))
)


@dataclass(frozen=True)
class Model:
    """Which model: real widths by the folder of its config, tiny ones by the architecture.

    Attributes:
        name: of the folder under tests/data/configs, or of the architecture.
        fields: of config.json, in place of its own.
    """

    name: str
    fields: dict[str, Any]

    def write(self, folder: Path, device: str) -> Path:
        """A checkpoint of random bfloat16 weights."""
        path = CONFIGS / self.name
        raw = load_config_dict(path) if path.is_dir() else tiny_config(self.name)
        return random_checkpoint(folder, {**raw, **self.fields}, "bfloat16", SEED, device)


# The first is that of one process.
_TRAINERS = (
    *("tp1", "tp2", "tp2,sp", "pp2", "dp2", "dp2,ep2", "tp2,sp,ep2"),
    *("tp4", "tp2,sp,pp2", "tp2,dp2", "tp2,dp2,ep2", "dp4,ep4", "tp2,sp,dp2,ep4"),
    *("tp8", "tp4,sp,pp2", "tp2,sp,pp2,dp2", "tp4,sp,dp2,ep8"),
)


def trainer_layouts(gpus: int, config: Any) -> list[str]:
    """Those that so many GPUs and the model's config allow."""
    tensor, experts = tensor_degrees(config), expert_degrees(config)
    degrees = {layout: Degrees.parse(layout) for layout in _TRAINERS}
    return [
        layout
        for layout, one in degrees.items()
        if one.ranks <= gpus and one.tp in tensor and one.ep in experts
    ]


def engine_layouts(gpus: int, config: Any) -> list[str]:
    """The same of an engine, which shares experts among all of its workers or cuts none."""
    found = [n for n in tensor_degrees(config) if n <= gpus]
    shared = [n for n in expert_degrees(config) if n > 1 and n in found]
    return [*(f"tp{n}" for n in found), *(f"tp{n},ep{n}" for n in shared)]


@dataclass
class Dump:
    """What one layout gave.

    Attributes:
        tokens: ids of all sequences, int64; of an engine those that it sampled.
        bits: of logprobs, int32, by case: of an engine "prompt", "eager" and "graph". Place i of a
            sequence is that of token i + 1.
        routes: of each sequence, as in `Result.routes`.
        replays: steps that replayed a CUDA graph.
        seconds: from the call to the result; waiting for others is in it.
        error: instead of the rest.
    """

    tokens: Any = None
    bits: dict[str, Any] = field(default_factory=dict)
    routes: Any = None
    replays: int = 0
    seconds: float = 0.0
    error: str = ""


@dataclass
class Line:
    """One layout against one trainer process."""

    side: str
    layout: str
    compared: int = 0
    differ: int = 0
    routes: int = 0
    routes_differ: int = 0
    replays: int = 0
    from_graphs: int = 0
    seconds: float = 0.0
    error: str = ""


def run(
    model: Model,
    folder: Path,
    device: str,
    gpus: int,
    *,
    limit_s: float = 240.0,
    say: Callable[[str], None] = lambda _: None,
    report: Callable[[list[Line]], None] = lambda _: None,
) -> list[Line]:
    """Every layout of a model.

    Args:
        model: which.
        folder: for its checkpoint.
        device: "cuda", or "cpu" to imitate it over gloo.
        gpus: how many there are.
        limit_s: after which what has not answered is ended, and compared as an error.
        say: told what is going on.
        report: told the result.
    """
    end = time.monotonic() + limit_s
    path = model.write(folder, device)
    spec, config = read_config(path)
    say("checkpoint written")
    if device == "cuda":  # once, before the hosts, each of which would do it
        _prove(spec, config)
        say("kernels proved")
    workload = _WORKLOAD
    if spec.family == "hybrid":
        large = page_of(config, device)[0] > _WORKLOAD.max_num_batched_tokens
        workload = with_states(_OF_STATES if large else _WORKLOAD, config, device)
        workload = replace(workload, crossing=0)
    source = PromptSource(path, config.vocab_size, SEED)
    # the rounds of a GPU; without the crowd, which preempts
    asked = [one for one in rounds(source, "cuda", workload) if one.requests]
    trained = trainer_layouts(gpus, config)
    with ExitStack() as stack:
        engines = {
            layout: stack.enter_context(
                Remote(
                    f"engine-{layout}",
                    "isomodels.parity.engine:ParityEngine",
                    checkpoint=str(path),
                    dtype=config.dtype,
                    seed=SEED,
                    device=device,
                    workload=workload,
                    layout=layout,
                )
            )
            for layout in engine_layouts(gpus, config)
        }
        trainers = _Trainers(stack, str(path), config.dtype, end, say)
        trainers.start(trained)
        dumps: dict[tuple[str, str], Dump] = {}
        threads = []
        for layout, engine in engines.items():
            dump = dumps["engine", layout] = Dump()
            arguments = (engine, asked, dump, end, say)
            threads.append(threading.Thread(target=_dump_engine, args=arguments))
            threads[-1].start()
        threads[0].join()
        sampled = dumps["engine", "tp1"]
        if sampled.error:  # the trainers are still compared
            for thread in threads:
                thread.join()
            sampled = next((one for one in dumps.values() if not one.error), Dump())
        prompts = [list(request.prompt) for one in asked for request in one.requests]
        sequences = [ids.tolist() for ids in sampled.tokens or ()] or prompts
        for layout in trained:
            dumps["trainer", layout] = trainers.dump(layout, sequences)
        for thread in threads:
            thread.join()
        lines = [compare(side, layout, dump, dumps) for (side, layout), dump in dumps.items()]
        report(lines)  # before the processes end, which takes its time
    return lines


def _prove(spec: Any, config: Any) -> None:
    device = torch.device("cuda")
    for kind, trains in (("packed", True), ("paged", False)):
        require_validated(
            device,
            dtype=config.torch_dtype,
            head_dim=config.common_head_dim,
            operators=operators_of(spec, config, config.torch_dtype, device, kind),
            trains=trains,
        )
    torch.cuda.empty_cache()


def _dump_engine(
    engine: Remote, asked: Sequence[Round], dump: Dump, end: float, say: Callable[[str], None]
) -> None:
    begin = time.monotonic()
    timer = threading.Timer(max(1.0, end - begin), engine.kill)
    timer.start()
    try:
        engine.result()
        say(f"{engine.name} started")
        made: list[tuple[Round, list[Result]]] = []
        for number, one in enumerate(asked):
            results, steps = engine.call("run", one.requests, SEED + number, one.graphs)
            made.append((one, results))
            dump.replays += sum(step.replayed for step in steps)
        _fill(dump, [result for _, results in made for result in results])
    except Exception as error:  # the other layouts are still compared
        dump.error = f"{type(error).__name__}: {error}"
        engine.kill()  # it may hang
    finally:
        timer.cancel()
    dump.seconds = time.monotonic() - begin
    engine.close()  # the trainers need its memory
    say(f"{engine.name} done {dump.error}")


def _fill(dump: Dump, results: Sequence[Result]) -> None:
    """Logprobs by place: of each case a list of (sequence, places in it, bits)."""
    dump.tokens = [np.array(sequence(result)) for result in results]
    dump.routes = [result.routes for result in results]
    for name in ("prompt", "eager", "graph"):
        dump.bits[name] = []
    for number, result in enumerate(results):
        prompt = np.array(result.prompt_logprobs or [], np.float32)
        dump.bits["prompt"].append((number, np.arange(len(prompt)), prompt.view(np.int32)))
        for name, replayed in (("eager", False), ("graph", True)):
            chosen = [i for i, t in enumerate(result.tokens) if t.replayed == replayed]
            values = np.array([result.tokens[i].logprob for i in chosen], np.float32)
            places = len(result.prompt) - 1 + np.array(chosen, np.int64)
            dump.bits[name].append((number, places, values.view(np.int32)))


class _Trainers:
    """Ranks by their number, started anew where a layout failed."""

    def __init__(
        self, stack: ExitStack, path: str, dtype: str, end: float, say: Callable[[str], None]
    ):
        self.stack, self.path, self.dtype, self.end, self.say = stack, path, dtype, end, say
        self.ranks: dict[int, Ranks] = {}

    def start(self, layouts: Sequence[str]) -> None:
        """Processes for these layouts, without waiting for them."""
        for count in sorted({Degrees.parse(layout).ranks for layout in layouts}):
            self._start(count)

    def _start(self, count: int) -> None:
        ranks = Ranks(f"trainer-of-{count}", "tests.multi_gpu.rank:LayoutRank", count)
        self.ranks[count] = self.stack.enter_context(ranks)
        self._fresh = {*getattr(self, "_fresh", ()), count}

    def dump(self, layout: str, sequences: list[list[int]]) -> Dump:
        """One layout, on every rank the same."""
        count = Degrees.parse(layout).ranks
        dump, begin = Dump(), time.monotonic()
        timer = threading.Timer(max(1.0, self.end - begin), self.ranks[count].kill)
        timer.start()
        try:
            if count in self._fresh:
                self.ranks[count].results()
                self._fresh.remove(count)
            self.ranks[count].submit("run", self.path, self.dtype, layout, sequences)
            first, *others = self.ranks[count].results()
            self._fill(dump, sequences, *first)
            for other in others:
                again = Dump()
                self._fill(again, sequences, *other)
                if _differ(again, dump):
                    raise AssertionError("the ranks of one layout do not agree")
        except Exception as error:  # the other layouts are still compared
            dump.error = f"{type(error).__name__}: {error}"
            if time.monotonic() < self.end:
                self._start(count)
        finally:
            timer.cancel()
        dump.seconds = time.monotonic() - begin
        self.say(f"trainer {layout} done {dump.error}")
        return dump

    @staticmethod
    def _fill(dump: Dump, sequences: list[list[int]], logprobs: Any, routes: Any) -> None:
        dump.tokens = [np.array(one) for one in sequences]
        dump.routes = [[(0, ids)] for ids in routes]
        for case, rows in logprobs.items():
            dump.bits[case] = [
                (number, np.arange(len(row)), np.asarray(row, np.float32).view(np.int32))
                for number, row in enumerate(rows)
            ]


def _differ(one: Dump, other: Dump) -> bool:
    return any(
        not np.array_equal(a[2], b[2])
        for case, rows in one.bits.items()
        for a, b in zip(rows, other.bits[case], strict=True)
    )


def compare(side: str, layout: str, dump: Dump, dumps: dict[tuple[str, str], Dump]) -> Line:
    """A dump against the forward pass of one trainer process, number by number.

    Of another layout, where that failed.
    """
    line = Line(side, layout, replays=dump.replays, seconds=dump.seconds, error=dump.error)
    trainers = [one for (of, _), one in dumps.items() if of == "trainer" and not one.error]
    if line.error or not trainers:
        line.error = line.error or "no trainer to compare with"
        return line
    reference = trainers[0]
    whole = {number: bits for number, _, bits in reference.bits["forward"]}
    if len(dump.tokens) != len(reference.tokens) or not all(
        map(np.array_equal, dump.tokens, reference.tokens)
    ):
        line.error = "the engine sampled other tokens"
        return line
    for case, rows in dump.bits.items():
        for number, places, bits in rows:
            line.compared += len(bits)
            line.differ += int((bits != whole[number][places]).sum())
            line.from_graphs += len(bits) if case == "graph" else 0
    expected = [ids for ((_, ids),) in reference.routes]
    for runs, ids in zip(dump.routes, expected or [None] * len(dump.routes), strict=False):
        for first, own in runs:
            line.routes += own.shape[0] * own.shape[1]
            line.routes_differ += int((own != ids[first : first + len(own)]).any(-1).sum())
    return line


def write_report(file: Path, model: Model, lines: Sequence[Line]) -> None:
    """As JSON."""
    found = {"model": model.name, "fields": model.fields, "lines": [asdict(x) for x in lines]}
    file.write_text(json.dumps(found, indent=1) + "\n")
