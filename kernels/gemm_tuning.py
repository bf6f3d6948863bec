"""Which tiles a matrix product uses, by its shape. Nothing here moves a bit of a result.

`DEFAULTS` serve any shape; `TUNED` holds what was measured for one, made by
`python -m benchmarks.tune_gemm`.
"""

import bisect

from isomodels.kernels.gemm_tuned import TUNED

# Products of up to so many rows share a choice.
BUCKETS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
LARGE = 1 << 30

Values = tuple[int, ...]  # the fields of gemm_triton.Config

DEFAULTS: dict[str, dict[int, Values]] = {
    # x W^T
    "nt": {
        16: (16, 64, 256, 5, 4, 1, 1, 1, 0, 1, 1),
        32: (32, 64, 256, 4, 4, 1),
        64: (64, 64, 128, 6, 4, 0, 1, 1, 0, 1, 1),
        256: (64, 128, 128, 4, 4),
        768: (128, 128, 64, 7, 8, 0, 1, 1, 0, 1, 1),
        2048: (128, 128, 64, 6, 4),
        LARGE: (128, 256, 64, 3, 8),
    },
    # the same as a tree over leaves of K
    "tree": {
        16: (16, 64, 256, 5, 4, 1),
        32: (32, 64, 256, 4, 4, 1),
        64: (64, 32, 128, 6, 4),
        128: (64, 128, 64, 4, 4, 0, 2, 2, 0, 4, 1),
        384: (128, 128, 64, 6, 4, 0, 2, 1, 0, 4),
        LARGE: (128, 128, 64, 6, 8),
    },
    # a subtree with an fp32 result
    "tree partial": {
        32: (16, 64, 128, 5, 4, 1),
        64: (64, 32, 128, 4, 4),
        256: (64, 64, 128, 4, 4),
        LARGE: (128, 128, 64, 4, 8),
    },
    # x W^T with an fp32 result
    "head": {
        16: (16, 64, 256, 5, 4, 1),
        32: (32, 128, 128, 5, 4, 1),
        64: (64, 128, 64, 8, 4),
        128: (64, 128, 128, 4, 4),
        192: (64, 256, 64, 4, 4, 0, 2),
        2048: (128, 128, 64, 5, 4),
        LARGE: (128, 256, 64, 3, 8, 0, 2),
    },
    # x W^T that leaves no result but statistics of blocks of 128 columns
    "vocab": {64: (64, 128, 64, 5, 4), LARGE: (128, 256, 64, 4, 8)},
    # the same, which keeps exponentials for a backward
    "vocab kept": {64: (64, 128, 64, 4, 4), LARGE: (128, 256, 64, 3, 8, 0, 2)},
    "vocab gradient": {64: (64, 128, 64, 5, 4), LARGE: (128, 256, 64, 3, 8, 0, 2)},
    # dY W: the second operand is stored with the summed axis first
    "nn": {64: (64, 64, 64, 5, 4), 256: (128, 64, 64, 5, 4), LARGE: (128, 256, 64, 4, 8, 0, 2)},
    # the same, added to an fp32 result
    "nn add": {LARGE: (128, 128, 64, 4, 8, 0, 2)},
    # dY^T X: both are
    "tn": {LARGE: (128, 256, 64, 4, 8, 0, 2)},
}


def bucket(m: int) -> int:
    """The bucket that `m` rows fall into."""
    at = bisect.bisect_left(BUCKETS, m)
    return BUCKETS[at] if at < len(BUCKETS) else LARGE


def values(kind: str, m: int, n: int, k: int) -> Values:
    """Tuning for a product of one kind ("nt", "tree", "nn", "tn") and shape."""
    tuned = TUNED.get((kind, bucket(m), n, k))
    if tuned is not None:
        return tuned
    defaults = DEFAULTS[kind]
    return next(defaults[limit] for limit in sorted(defaults) if m <= limit)
