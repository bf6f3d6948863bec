import threading

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from isomodels.kernels.fixed_order import matmul_nt
from isomodels.kernels.linear import linear
from tests.kernel.battery import (
    DTYPES,
    KINDS,
    ROWS,
    assert_gradients,
    assert_registered,
    assert_row_invariant,
    assert_same_bits,
    hard,
    layouts,
    odd_storage,
    relative_rms,
    threads,
    unit_error,
)

# N is no multiple of the 64 columns of a tile; K odd, around powers of two, and of real models.
SIZES = [(8, 64), (9, 65), (63, 100), (65, 3), (127, 130), (1000, 200), (1376, 72), (2047, 33)]
BIG = [(4096, 70), (11008, 40), (12288, 65), (12287, 20)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), SIZES)
def test_rows_stand_alone(k, n, dtype):
    weight = hard(n, k, seed=1, dtype=dtype)
    assert_row_invariant(lambda x: linear(x, weight), hard(ROWS, k, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_stand_alone_for_hard_values(kind):
    weight, bias = hard(100, 256, kind=kind, seed=1), hard(100, kind=kind, seed=2)
    assert_row_invariant(lambda x: linear(x, weight, bias), hard(ROWS, 256, kind=kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), BIG)
def test_rows_of_long_sums_stand_alone(k, n, dtype):
    x, weight = hard(20, k, dtype=dtype), hard(n, k, seed=1, dtype=dtype)
    whole = linear(x, weight)
    for row in range(0, 20, 3):
        assert_same_bits(linear(x[row : row + 1], weight), whole[row : row + 1], f"row {row}")
    for count in (2, 3, 8):
        with threads(count):
            assert_same_bits(linear(x, weight), whole, f"{count} threads")
    assert_same_bits(linear(x, odd_storage(weight)), whole, "weight at an odd offset")


def test_row_10_of_the_field_reports_every_batch_size():
    # vLLM looks tiles up by M; here no M may move a row.
    weight = hard(70, 96, seed=1)
    x = hard(2049, 96)
    whole = linear(x, weight)
    for count in [*range(1, 66), 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 2048]:
        assert_same_bits(linear(x[:count], weight), whole[:count], f"M = {count}")
        assert_same_bits(linear(x[-count:], weight), whole[-count:], f"last M = {count}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize(("k", "n"), [(129, 8), (384, 200), (1376, 1024)])
def test_a_column_shard_has_the_bits_of_the_whole(k, n, shards, dtype):
    weight, bias = hard(n, k, seed=1, dtype=dtype), hard(n, seed=2, dtype=dtype)
    for rows in (1, 5, ROWS):
        x = hard(rows, k, dtype=dtype)
        whole = linear(x, weight, bias)
        parts = zip(weight.chunk(shards), bias.chunk(shards), strict=True)
        assert_same_bits(torch.cat([linear(x, w, b) for w, b in parts], 1), whole, "shards")
        copies = [linear(x, odd_storage(w, 3)) for w in weight.chunk(shards)]
        assert_same_bits(torch.cat(copies, 1), linear(x, weight), "shards at odd offsets")


@pytest.mark.parametrize("dtype", DTYPES)
def test_storage_of_the_weight_does_not_matter(dtype):
    x, weight = hard(ROWS, 200, dtype=dtype), hard(100, 200, seed=1, dtype=dtype)
    whole = linear(x, weight)
    for name, same in layouts(weight).items():
        assert_same_bits(linear(x, same), whole, name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_mapped_from_a_file(tmp_path, dtype):
    x, weight = hard(5, 64, dtype=dtype), hard(33, 64, seed=1, dtype=dtype)
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": weight}
    save_file(tensors, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert_same_bits(linear(x, file.get_tensor("b")), linear(x, weight), "mapped")
        shard = file.get_slice("b")[11:22]
        assert_same_bits(linear(x, shard), linear(x, weight)[:, 11:22], "mapped shard")


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_enters_before_the_rounding(dtype):
    x, weight = hard(ROWS, 96, dtype=dtype), hard(50, 96, seed=1, dtype=dtype)
    bias = hard(50, seed=2, dtype=dtype)
    expected = (matmul_nt(x, weight) + bias.float()).to(dtype)
    assert_same_bits(linear(x, weight, bias), expected, "bias")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [8, 129, 1024, 12288])
def test_accuracy(k, dtype):
    x, weight = (
        hard(5, k, kind="normal", dtype=dtype),
        hard(40, k, kind="normal", seed=1, dtype=dtype),
    )
    bias = hard(40, kind="normal", seed=2, dtype=dtype)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert relative_rms(linear(x, weight, bias), exact) < unit_error(dtype, k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype):
    inputs = [
        hard(*s, kind="normal", seed=i, dtype=dtype)
        for i, s in enumerate([(20, 48), (30, 48), (30,)])
    ]
    assert_gradients(linear, F.linear, *inputs, bound=unit_error(dtype, 48))


@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(bias):
    args = (hard(3, 8), hard(5, 8), hard(5) if bias else None)
    args = tuple(None if x is None else x.requires_grad_() for x in args)
    assert_registered(linear, args)


def test_python_threads_at_once():
    # A host may run two forwards at a time; the thread count is state of the process.
    x, weight = hard(ROWS, 1024), hard(130, 1024, seed=1)
    whole, failures = linear(x, weight), []

    def work() -> None:
        try:
            for _ in range(20):
                assert_same_bits(linear(x, weight), whole, "in a thread")
        except AssertionError as error:
            failures.append(error)

    with threads(2):
        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert torch.get_num_threads() == 2
    assert not failures


def test_bad_operands():
    with pytest.raises(ValueError, match=r"\[3, 8\] and \[5, 9\]"):
        linear(hard(3, 8), hard(5, 9))
    with pytest.raises(TypeError, match=r"float32 and torch\.bfloat16"):
        linear(hard(3, 8), hard(5, 8, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="float16"):  # row 31 of the field reports: fp16 is refused
        linear(hard(3, 8).half(), hard(5, 8).half())


def test_bad_bias():
    for bias in (hard(8), hard(1), hard(1, 5), hard(5, 1)):  # the last three would broadcast
        with pytest.raises(ValueError, match=r"linear needs a bias \[N\] .* and \[5, 8\]"):
            linear(hard(3, 8), hard(5, 8), bias)
    with pytest.raises(TypeError, match=r"bias of the input's torch\.bfloat16, got torch\.float32"):
        linear(hard(3, 8).bfloat16(), hard(5, 8).bfloat16(), hard(5))


def test_the_battery_can_fail():
    weight = hard(200, 1000, seed=1)
    with pytest.raises(AssertionError, match=r"differ, first at \[\d+, \d+\]: [0-9a-f]{8}"):
        assert_row_invariant(lambda x: F.linear(x, weight), hard(ROWS, 1000))


def test_the_shard_check_can_fail():
    x, weight = hard(1, 384), hard(200, 384, seed=1)
    parts = torch.cat([F.linear(x, odd_storage(w)) for w in weight.chunk(8)], 1)
    with pytest.raises(AssertionError):
        assert_same_bits(parts, F.linear(x, weight))
