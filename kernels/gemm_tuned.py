"""Made by `python -m benchmarks.tune_gemm`; not by hand."""

TUNED: dict[tuple[str, int, int, int], tuple[int, ...]] = {}
