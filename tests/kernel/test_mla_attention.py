import itertools

import pytest
import torch

from isomodels.kernels.attention import attention
from isomodels.kernels.mla_attention import (
    mla_attention,
    paged_mla_attention,
    write_latent_cache,
)
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
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 129, 200]
# (heads, nope, rope, v, rank): values wider and narrower than q and k, sizes off every tile; the
# proportions of GLM-4.7-Flash and of DeepSeek-V3
SIZES = [(4, 24, 8, 40, 48), (3, 16, 8, 12, 20), (5, 48, 16, 64, 128), (1, 32, 16, 32, 128)]
SMALL = SIZES[0]
ORDERS = [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (3, 2, 0, 1)]


def tensors(length, sizes=SMALL, dtype=torch.float32, kind="normal"):
    """q_nope, q_rope, latent, k_rope and kv_b of one scale a matrix of a model has."""
    heads, nope, rope, v, rank = sizes
    shapes = [(length, heads, nope), (length, heads, rope), (length, rank), (length, rope)]
    found = [hard(*s, kind=kind, seed=i, dtype=dtype) for i, s in enumerate(shapes)]
    weight = hard(heads * (nope + v), rank, kind="normal", seed=9) * rank**-0.5
    return [*found, weight.to(dtype)]


def cu_seqlens(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def scale_of(q_nope, q_rope):
    return (q_nope.shape[-1] + q_rope.shape[-1]) ** -0.5


def packed(q_nope, q_rope, latent, k_rope, kv_b, lengths=None):
    bounds = cu_seqlens(lengths or [len(latent)])
    return mla_attention(q_nope, q_rope, latent, k_rope, kv_b, bounds, scale_of(q_nope, q_rope))[0]


def latent_pages(lengths, width, dtype, block_size=16, order=ORDERS[0]):
    assert width % 2 == 0
    return Pages(lengths, 1, width // 2, block_size, dtype, order=order)


def paged(q_nope, q_rope, kv_b, pages, new, seq_lens):
    """One engine step: `new` tokens of each sequence, whose lengths are then `seq_lens`."""
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    bounds = (cu_seqlens(new), lengths, scale_of(q_nope, q_rope), max(new), max(seq_lens))
    return paged_mla_attention(q_nope, q_rope, pages.cache, kv_b, pages.block_table, *bounds)


def in_steps(inputs, steps, block_size=16, order=ORDERS[0]):
    """One sequence through pages in runs of tokens whose lengths are `steps`."""
    q_nope, q_rope, latent, k_rope, kv_b = inputs
    width = latent.shape[1] + k_rope.shape[1]
    pages = latent_pages([len(latent)], width, latent.dtype, block_size, order)
    out, start = [], 0
    for step in steps:
        new = slice(start, start + step)
        slots = pages.slots(0, new.start, new.stop)
        write_latent_cache(latent[new], k_rope[new], pages.cache, slots)
        out.append(paged(q_nope[new], q_rope[new], kv_b, pages, [step], [new.stop]))
        start = new.stop
    assert start == len(latent)
    return torch.cat(out)


def cut(length, step):
    return [step] * (length // step) + ([length % step] if length % step else [])


def materialised(q_nope, q_rope, latent, k_rope, kv_b, lengths):
    """The definition, with keys and values expanded from the latent."""
    heads, nope = q_nope.shape[1:]
    expanded = (latent @ kv_b.t()).view(len(latent), heads, -1)
    keys = torch.cat((expanded[..., :nope], k_rope.unsqueeze(1).expand(-1, heads, -1)), 2)
    rows = (torch.cat((q_nope, q_rope), 2), keys, expanded[..., nope:])
    out = []
    for part in zip(*(x.split(lengths) for x in rows), strict=True):
        q, k, v = (x.transpose(0, 1) for x in part)
        scores = q @ k.transpose(1, 2) * scale_of(q_nope, q_rope)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        out.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("length", LENGTHS)
def test_packed_paged_chunked_and_row_by_row(length):
    inputs = tensors(length)
    whole = packed(*inputs)
    for block_size in (16, 128):
        got = in_steps(inputs, [length], block_size)
        assert_same_bits(got, whole, f"one step, pages of {block_size}")
    for step in (1, 7, 64, 100):
        if step < length:
            assert_same_bits(in_steps(inputs, cut(length, step)), whole, f"steps of {step}")
    if length > 3:
        got = in_steps(inputs, [length - 3, 1, 1, 1])
        assert_same_bits(got, whole, "prefill, then three rows")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_sizes(sizes, dtype):
    inputs = tensors(131, sizes, dtype)
    whole = packed(*inputs)
    assert whole.shape == (131, sizes[0], sizes[3])
    assert_same_bits(in_steps(inputs, [131], 32), whole, "one step")
    assert_same_bits(in_steps(inputs, [50, 14, 65, 1, 1]), whole, "chunks and rows")
    q_nope, q_rope, latent, k_rope, kv_b = inputs
    weights = kv_b.chunk(sizes[0])
    for head in range(sizes[0]):  # a rank of tensor parallelism holds some of the heads
        one = slice(head, head + 1)
        part = packed(q_nope[:, one], q_rope[:, one], latent, k_rope, weights[head])
        assert_same_bits(part, whole[:, one].contiguous(), f"head {head} alone")


@pytest.mark.parametrize("kind", KINDS)
def test_hard_values(kind):
    inputs = tensors(130, kind=kind)
    if kind == "huge":  # scores stay finite
        inputs[0], inputs[1] = (hard(*x.shape, kind="normal") for x in inputs[:2])
    whole = packed(*inputs)
    assert torch.isfinite(whole).all()
    assert_same_bits(in_steps(inputs, cut(130, 1)), whole, "rows")
    assert_same_bits(in_steps(inputs, cut(130, 48)), whole, "chunks")


def test_scores_far_apart():
    # Whole blocks of weights underflow to 0, before and after the row's maximum.
    inputs = tensors(300)
    inputs[0] = inputs[0] * 1000
    whole = packed(*inputs)
    assert_same_bits(in_steps(inputs, cut(300, 1)), whole, "rows")


@pytest.mark.parametrize("order", ORDERS)
def test_cache_strides_and_page_order(order):
    inputs = tensors(150)
    for block_size in (16, 64):
        got = in_steps(inputs, [70, 79, 1], block_size, order)
        assert_same_bits(got, packed(*inputs), f"order {order}, pages of {block_size}")


def test_batch_composition():
    lengths = [1, 33, 64, 5, 90]
    inputs = tensors(sum(lengths))
    *rows, kv_b = inputs
    together = packed(*inputs, lengths)
    parts = list(zip(*(x.split(lengths) for x in rows), strict=True))
    alone = [packed(*part, kv_b) for part in parts]
    assert_same_bits(together, torch.cat(alone), "packed against each alone")
    turned = [torch.cat(x) for x in zip(*reversed(parts), strict=True)]
    got = packed(*turned, kv_b, lengths[::-1])
    assert_same_bits(got, torch.cat(alone[::-1]), "in reverse")
    with_empty = packed(*inputs, [0, *lengths[:3], 0, *lengths[3:], 0])
    assert_same_bits(with_empty, together, "among sequences of no tokens")


def test_rows_of_decode_and_prefill_in_one_batch():
    # Rows 2 and 16 of the field reports: decode, chunk and prefill rows share the batch.
    lengths, new = [65, 17, 130, 40, 1], [1, 17, 30, 1, 1]
    inputs = tensors(sum(lengths))
    q_nope, q_rope, latent, k_rope, kv_b = inputs
    whole = packed(*inputs, lengths).split(lengths)
    pages = latent_pages(lengths, 56, torch.float32)
    for i, rows in enumerate(zip(latent.split(lengths), k_rope.split(lengths), strict=True)):
        write_latent_cache(*rows, pages.cache, pages.slots(i, 0, lengths[i]))

    def newest(x):
        return torch.cat([part[-n:] for part, n in zip(x, new, strict=True)])

    queries = [newest(x.split(lengths)) for x in (q_nope, q_rope)]
    expected = newest(whole)
    assert_same_bits(paged(*queries, kv_b, pages, new, lengths), expected, "mixed batch")
    for count in THREADS:
        with threads(count):
            got = paged(*queries, kv_b, pages, new, lengths)
            assert_same_bits(got, expected, f"{count} threads")
    # padding rows after the last sequence, as a padded engine step has
    padded = [torch.cat((x, torch.full((6, *x.shape[1:]), torch.nan))) for x in queries]
    got = paged(*padded, kv_b, pages, new, lengths)
    assert_same_bits(got[: len(expected)], expected, "padded")
    assert not got[len(expected) :].any()


def test_later_tokens_and_other_sequences_do_not_matter():
    lengths = [70, 90]
    *rows, kv_b = tensors(160)
    whole = packed(*rows, kv_b, lengths)
    for row in (0, 15, 63, 64, 69):
        changed = [x.clone() for x in rows]
        for x in changed:
            x[row + 1 :] = hard(*x[row + 1 :].shape, seed=9)
        assert_same_bits(packed(*changed, kv_b, lengths)[row], whole[row], f"row {row}")
    for bad in (torch.nan, torch.inf):
        broken = [x.clone() for x in rows]
        for x in broken:
            x[40] = bad
        got = packed(*broken, kv_b, lengths)
        assert_same_bits(got[:40], whole[:40], f"before {bad}")
        assert not torch.isfinite(got[40:70]).any(), f"{bad} is hidden"
        assert_same_bits(got[70:], whole[70:], f"in the sequence after {bad}")
    for x in rows:  # the neighbour overflowed
        x[70:] = torch.nan
    assert_same_bits(packed(*rows, kv_b, lengths)[:70], whole[:70], "beside a broken sequence")


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_storage(dtype):
    inputs = tensors(100, dtype=dtype)
    whole = packed(*inputs)
    for count in THREADS:
        with threads(count):
            assert_same_bits(packed(*inputs), whole, f"{count} threads")
    assert_same_bits(packed(*map(odd_storage, inputs)), whole, "odd offsets")
    q_nope, q_rope, latent, k_rope, kv_b = inputs
    views = [  # what a module passes: views of one projection
        *torch.cat((q_nope, q_rope), 2).split((24, 8), 2),
        *torch.cat((latent, k_rope), 1).split((48, 8), 1),
    ]
    assert_same_bits(packed(*views, kv_b), whole, "views of projections")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_accuracy(sizes, dtype):
    lengths = [1, 130, 33]
    inputs = tensors(164, sizes, dtype)
    right = materialised(*(x.double() for x in inputs), lengths)
    # Two latents are rounded beside the output.
    assert relative_rms(packed(*inputs, lengths), right) < 2 * unit_error(dtype, 130)


def test_one_token_returns_its_own_value():
    q_nope, q_rope, latent, k_rope, kv_b = tensors(1)
    value = kv_b.double().view(4, 64, 48)[:, 24:] @ latent.double()[0]
    got = packed(q_nope, q_rope, latent, k_rope, kv_b)[0]
    assert relative_rms(got, value) < unit_error(torch.float32, 48)


def test_log_sum_exp():
    inputs = tensors(90)
    lse = mla_attention(*inputs, cu_seqlens([90]), 0.2)[1]
    q_nope, q_rope, latent, k_rope, kv_b = (x.double() for x in inputs)
    keys = (latent @ kv_b.t()).view(90, 4, 64)[..., :24]
    scores = torch.einsum("qhd,khd->hqk", q_nope, keys)
    scores = (scores + torch.einsum("qhd,kd->hqk", q_rope, k_rope)) * 0.2
    hidden = torch.ones(90, 90, dtype=torch.bool).triu(1)
    right = scores.masked_fill(hidden, -torch.inf).logsumexp(-1).t()
    assert relative_rms(lse, right) < unit_error(torch.float32, 48)


def test_query_latents_are_rounded_to_the_model_dtype():
    # The rounding point is schedule: identity weights leave dense attention of one key head.
    heads, nope = 2, 16
    q_nope, q_rope, latent, k_rope, _ = tensors(70, (heads, nope, 8, nope, nope), torch.bfloat16)
    kv_b = torch.eye(nope, dtype=torch.bfloat16).repeat(2 * heads, 1)
    q, k = torch.cat((q_nope, q_rope), 2), torch.cat((latent, k_rope), 1)[:, None]
    v = torch.nn.functional.pad(latent, (0, 8))[:, None]
    dense = attention(q, k, v, cu_seqlens([70]), 24**-0.5)[0][..., :nope].contiguous()
    assert_same_bits(packed(q_nope, q_rope, latent, k_rope, kv_b), dense, "identity weights")
    # 1 + 2^-9 is no bfloat16: the latent is 1 after its rounding.
    q_nope = torch.zeros(3, 1, 2, dtype=torch.bfloat16)
    q_nope[:, 0] = torch.tensor([1.0, 2.0**-9])
    kv_b = torch.tensor([[1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    latent = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.bfloat16)
    empty = latent[:, :0]
    lse = mla_attention(q_nope, q_nope[..., :0], latent, empty, kv_b, cu_seqlens([3]), 1.0)[1]
    right = torch.tensor([0.0, 1.0, 2.0]).logsumexp(0)
    assert abs(lse[2, 0] - right) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_gradients(sizes, dtype):
    lengths = [1, 70, 0, 20]
    inputs = tensors(91, sizes, dtype)
    # The backward sees the rounded output, so bf16 loses a little more than one rounding.
    bound = unit_error(dtype, 91) * (2 if dtype == torch.bfloat16 else 1)
    assert_gradients(
        lambda *x: packed(*x, lengths), lambda *x: materialised(*x, lengths), *inputs, bound=bound
    )


def test_no_tokens():
    inputs = tensors(0)
    assert packed(*inputs, [0]).shape == (0, 4, 40)
    assert packed(*inputs, [0, 0]).shape == (0, 4, 40)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_write_copies_bits(dtype, order):
    pages = latent_pages([37], 16, dtype, order=order)
    before = pages.cache.clone()
    latent, k_rope = (hard(37, n, kind="zeros", seed=n, dtype=dtype) for n in (12, 4))
    latent[3], k_rope[4] = torch.nan, torch.inf
    slots = pages.slots(0, 0, 37)
    write_latent_cache(latent, k_rope, pages.cache, slots)
    written = pages.cache[slots // 16, 0, slots % 16]
    assert torch.equal(bits(written), bits(torch.cat((latent, k_rope), -1)))
    before[slots // 16, 0, slots % 16] = written
    assert torch.equal(bits(pages.cache), bits(before)), "another slot was changed"


def test_operands_that_do_not_fit_are_refused():
    q_nope, q_rope, latent, k_rope, kv_b = tensors(4)
    for wrong in (
        (q_nope[:3], q_rope, latent, k_rope, kv_b),
        (q_nope, q_rope[..., :4], latent, k_rope, kv_b),
        (q_nope, q_rope, latent[:, :40], k_rope, kv_b),
        (q_nope, q_rope, latent, k_rope[:1], kv_b),
        (q_nope, q_rope, latent, k_rope, kv_b[:-1]),
        (q_nope, q_rope, latent, k_rope, kv_b[:96]),  # no rows left for W_UV
    ):
        with pytest.raises(ValueError, match="mla_attention needs"):
            packed(*wrong)
    with pytest.raises(TypeError, match="one dtype, got"):
        packed(q_nope, q_rope, latent, k_rope, kv_b.bfloat16())
    pages = latent_pages([4], 54, torch.float32)
    with pytest.raises(ValueError, match="mla_attention needs"):
        paged(q_nope, q_rope, kv_b, pages, [4], [4])
    with pytest.raises(ValueError, match=r"a latent cache is .*, 56\]"):
        write_latent_cache(latent, k_rope, pages.cache, pages.slots(0, 0, 4))
    pages = latent_pages([4], 56, torch.bfloat16)
    with pytest.raises(TypeError, match="bfloat16"):
        write_latent_cache(latent, k_rope, pages.cache, pages.slots(0, 0, 4))


def test_rows_that_are_padding_write_nothing():
    cache = torch.full((2, 1, 16, 24), torch.nan)
    latent, k_rope, slots = hard(6, 16), hard(6, 8, seed=1), torch.arange(20, 26)
    expected = cache.clone()
    write_latent_cache(latent[::2], k_rope[::2], expected, slots[::2])
    slots[1::2] = -1
    write_latent_cache(latent, k_rope, cache, slots)
    assert_same_bits(cache, expected)


def test_opcheck():
    inputs = [x.requires_grad_() for x in tensors(5)]
    assert_registered(mla_attention, (*inputs, cu_seqlens([2, 3]), 0.3))
    q_nope, q_rope, latent, k_rope, kv_b = (x.detach() for x in inputs)
    pages = latent_pages([5], 56, torch.float32)
    slots = pages.slots(0, 0, 5)
    write_latent_cache(latent, k_rope, pages.cache, slots)
    bounds = (cu_seqlens([5]), torch.tensor([5]), 0.3, 5, 5)
    args = (q_nope, q_rope, pages.cache, kv_b, pages.block_table, *bounds)
    assert_registered(paged_mla_attention, args, trainable=False)
    args = (latent, k_rope, torch.zeros_like(pages.cache), slots)
    assert_registered(write_latent_cache, args, trainable=False)


def test_the_checks_can_fail():
    # Keys and values expanded from the latent, as most trainers do, have other bits.
    inputs = tensors(100, dtype=torch.float32)
    with pytest.raises(AssertionError, match="differ, first at"):
        assert_same_bits(materialised(*inputs, [100]).contiguous(), packed(*inputs))
    # A step that forgets one page entry must be seen too.
    q_nope, q_rope, latent, k_rope, kv_b = (x[:40] if x.shape[0] == 100 else x for x in inputs)
    pages = latent_pages([40], 56, torch.float32)
    write_latent_cache(latent, k_rope, pages.cache, pages.slots(0, 0, 40))
    pages.block_table[0, 1] = pages.block_table[0, 3]
    got = paged(q_nope, q_rope, kv_b, pages, [40], [40])
    with pytest.raises(AssertionError):
        assert_same_bits(got, packed(q_nope, q_rope, latent, k_rope, kv_b))
