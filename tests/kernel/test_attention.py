import itertools

import pytest
import torch
import torch.nn.functional as F

from isomodels.kernels.attention import attention, paged_attention, write_kv_cache
from tests.kernel.battery import (
    DTYPES,
    KINDS,
    THREADS,
    assert_gradients,
    assert_registered,
    assert_same_bits,
    bits,
    hard,
    odd_storage,
    relative_rms,
    threads,
    unit_error,
)
from tests.kernel.pages import Pages

# Around one row, one tile of 16 rows, the KV block of 64, pages of 128, and several blocks.
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300]
# (kv heads, group, head_dim)
HEADS = [(2, 1, 32), (1, 2, 64), (1, 4, 128), (2, 8, 32), (1, 3, 40), (1, 1, 256)]
ORDERS = [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (3, 2, 0, 1)]


def tensors(length, kv_heads, group, dim, dtype=torch.float32, kind="normal"):
    shapes = [(length, kv_heads * group, dim), (length, kv_heads, dim), (length, kv_heads, dim)]
    return [hard(*s, kind=kind, seed=i, dtype=dtype) for i, s in enumerate(shapes)]


def cu_seqlens(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def packed(q, k, v, lengths=None):
    return attention(q, k, v, cu_seqlens(lengths or [len(q)]), q.shape[-1] ** -0.5)[0]


def paged(q, pages, new, seq_lens):
    """One engine step: `new` tokens of each sequence, whose lengths are then `seq_lens`."""
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    bounds = (cu_seqlens(new), lengths, q.shape[-1] ** -0.5, max(new), max(seq_lens))
    return paged_attention(q, pages.cache, pages.block_table, *bounds)


def in_steps(q, k, v, steps, block_size=16, order=ORDERS[0]):
    """One sequence through pages in runs of tokens whose lengths are `steps`."""
    length, kv_heads, dim = k.shape
    pages = Pages([length], kv_heads, dim, block_size, k.dtype, order=order)
    out, start = [], 0
    for step in steps:
        end = start + step
        write_kv_cache(k[start:end], v[start:end], pages.cache, pages.slots(0, start, end))
        out.append(paged(q[start:end], pages, [step], [end]))
        start = end
    assert start == length
    return torch.cat(out)


def cut(length, step):
    return [step] * (length // step) + ([length % step] if length % step else [])


def exact(q, k, v, lengths):
    """Attention in the dtype of q by its definition, sequence by sequence."""
    out = []
    for rows in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        one, keys, values = (x.transpose(0, 1) for x in rows)
        group = len(one) // len(keys)
        keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
        scores = one @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        out.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("length", LENGTHS)
def test_packed_paged_chunked_and_row_by_row(length):
    q, k, v = tensors(length, 2, 2, 32)
    whole = packed(q, k, v)
    for block_size in (16, 32, 128):
        got = in_steps(q, k, v, [length], block_size)
        assert_same_bits(got, whole, f"one step, pages of {block_size}")
    for step in (1, 7, 16, 64, 100):
        if step < length:
            got = in_steps(q, k, v, cut(length, step))
            assert_same_bits(got, whole, f"steps of {step}")
    if length > 3:
        got = in_steps(q, k, v, [length - 3, 1, 1, 1])
        assert_same_bits(got, whole, "prefill, then three rows")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "dim"), HEADS)
def test_head_layouts(kv_heads, group, dim, dtype):
    q, k, v = tensors(131, kv_heads, group, dim, dtype)
    whole = packed(q, k, v)
    assert_same_bits(in_steps(q, k, v, [131], 32), whole, "one step")
    assert_same_bits(in_steps(q, k, v, [50, 14, 65, 1, 1]), whole, "chunks and rows")
    for head in range(kv_heads):  # a rank of tensor parallelism holds some of the heads
        heads = slice(head * group, (head + 1) * group)
        part = packed(q[:, heads], k[:, head : head + 1], v[:, head : head + 1])
        assert_same_bits(part, whole[:, heads].contiguous(), f"kv head {head} alone")


@pytest.mark.parametrize("kind", KINDS)
def test_hard_values(kind):
    q, k, v = tensors(130, 1, 2, 32, kind=kind)
    if kind == "huge":
        q = hard(*q.shape, kind="normal")  # scores stay finite
    whole = packed(q, k, v)
    assert torch.isfinite(whole).all()
    assert_same_bits(in_steps(q, k, v, cut(130, 1)), whole, "rows")
    assert_same_bits(in_steps(q, k, v, cut(130, 48)), whole, "chunks")


def test_scores_far_apart():
    # Whole blocks of weights underflow to 0, before and after the row's maximum.
    q, k, v = tensors(300, 1, 2, 32)
    q, v[5] = q * 1000, 1e30
    whole = packed(q, k, v)
    assert_same_bits(in_steps(q, k, v, cut(300, 1)), whole, "rows")


@pytest.mark.parametrize("order", ORDERS)
def test_cache_strides_and_page_order(order):
    q, k, v = tensors(150, 2, 2, 32)
    for block_size in (16, 64):
        got = in_steps(q, k, v, [70, 79, 1], block_size, order)
        assert_same_bits(got, packed(q, k, v), f"order {order}, pages of {block_size}")


def test_batch_composition():
    lengths = [1, 17, 64, 5, 129, 16, 300, 65]
    q, k, v = tensors(sum(lengths), 1, 2, 32)
    together = packed(q, k, v, lengths)
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    alone = [packed(*part) for part in parts]
    assert_same_bits(together, torch.cat(alone), "packed together against alone")
    turned = list(reversed(range(len(lengths))))
    again = packed(
        *(torch.cat([x.split(lengths)[i] for i in turned]) for x in (q, k, v)),
        [lengths[i] for i in turned],
    )
    assert_same_bits(again, torch.cat([alone[i] for i in turned]), "in reverse")
    with_empty = packed(q, k, v, [0, *lengths[:3], 0, *lengths[3:], 0])
    assert_same_bits(with_empty, together, "among sequences of no tokens")


def test_rows_of_decode_and_prefill_in_one_batch():
    # Rows 2 and 16 of the field reports: decode, chunk and prefill rows share the batch.
    lengths, new = [65, 17, 130, 40, 1], [1, 17, 30, 1, 1]
    q, k, v = tensors(sum(lengths), 2, 2, 32)
    whole = packed(q, k, v, lengths).split(lengths)
    pages = Pages(lengths, 2, 32, 16, torch.float32)
    for i, (keys, values) in enumerate(zip(k.split(lengths), v.split(lengths), strict=True)):
        write_kv_cache(keys, values, pages.cache, pages.slots(i, 0, lengths[i]))
    queries = torch.cat([x[-n:] for x, n in zip(q.split(lengths), new, strict=True)])
    expected = torch.cat([x[-n:] for x, n in zip(whole, new, strict=True)])
    assert_same_bits(paged(queries, pages, new, lengths), expected, "mixed batch")
    for count in THREADS:
        with threads(count):
            assert_same_bits(paged(queries, pages, new, lengths), expected, f"{count} threads")
    # padding rows after the last sequence, as a padded engine step has
    q_limit = (cu_seqlens(new), torch.tensor(lengths), 32**-0.5, 1000, 2000)
    got = paged_attention(queries, pages.cache, pages.block_table, *q_limit)
    assert_same_bits(got, expected, "looser upper bounds of the lengths")
    padded = torch.cat((queries, torch.full((6, 4, 32), torch.nan)))
    assert_same_bits(paged(padded, pages, new, lengths)[: len(queries)], expected, "padded")


def test_later_tokens_and_other_sequences_do_not_matter():
    lengths = [70, 90]
    q, k, v = tensors(160, 1, 2, 32)
    whole = packed(q, k, v, lengths)
    for row in (0, 15, 63, 64, 69):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[row + 1 :] = hard(*x[row + 1 :].shape, seed=9)
        assert_same_bits(packed(*changed, lengths)[row], whole[row], f"row {row}")
    for bad in (torch.nan, torch.inf):
        broken = [x.clone() for x in (q, k, v)]
        for x in broken:
            x[40] = bad
        got = packed(*broken, lengths)
        assert_same_bits(got[:40], whole[:40], f"before {bad}")
        assert not torch.isfinite(got[40:70]).any(), f"{bad} is hidden"
        assert_same_bits(got[70:], whole[70:], f"in the sequence after {bad}")
    k[70:], v[70:], q[70:] = torch.nan, torch.inf, torch.nan  # the neighbour overflowed
    assert_same_bits(packed(q, k, v, lengths)[:70], whole[:70], "beside a broken sequence")


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_storage(dtype):
    q, k, v = tensors(100, 2, 2, 32, dtype)
    whole = packed(q, k, v)
    for count in THREADS:
        with threads(count):
            assert_same_bits(packed(q, k, v), whole, f"{count} threads")
    assert_same_bits(packed(*map(odd_storage, (q, k, v))), whole, "odd offsets")
    fused = torch.cat((q, k, v), 1)  # what a module passes: views of one projection
    views = fused.split((4, 2, 2), 1)
    assert_same_bits(packed(*views), whole, "views of qkv")
    far = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert_same_bits(packed(*far), whole, "heads outermost")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "dim"), HEADS)
def test_accuracy(kv_heads, group, dim, dtype):
    lengths = [1, 130, 33]
    q, k, v = tensors(164, kv_heads, group, dim, dtype)
    right = exact(q.double(), k.double(), v.double(), lengths)
    assert relative_rms(packed(q, k, v, lengths), right) < unit_error(dtype, 130)


def test_log_sum_exp():
    q, k, v = tensors(90, 1, 2, 32)
    lse = attention(q, k, v, cu_seqlens([90]), 0.2)[1]
    scores = torch.einsum("qhd,kd->hqk", q.double(), k[:, 0].double()) * 0.2
    hidden = torch.ones(90, 90, dtype=torch.bool).triu(1)
    right = scores.masked_fill(hidden, -torch.inf).logsumexp(-1).t()
    assert relative_rms(lse, right) < unit_error(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "dim"), HEADS[:4])
def test_gradients(kv_heads, group, dim, dtype):
    lengths = [1, 70, 0, 20]
    inputs = tensors(91, kv_heads, group, dim, dtype)
    # The backward sees the rounded output, so bf16 loses a little more than one rounding.
    bound = unit_error(dtype, 91) * (2 if dtype == torch.bfloat16 else 1)
    assert_gradients(
        lambda *x: packed(*x, lengths), lambda *x: exact(*x, lengths), *inputs, bound=bound
    )


def test_no_tokens():
    q, k, v = tensors(0, 2, 2, 32)
    assert packed(q, k, v, [0]).shape == q.shape
    assert packed(q, k, v, [0, 0]).shape == q.shape


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_write_copies_bits(dtype, order):
    pages = Pages([37], 2, 8, 16, dtype, order=order)
    before = pages.cache.clone()
    k, v = (hard(37, 2, 8, kind="zeros", seed=i, dtype=dtype) for i in (0, 1))
    k[3], v[4] = torch.nan, torch.inf
    slots = pages.slots(0, 0, 37)
    write_kv_cache(k, v, pages.cache, slots)
    written = pages.cache[slots // 16, :, slots % 16]
    assert torch.equal(bits(written), bits(torch.cat((k, v), -1)))
    before[slots // 16, :, slots % 16] = written
    assert torch.equal(bits(pages.cache), bits(before)), "another slot was changed"


def test_rows_that_are_padding_write_nothing():
    pages = Pages([6], 2, 8, 16, torch.float32)
    k, v, slots = hard(6, 2, 8), hard(6, 2, 8, seed=1), pages.slots(0, 0, 6)
    expected = pages.cache.clone()
    write_kv_cache(k[::2], v[::2], expected, slots[::2])
    slots[1::2] = -1
    write_kv_cache(k, v, pages.cache, slots)
    assert torch.equal(bits(pages.cache), bits(expected))


def test_cache_of_another_dtype_is_refused():
    pages = Pages([4], 1, 8, 16, torch.bfloat16)
    k, v = hard(4, 1, 8), hard(4, 1, 8)
    with pytest.raises(TypeError, match="bfloat16"):
        write_kv_cache(k, v, pages.cache, pages.slots(0, 0, 4))


def test_opcheck():
    q, k, v = (x.requires_grad_() for x in tensors(5, 1, 2, 8))
    assert_registered(attention, (q, k, v, cu_seqlens([2, 3]), 0.3))
    pages = Pages([5], 1, 8, 16, torch.float32)
    slots = pages.slots(0, 0, 5)
    k, v, q = k.detach(), v.detach(), q.detach()
    write_kv_cache(k, v, pages.cache, slots)
    bounds = (cu_seqlens([5]), torch.tensor([5]), 0.3, 5, 5)
    args = (q, pages.cache, pages.block_table, *bounds)
    assert_registered(paged_attention, args, trainable=False)
    assert_registered(write_kv_cache, (k, v, torch.zeros_like(pages.cache), slots), trainable=False)


def test_the_checks_can_fail():
    # The library's attention sums by the shape of the call.
    q, k, v = tensors(300, 2, 1, 64)
    whole, keys, values = (x.transpose(0, 1) for x in (q, k, v))
    library = F.scaled_dot_product_attention(whole, keys, values, is_causal=True)
    rows = torch.cat(
        [
            F.scaled_dot_product_attention(
                whole[:, i : i + 1], keys[:, : i + 1], values[:, : i + 1]
            )
            for i in range(300)
        ],
        1,
    )
    with pytest.raises(AssertionError, match="differ, first at"):
        assert_same_bits(rows, library)
    # A step that forgets one page entry must be seen too.
    pages = Pages([40], 2, 64, 16, torch.float32)
    write_kv_cache(k[:40], v[:40], pages.cache, pages.slots(0, 0, 40))
    pages.block_table[0, 1] = pages.block_table[0, 3]
    got = paged(q[:40], pages, [40], [40])
    with pytest.raises(AssertionError):
        assert_same_bits(got, packed(q[:40], k[:40], v[:40]))
