"""Choose tiles for matrix products by measuring: `PYTHONPATH=. python -m benchmarks.tune_gemm`.

Writes kernels/gemm_tuned.py. Nothing it chooses moves a bit of a result. With `--trees` it measures
the leaf counts 1, 2, 4 and 8 against cuBLAS instead.
"""

import argparse
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.harness import copies, time_ms
from benchmarks.linear import BF16, SHAPES, SHAPES_35B, TREES
from isomodels.kernels.gemm_triton import Config, gemm
from isomodels.kernels.gemm_tuning import DEFAULTS, bucket
from isomodels.kernels.row_linear import LEAVES

CANDIDATES: dict[str, dict[int, list[tuple[int, ...]]]] = {
    "nt": {
        8: [
            (16, 64, 128, 6, 4, 1),
            (16, 64, 128, 4, 4, 1, 1, 2),
            (16, 128, 128, 4, 4, 1),
            (16, 64, 256, 4, 4, 1),
            (16, 32, 256, 4, 4),
            (16, 32, 128, 6, 4, 0, 1, 2),
        ],
        64: [
            (64, 64, 128, 5, 4),
            (64, 32, 128, 5, 4),
            (64, 32, 128, 4, 4, 0, 1, 2),
            (64, 64, 64, 6, 4, 0, 1, 2),
            (64, 128, 64, 6, 4),
        ],
        256: [
            (128, 64, 128, 4, 4),
            (64, 128, 128, 4, 4),
            (128, 128, 64, 4, 8),
            (128, 128, 128, 3, 8),
            (64, 128, 64, 4, 4, 0, 1, 2),
            (256, 64, 64, 4, 8),
            (64, 256, 64, 4, 8),
            (64, 64, 64, 4, 4, 0, 1, 3),
            (128, 256, 64, 3, 8),
        ],
        1024: [
            (128, 256, 64, 3, 8),
            (128, 256, 64, 4, 8, 0, 2),
            (128, 128, 64, 5, 8),
            (256, 128, 64, 3, 8),
        ],
        8192: [
            (128, 256, 64, 3, 8),
            (128, 256, 64, 4, 8, 0, 2),
            (256, 128, 64, 3, 8),
            (256, 128, 64, 4, 8, 0, 2),
        ],
    },
    "tree": {
        8: [(16, 32, 256, 4, 4), (16, 64, 256, 4, 4, 1), (16, 64, 128, 5, 4, 1)],
        64: [(64, 32, 128, 5, 4), (64, 64, 128, 5, 4), (64, 32, 256, 3, 4)],
        256: [
            (128, 64, 128, 4, 4),
            (64, 128, 128, 4, 4),
            (64, 64, 64, 6, 4, 0, 1, 2),
            (128, 128, 128, 3, 8),
        ],
        1024: [(128, 256, 64, 4, 8, 0, 2), (128, 128, 64, 5, 8)],
        8192: [(128, 256, 64, 4, 8, 0, 2), (128, 256, 64, 3, 8), (128, 128, 64, 5, 8)],
    },
    "nn": {8192: [(128, 256, 64, 3, 8), (128, 256, 64, 4, 8, 0, 2), (256, 128, 64, 3, 8)]},
    "tn": {8192: [(128, 256, 64, 3, 8), (128, 256, 64, 4, 8, 0, 2), (256, 128, 64, 3, 8)]},
}
TRANSPOSED = {"nt": (False, False), "tree": (False, False), "nn": (False, True), "tn": (True, True)}


def product(kind: str, a: torch.Tensor, b: torch.Tensor, config: tuple[int, ...], leaves: int):
    a_t, b_t = TRANSPOSED[kind]
    return gemm(a, b, Config(*config), out_dtype=torch.bfloat16, leaves=leaves, a_t=a_t, b_t=b_t)


def operand(rows: int, k: int, transposed: bool) -> torch.Tensor:
    return torch.randn(*((k, rows) if transposed else (rows, k)), **BF16) / math.sqrt(k)


def compile_one(job: tuple[str, tuple[int, ...], int]) -> str:
    kind, config, leaves = job
    a_t, b_t = TRANSPOSED[kind]
    try:
        product(kind, operand(64, 1024, a_t), operand(256, 1024, b_t), config, leaves)
        torch.cuda.synchronize()
    except Exception as error:  # a tile that does not fit is left out
        return f"{job}: {str(error)[:200]}"
    return ""


def measure(kind: str, m: int, n: int, k: int, leaves: int, bad: set) -> list[tuple[float, tuple]]:
    """[(cuBLAS time over ours, configuration)], best first."""
    a_t, b_t = TRANSPOSED[kind]
    sets = [
        (operand(m, k, a_t), operand(n, k, b_t))
        for _ in range(copies(2 * (m * k + n * k + m * n), most=16))
    ]
    right = [(a.t() if a_t else a, b if b_t else b.t()) for a, b in sets]
    configs = [c for c in CANDIDATES[kind][m] if (kind, c, leaves) not in bad]
    calls = [[lambda s=s, c=c: product(kind, *s, c, leaves) for s in sets] for c in configs]
    (base, _), *times = time_ms([lambda s=s: torch.mm(*s) for s in right], *calls, replays=7)
    return sorted(((base / t, c) for (t, _), c in zip(times, configs, strict=True)), reverse=True)


def shapes_of(kind: str, m: int) -> list[tuple[int, int, int]]:
    if kind == "tree":
        return [(m, n, k) for n, k in TREES]
    if kind == "nt":
        return [(m, n, k) for n, k in SHAPES + SHAPES_35B]
    return [(m, k, n) if kind == "nn" else (n, k, m) for n, k in SHAPES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", action="store_true")
    parser.add_argument("--leaves", type=int, default=LEAVES, help="of the trees that are tuned")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8], help="for --trees")
    parser.add_argument("--out", type=Path, default=Path("kernels/gemm_tuned.py"))
    options = parser.parse_args()
    kinds = ["tree"] if options.trees else list(CANDIDATES)
    counts = {kind: [1] for kind in kinds} | {"tree": [options.leaves]}
    if options.trees:
        counts["tree"] = options.counts
    jobs = [
        (kind, config, leaves)
        for kind in kinds
        for config in dict.fromkeys(c for cs in CANDIDATES[kind].values() for c in cs)
        for leaves in counts[kind]
    ]
    workers = ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn"))
    with workers:
        failures = [x for x in workers.map(compile_one, jobs) if x]
    print(*failures, sep="\n")
    bad = {job for job in jobs if any(f.startswith(str(job)) for f in failures)}
    tuned = {}
    for kind in kinds:
        for m in list(CANDIDATES[kind]):
            for shape in shapes_of(kind, m):
                for leaves in counts[kind]:
                    found = measure(kind, m, *shape[1:], leaves, bad) if kind != "tn" else None
                    found = found or measure_tn(shape, bad)
                    listing = "  ".join(f"{r:.2f} {','.join(map(str, c))}" for r, c in found)
                    print(f"{kind} G={leaves} {shape}: {listing}", flush=True)
                    key = (kind, bucket(shape[0]), *shape[1:])
                    default = next(v for b, v in sorted(DEFAULTS[kind].items()) if shape[0] <= b)
                    if found[0][1] != default:
                        tuned[key] = found[0][1]
    if not options.trees:
        lines = [f"    {key}: {value},\n" for key, value in tuned.items()]
        name = "TUNED: dict[tuple[str, int, int, int], tuple[int, ...]]"
        text = '"""Made by `python -m benchmarks.tune_gemm`; not by hand."""\n\n'
        options.out.write_text(f"{text}{name} = {{\n{''.join(lines)}}}\n".replace("'", '"'))


def measure_tn(shape: tuple[int, int, int], bad: set) -> list[tuple[float, tuple]]:
    """The weight's gradient: rows are the weight's, K is the batch of 8,192."""
    CANDIDATES["tn"].setdefault(shape[0], CANDIDATES["tn"][8192])
    return measure("tn", *shape, 1, bad)


if __name__ == "__main__":
    main()
