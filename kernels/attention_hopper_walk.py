"""One warpgroup's walk over the keys of 64 query rows, for Hopper, in Gluon: the schedule and the
bits of `attention_triton`. See `attention_hopper_triton`.

Keys and values come in pairs, keys of one block and values of the block before it, which are needed
at the same time: pair b of a tile holds keys b and values b - 1. `full` and `empty` are the memory
barriers of the places of pairs, `start` counts the pairs before the tile's first.
"""

# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

M = gl.constexpr(64)  # rows of a warpgroup
N = gl.constexpr(64)  # keys of a block
D = gl.constexpr(128)  # a head
STAGES = gl.constexpr(5)  # places of pairs

# Scores [M, N], values [M, D], row sums [M, 8]; probabilities as the left operand of either.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, VALUES.value, 2))
_LEFT_OF_SUMS = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))
# Rows of the scores; rows of the output, in stores of 16 bytes.
ROWS = gl.constexpr(gl.SliceLayout(1, SCORES.value))
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def arrived(full, pair):
    """Wait for a pair."""
    mbarrier.wait(full.index(pair % STAGES), (pair // STAGES) & 1)


@gluon.jit
def _scores(q_s, k_s, pair):
    zero = gl.zeros([M, N], gl.float32, SCORES)
    keys = k_s.index(pair % STAGES).permute((1, 0))
    return warpgroup_mma(q_s, keys, zero, use_acc=False, is_async=True)


@gluon.jit
def _mask(s, block, position):
    keys = block * N + gl.arange(0, N, gl.SliceLayout(0, SCORES))
    positions = position + gl.arange(0, M, ROWS)
    return gl.where(keys[None, :] <= positions[:, None], s, float("-inf"))


@gluon.jit
def _softmax(s, m, scale_log2, floor):
    """New maximum, factor of what is summed so far, probabilities [M, N] as a left operand.

    `floor` takes the place of a maximum of minus infinity.
    """
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    base = gl.where(m_new == float("-inf"), floor, m_new)
    p = gl.exp2(gl.fma(s, scale_log2, -base[:, None]))
    alpha = gl.exp2(m - base)
    return m_new, alpha, gl.convert_layout(p.to(gl.bfloat16), _LEFT)


@gluon.jit
def _rescaled(norm, acc, alpha):
    norm *= gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
    acc *= gl.convert_layout(alpha, gl.SliceLayout(1, VALUES))[:, None]
    return norm, acc


@gluon.jit
def _walk(
    q_s, k_s, v_s, ones_s, full, empty, start, m, alpha, p, norm_token, acc_token, p_used,
    position, scale_log2, first, last, MASKED: gl.constexpr,
):  # fmt: skip
    """Blocks [first, last): each one's scores, and the product with V of the block before it.

    Carries the products in flight with the probabilities that they read, `p_used`.
    """
    for block in range(first, last):
        pair = start + block
        norm, acc, p_used = warpgroup_mma_wait(0, deps=[norm_token, acc_token, p_used])
        mbarrier.arrive(empty.index((pair - 1) % STAGES), count=1)
        arrived(full, pair)
        s_token = _scores(q_s, k_s, pair)
        norm, acc = _rescaled(norm, acc, alpha)
        p_used = p
        p_of_sums = gl.convert_layout(p, _LEFT_OF_SUMS)
        norm_token = warpgroup_mma(p_of_sums, ones_s, norm, is_async=True)
        acc_token = warpgroup_mma(p_used, v_s.index(pair % STAGES), acc, is_async=True)
        s = warpgroup_mma_wait(2, deps=[s_token])
        if MASKED:
            s = _mask(s, block, position)
        m, alpha, p = _softmax(s, m, scale_log2, 0.0 if MASKED else float("-inf"))
    return m, alpha, p, norm_token, acc_token, p_used


@gluon.jit
def _clean(v_s, pair, block, length):
    """Values past the sequence's end are a neighbour's, or of an unused slot: 0 * NaN is NaN.

    Both warpgroups may do so: they write the same bits.
    """
    if (block + 1) * N > length:
        view = v_s.index(pair % STAGES)
        keys = block * N + gl.arange(0, N, gl.SliceLayout(1, WIDE))
        value = view.load(WIDE)
        value = gl.where(keys[:, None] < length, value, gl.zeros_like(value))
        gl.thread_barrier()
        view.store(value)
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def segment_of(
    q_s, k_s, v_s, ones_s, full, empty, start, position, length, num_full, scale_log2, first, last
):
    """Blocks [first, last) of one segment: maximum and sum [M], values [M, D]."""
    turn = gl.maximum(first + 1, gl.minimum(last, num_full))
    arrived(full, start + first)
    s_token = _scores(q_s, k_s, start + first)
    s = warpgroup_mma_wait(0, deps=[s_token])
    s = _mask(s, first, position)
    m = gl.full([M], float("-inf"), gl.float32, ROWS)
    floor = gl.where(first < num_full, float("-inf"), 0.0)
    m, alpha, p = _softmax(s, m, scale_log2, floor)
    p_used = gl.zeros([M, N], gl.bfloat16, _LEFT)
    norm_token = warpgroup_mma_init(gl.zeros([M, 8], gl.float32, SUMS))
    acc_token = warpgroup_mma_init(gl.zeros([M, D], gl.float32, VALUES))
    m, alpha, p, norm_token, acc_token, p_used = _walk(
        q_s, k_s, v_s, ones_s, full, empty, start, m, alpha, p, norm_token, acc_token, p_used,
        position, scale_log2, first + 1, turn, False,
    )  # fmt: skip
    m, alpha, p, norm_token, acc_token, p_used = _walk(
        q_s, k_s, v_s, ones_s, full, empty, start, m, alpha, p, norm_token, acc_token, p_used,
        position, scale_log2, turn, last, True,
    )  # fmt: skip
    norm, acc, p_used = warpgroup_mma_wait(0, deps=[norm_token, acc_token, p_used])
    mbarrier.arrive(empty.index((start + last - 1) % STAGES), count=1)
    norm, acc = _rescaled(norm, acc, alpha)
    arrived(full, start + last)
    _clean(v_s, start + last, last - 1, length)
    norm = warpgroup_mma(gl.convert_layout(p, _LEFT_OF_SUMS), ones_s, norm)
    acc = warpgroup_mma(p, v_s.index((start + last) % STAGES), acc)
    return m, gl.convert_layout(gl.max(norm, 1), ROWS), acc
