"""Choose tiles for matrix products by measuring: `PYTHONPATH=. python -m benchmarks.tune_gemm`.

Writes kernels/gemm_tuned.py. Candidates are all tiles that fit, less those that a simple model of
the device gives no chance; each must give the bits of a reference tile before it is timed. Another
model's shapes can be added: `--kind nt head --shape 9728x2560 --out kernels/gemm_tuned.py` keeps
what the table has for other shapes. Without `--out` a part of the whole is only printed.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.harness import copies, time_ms
from benchmarks.linear import BF16, SHAPES, SHAPES_35B, TREES
from isomodels.kernels.gemm_triton import Config, gemm
from isomodels.kernels.gemm_tuned import TUNED
from isomodels.kernels.gemm_tuning import bucket
from isomodels.kernels.row_linear import LEAVES
from isomodels.validate.bits import bits

TRANSPOSED = {"nn": (False, True), "tn": (True, True)}
# (N, K) beside those of the benchmark rows: gate-up of MiMo-7B
MORE = [(22016, 4096)]
HEADS = [(151936, 4096)]
ROWS = {
    "nt": (8, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 8192),
    "tree": (8, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 8192),
    "head": (8, 32, 64, 128, 256, 512),
    "nn": (8192,),
    "tn": (8192,),
}
PROCESSORS, SHARED = 132, 227 * 1024  # of an H200: multiprocessors, bytes a program may have


def tiles(m: int) -> list[tuple[int, int, int, int, int]]:
    """(rows, columns, columns beside, warps, swap) of tiles that suit m rows."""
    if m <= 32:
        rows = 16 if m <= 16 else 32
        # Swapped: with fewer than 64 rows the matrix units would run instructions of another kind.
        return [(rows, n, beside, 4, 1) for n, beside in ((64, 0), (128, 0), (128, 64))]
    widths = [(32, 0), (64, 0), (64, 32), (128, 0), (128, 64), (256, 0)]
    found = [(64, n, beside, 4, 0) for n, beside in widths]
    found += [(64, 128, 0, 4, 1), (64, 128, 64, 4, 1)] if m <= 64 else []
    if m > 64:
        found += [(128, n, beside, 8, 0) for n, beside in widths[1:]]
        found += [(128, n, beside, 4, 0) for n, beside in widths[:4]]
    if m > 128:
        found += [(256, 128, 0, 8, 0), (256, 64, 0, 8, 0), (256, 64, 32, 8, 0), (256, 64, 0, 4, 1)]
    if m > 1024:
        found = [t for t in found if t[0] >= 128 and t[1] >= 128]
    return found


def estimate(config: Config, m: int, n: int, k: int) -> float:
    """Microseconds by a simple model: waves of tiles, bound by arithmetic or by the cache."""
    width = config.block_n + config.beside
    waves = math.ceil(
        math.ceil(m / config.block_m) * math.ceil(n / width) * config.parts / PROCESSORS
    )
    products = max(config.block_m, 64) * width * k / config.parts / 3.6e6
    loads = (config.block_m + width) * 2 * k / config.parts / 100e3
    folding = 2.5 + m * n * 4 * config.parts / 4e6 if config.parts > 1 else 0
    return max(waves * (max(products, loads) + 0.5), n * k * 2 / 4e6) + folding


def variants(
    tile: tuple[int, ...], parts: int, leaves: int, result_bytes: int, waves: int
) -> list[Config]:
    """The ways to run one tile: depth of a block of K, programs a multiprocessor, with a loop."""
    rows, columns, beside, warps, swap = tile
    width = columns + beside
    result = rows * width * result_bytes
    found = []
    for block_k, occupancy, once in itertools.product((64, 128, 256), (1, 2), (0, 1)):
        if (once and leaves > parts) or (beside and not once) or (block_k == 256 and rows > 32):
            continue
        if occupancy == 2 and (waves == 1 or rows * width > 16384):
            continue
        if once:
            # A bfloat16 result, or the halves of an fp32 one, take the operands' place.
            subtiles = 2 if result_bytes == 4 and not swap else 1
            own = 0 if result_bytes == 2 else result if swap else rows * beside * 4
            ways = [(subtiles, own)]
        else:
            ways = [(1, result)]
            if result >= 2**16 and not swap:
                ways.append((2, result // 2))
        for subtiles, own in ways:
            room = SHARED // occupancy - 2048 - own
            stages = min(room // ((rows + width) * block_k * 2), 8 if block_k == 64 else 6)
            if stages < 3 or (once and result // subtiles > room):
                continue
            found.append(
                Config(rows, columns, block_k, stages, warps, swap, subtiles, occupancy,
                       beside, parts, once)
            )  # fmt: skip
    return found


def candidates(kind: str, m: int, n: int, k: int, most: int) -> list[Config]:
    """What is worth timing for a product, the most promising first."""
    leaves = LEAVES if kind == "tree" else 1
    found = []
    for tile, parts in itertools.product(tiles(m), (1, 2, 4) if leaves > 1 else (1,)):
        rows, columns, beside, warps, _ = tile
        if rows * (columns + beside) // (32 * warps) > 128 or (parts > 1 and m > 2048):
            continue
        if beside and parts < leaves:
            continue  # the sums that wait are those of one accumulator
        waves = math.ceil(m / rows) * math.ceil(n / (columns + beside)) * parts / PROCESSORS
        wide = 4 if kind == "head" or parts > 1 else 2
        found += variants(tile, parts, leaves, wide, math.ceil(waves))
    found.sort(key=lambda c: estimate(c, m, n, k))
    best = estimate(found[0], m, n, k)
    return [c for c in found if estimate(c, m, n, k) <= 1.6 * best][:most]


def product(kind: str, a: torch.Tensor, b: torch.Tensor, config: Config) -> torch.Tensor:
    a_t, b_t = TRANSPOSED.get(kind, (False, False))
    out_dtype = torch.float32 if kind == "head" else torch.bfloat16
    leaves = LEAVES if kind == "tree" else 1
    return gemm(a, b, config, out_dtype=out_dtype, leaves=leaves, a_t=a_t, b_t=b_t)


def operand(rows: int, k: int, transposed: bool, seed: int = 0) -> torch.Tensor:
    shape = (k, rows) if transposed else (rows, k)
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, **BF16) / math.sqrt(k)


def compile_one(job: tuple[str, Config]) -> str:
    """Compile, and compare bits with a reference tile; "" or what is wrong."""
    kind, config = job
    a_t, b_t = TRANSPOSED.get(kind, (False, False))
    a, b = operand(300, 1088, a_t), operand(712, 1088, b_t, seed=1)
    try:
        reference = product(kind, a, b, Config(64, 64, 64, 3, 4))
        for _ in range(3):
            if not torch.equal(bits(product(kind, a, b, config)), bits(reference)):
                return f"{kind} {tuple(config)}: other bits than the reference tile"
        torch.cuda.synchronize()
    except Exception as error:  # a tile that does not fit is left out
        return f"{kind} {tuple(config)}: {str(error)[:120]}".replace("\n", " ")
    return ""


def measure(
    kind: str, m: int, n: int, k: int, configs: list[Config]
) -> tuple[float, list[tuple[float, Config]]]:
    """cuBLAS microseconds and [(microseconds, configuration)], best first."""
    a_t, b_t = TRANSPOSED.get(kind, (False, False))
    sets = [
        (operand(m, k, a_t), operand(n, k, b_t, seed=1))
        for _ in range(copies(2 * (m * k + n * k + m * n), most=16))
    ]
    right = [(a.t() if a_t else a, b if b_t else b.t()) for a, b in sets]
    calls = [[lambda s=s, c=c: product(kind, *s, c) for s in sets] for c in configs]
    (base, _), *times = time_ms([lambda s=s: torch.mm(*s) for s in right], *calls, replays=7)
    found = [(1e3 * t, c) for (t, _), c in zip(times, configs, strict=True)]
    return 1e3 * base, sorted(found)


def problems(kinds: list[str], rows: list[int], shapes: list[str]) -> list[tuple]:
    """(kind, M, N, K) of what to tune: all of `shapes` for all of `kinds`, or the usual ones."""
    chosen = [tuple(map(int, s.split("x"))) for s in shapes]
    usual = {"tree": TREES, "head": HEADS, "nn": SHAPES, "tn": SHAPES}
    found: list[tuple] = []
    for m in rows or sorted({m for kind in kinds for m in ROWS[kind]}):
        for kind in kinds:
            if not rows and m not in ROWS[kind]:
                continue
            for n, k in chosen or usual.get(kind, SHAPES + SHAPES_35B + MORE):
                shape = {"nn": (m, k, n), "tn": (n, k, m)}.get(kind, (m, n, k))
                found.append((kind, *shape))
    return found


Times = list[tuple[tuple[str, int, int, int], float, list[tuple[float, Config]]]]


def few(times: Times, most: int) -> list[Config]:
    """At most so many configurations that serve all products together well.

    Each is one more kernel to compile at the first start of an engine. Greedy: the next is the one
    that lowers the sum of log(time / best time) most.
    """
    loss = [{c: math.log(t / found[0][0]) for t, c in found} for _, _, found in times]
    served = [1.0] * len(times)
    chosen: list[Config] = []
    while len(chosen) < most:
        gains: dict[Config, float] = {}
        for so_far, of in zip(served, loss, strict=True):
            for config, value in of.items():
                gains[config] = gains.get(config, 0.0) + max(so_far - value, 0.0)
        config = max(gains, key=lambda c: gains[c])
        if gains[config] < 3e-4 * len(times):
            break
        chosen.append(config)
        served = [min(s, of.get(config, s)) for s, of in zip(served, loss, strict=True)]
    return chosen


def table(times: Times, most: int) -> dict[tuple[str, int, int, int], tuple[int, ...]]:
    """What gemm_tuned.py holds: for each product the best of the few configurations of its kind."""
    tuned = {}
    for kind in dict.fromkeys(problem[0] for problem, _, _ in times):
        of_kind = [entry for entry in times if entry[0][0] == kind]
        chosen = few(of_kind, most)
        for (_, m, n, k), _, found in of_kind:
            tuned[(kind, bucket(m), n, k)] = short(
                next((c for _, c in found if c in chosen), found[0][1])
            )
    return tuned


def time_all(
    todo: list[tuple], most: int, workers: int, seconds: float, kept: Path | None
) -> Times:
    """Compile and check what is worth timing, time it, print a line for each product."""
    start = time.monotonic()
    configs = {p: candidates(*p, most) for p in todo}
    jobs = list(dict.fromkeys((p[0], c) for p in todo for c in configs[p]))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        failures = list(pool.map(compile_one, jobs))
    bad = {job for job, failure in zip(jobs, failures, strict=True) if failure}
    print(*filter(None, failures), sep="\n")
    print(f"{len(jobs)} kernels, {len(bad)} left out, {time.monotonic() - start:.0f} s", flush=True)
    times: Times = []
    for problem in todo:
        if time.monotonic() - start > seconds:
            print(f"out of time before {problem}")
            break
        kind, m, n, k = problem
        base, found = measure(*problem, [c for c in configs[problem] if (kind, c) not in bad])
        times.append((problem, base, found))
        listing = "  ".join(f"{base / t:.2f} {short(c)}" for t, c in found[:2])
        print(f"{kind} {m} {n}x{k} {base:.1f} us: {listing}".replace(", ", ","), flush=True)
        if kept:  # as it goes: a run that is cut off keeps what it has
            kept.write_text(json.dumps(times))
    return times


def merged(files: list[Path]) -> Times:
    """The times of several runs; of a product in two of them, those of the later."""
    entries = {}
    for file in files:
        for problem, base, found in json.loads(file.read_text()):
            entries[tuple(problem)] = (base, [(t, Config(*c)) for t, c in found])
    return [(problem, *entry) for problem, entry in entries.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--m", type=int, nargs="+", default=[], help="rows; default: all")
    parser.add_argument("--shape", nargs="+", default=[], help="NxK; default: all")
    parser.add_argument("--most", type=int, default=24, help="candidates for one product")
    parser.add_argument("--kernels", type=int, default=16, help="configurations a kind, at most")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no product after")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--json", type=Path, help="where to keep every time measured")
    parser.add_argument("--from-json", type=Path, nargs="+", help="measure nothing: earlier runs")
    parser.add_argument("--out", type=Path, help="default for the whole run: kernels/gemm_tuned.py")
    options = parser.parse_args()
    whole = not (options.m or options.shape) and options.kind == list(ROWS)
    out = options.out or (Path("kernels/gemm_tuned.py") if whole else None)
    if options.from_json:
        times = merged(options.from_json)
    else:
        todo = problems(options.kind, options.m, options.shape)
        times = time_all(todo, options.most, options.workers, options.seconds, options.json)
    if out:
        kept = {} if whole or options.from_json else TUNED
        found = kept | table(times, options.kernels)
        lines = [f"    {key}: {value},\n" for key, value in found.items()]
        name = "TUNED: dict[tuple[str, int, int, int], tuple[int, ...]]"
        text = '"""Made by `python -m benchmarks.tune_gemm`; not by hand."""\n\n'
        out.write_text(f"{text}{name} = {{\n{''.join(lines)}}}\n".replace("'", '"'))


def short(config: Config) -> tuple[int, ...]:
    """The fields of a configuration, less those at the end that have their default."""
    fields = tuple(config)
    while len(fields) > 5 and fields[-1] == Config._field_defaults[Config._fields[len(fields) - 1]]:
        fields = fields[:-1]
    return fields


if __name__ == "__main__":
    main()
