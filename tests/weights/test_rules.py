"""Conversion rules: each is its own inverse's inverse, and nothing passes unnoticed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isomodels.errors import CheckpointError
from isomodels.weights_conv.bits import same_bits
from isomodels.weights_conv.rules import (
    CarriedSame,
    Concat,
    Either,
    Fused,
    Rule,
    Same,
    Source,
    Stack,
    Tied,
    resolve,
)
from isomodels.weights_conv.tables import check_tensors, iter_module, to_hf, to_module
from tests.weights.support import any_bits, raw

SIZE = st.integers(0, 5)


@st.composite
def tables(draw: st.DrawFn) -> list[Rule]:
    rules: list[Rule] = []
    for i in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(SIZE, min_size=1, max_size=3))
        kind = draw(st.sampled_from(["same", "renamed", "carried", "concat", "stack"]))
        if kind == "concat":
            dim = draw(st.integers(0, len(shape) - 1))
            lengths = draw(st.lists(SIZE, min_size=1, max_size=4))
            parts = tuple(
                Source(f"hf{i}.{j}", (*shape[:dim], n, *shape[dim + 1 :]))
                for j, n in enumerate(lengths)
            )
            rules.append(Concat(f"m{i}", parts, dim))
        elif kind == "stack":
            rows = draw(st.lists(SIZE, min_size=1, max_size=3))
            slices = tuple(
                tuple(Source(f"hf{i}.{e}.{j}", (n, shape[0])) for j, n in enumerate(rows))
                for e in range(draw(st.integers(1, 3)))
            )
            rules.append(Stack(f"m{i}", slices))
        elif kind == "carried":
            rules.append(CarriedSame(f"m{i}", tuple(shape)))
        else:
            rules.append(Same(f"m{i}", tuple(shape), f"hf{i}" if kind == "renamed" else None))
    return rules


def hf_tensors(rules: list[Rule], dtype: torch.dtype) -> dict[str, Tensor]:
    sources = [source for rule in rules for source in rule.sources]
    return {s.name: any_bits(*s.shape, dtype=dtype, seed=i) for i, s in enumerate(sources)}


@settings(max_examples=60, deadline=None)
@given(tables(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_both_ways_keep_every_bit(rules: list[Rule], dtype: torch.dtype) -> None:
    hf = hf_tensors(rules, dtype)
    module = to_module(rules, hf)
    assert {name: tuple(t.shape) for name, t in module.items()} == {
        rule.name: rule.shape for rule in rules
    }
    back = to_hf(rules, module)
    assert {name: raw(t) for name, t in back.items()} == {name: raw(t) for name, t in hf.items()}
    on_meta = dict(iter_module(rules, hf, device=torch.device("meta")))
    assert {name: (t.is_meta, t.shape) for name, t in on_meta.items()} == {
        name: (True, t.shape) for name, t in module.items()
    }
    again = to_module(rules, back)
    assert {name: raw(t) for name, t in again.items()} == {
        name: raw(t) for name, t in module.items()
    }


@settings(max_examples=60, deadline=None)
@given(tables(), st.data())
def test_every_single_fault_is_an_error(rules: list[Rule], data: st.DataObject) -> None:
    hf = hf_tensors(rules, torch.float32)
    name = data.draw(st.sampled_from(sorted(hf)))
    match data.draw(st.sampled_from(["missing", "left over", "renamed", "shape", "dtype"])):
        case "missing":
            del hf[name]
        case "left over":
            hf["other"] = hf[name]
            name = "other"
        case "renamed":
            hf[name + "x"] = hf.pop(name)
        case "shape":
            hf[name] = any_bits(*hf[name].shape, 1)
        case "dtype":
            hf[name] = hf[name].to(torch.float64)
    with pytest.raises(CheckpointError, match=name):
        to_module(rules, hf, dtype=torch.float32)


def test_the_message_lists_everything_and_cuts_long_lists() -> None:
    rules = [Same(f"w{i}", (2,)) for i in range(30)]
    hf = {f"w{i}": torch.zeros(2) for i in range(3)} | {"w0": torch.zeros(3), "x": torch.zeros(2)}
    hf["w1"] = hf["w1"].half()
    with pytest.raises(CheckpointError) as error:
        to_module(rules, hf, dtype=torch.float32)
    assert str(error.value) == (
        "the weights do not fit the config: "
        "27 tensors missing: w10, w11, w12, w13, w14, w15 and 21 more; "
        "1 tensor left over: x; wrong shape: w0 is [3] instead of [2]; "
        "float32 expected: w1 is float16"
    )


def test_without_a_dtype_all_must_agree() -> None:
    rules = [Same("a", (1,)), Same("b", (1,))]
    check_tensors(rules, {"a": torch.zeros(1).half(), "b": torch.zeros(1).half()})
    with pytest.raises(CheckpointError, match="b is bfloat16"):
        check_tensors(rules, {"a": torch.zeros(1), "b": torch.zeros(1).bfloat16()})


def test_two_rules_for_one_tensor_is_a_mistake_of_the_table() -> None:
    with pytest.raises(ValueError, match="two rules use a"):
        to_module([Same("a", (1,)), Same("b", (1,), "a")], {"a": torch.zeros(1)})


def either(size: int = 4, known: bool = True) -> Either:
    parts = tuple((Source(f"e{e}.a", (1, 4)), Source(f"e{e}.b", (size - 1, 4))) for e in range(2))
    return Either(Stack("e", parts), Fused("e", (2, size, 4), layout_known=known))


def test_experts_apart_and_fused_are_one_tensor() -> None:
    fused = any_bits(2, 4, 4)
    apart = {"e0.a": fused[0, :1], "e0.b": fused[0, 1:], "e1.a": fused[1, :1], "e1.b": fused[1, 1:]}
    for hf in (apart, {"e": fused}):
        assert raw(to_module([either()], hf)["e"]) == raw(fused)
    # without a file to follow, experts are written apart
    assert {n: raw(t) for n, t in to_hf([either()], {"e": fused}).items()} == {
        n: raw(t) for n, t in apart.items()
    }
    assert resolve([either()], {"e"}) == (either().fused,)
    assert to_hf(resolve([either()], {"e"}), {"e": fused}).keys() == {"e"}


def test_experts_that_names_do_not_tell() -> None:
    fused = {"e": any_bits(2, 4, 4)}
    with pytest.raises(CheckpointError, match=r"same experts twice, as e and as e0\.a"):
        to_module([either()], fused | {"e0.a": any_bits(1, 4)})
    with pytest.raises(CheckpointError, match=r"e is \[2, 4, 4\]: its shape does not tell"):
        to_module([either(known=False)], fused)
    # where the shape excludes the other layout, it is checked as any other
    to_module([either(5, known=False)], {"e": any_bits(2, 5, 4)})
    with pytest.raises(CheckpointError, match=r"e is \[2, 4, 5\] instead of \[2, 5, 4\]"):
        to_module([either(5, known=False)], {"e": any_bits(2, 4, 5)})
    with pytest.raises(CheckpointError, match=r"4 tensors missing: e0\.a"):
        to_module([either()], {})


TIED: list[Rule] = [Same("embed", (3,)), Tied("head", (3,), to="embed")]


def test_tied_absent_or_equal() -> None:
    embed = any_bits(3)
    for hf in ({"embed": embed}, {"embed": embed, "head": embed.clone()}):
        module = to_module(TIED, hf)
        assert module.keys() == {"embed"}
        assert to_hf(TIED, module).keys() == {"embed"}
        full = to_hf(TIED, module, optional=["head", "unknown"])
        assert full.keys() == {"embed", "head"}
        assert same_bits(full["head"], embed)


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1.0, 1.0 + 2**-23)])
def test_tied_with_other_bits(a: float, b: float) -> None:
    hf = {"embed": torch.full((3,), a), "head": torch.full((3,), b)}
    with pytest.raises(CheckpointError, match="ties head to embed"):
        to_module(TIED, hf)


def test_tied_with_another_shape() -> None:
    with pytest.raises(CheckpointError, match=r"head is \[4\] instead of \[3\]"):
        to_module(TIED, {"embed": torch.zeros(3), "head": torch.zeros(4)})


def test_carried_can_be_left_out_but_not_be_missing() -> None:
    rules = [Same("a", (1,)), CarriedSame("mtp", (1,))]
    hf = {"a": torch.ones(1), "mtp": torch.ones(1)}
    assert to_module(rules, hf).keys() == {"a", "mtp"}
    assert to_module(rules, hf, carried=False).keys() == {"a"}
    with pytest.raises(CheckpointError, match="1 tensor missing: mtp"):
        to_module(rules, {"a": torch.ones(1)}, carried=False)


def test_to_hf_refuses_another_module() -> None:
    rules = [Same("a", (3,)), Same("b", (1,))]
    # A host's padding must not reach a file.
    with pytest.raises(CheckpointError) as error:
        to_hf(rules, {"a": torch.zeros(8), "c": torch.zeros(1)})
    for fault in ("a is [8] instead of [3]", "b is missing", "c has no rule"):
        assert fault in str(error.value)


def test_to_hf_gives_views_and_leaves_the_source_alone() -> None:
    """Row 51 of the field reports: ten conversions in a row give the same bits."""
    rules = [Concat("qkv", (Source("q", (4, 2)), Source("k", (2, 2))))]
    module = {"qkv": any_bits(6, 2)}
    before = raw(module["qkv"])
    results = [{n: raw(t) for n, t in to_hf(rules, module).items()} for _ in range(10)]
    assert all(result == results[0] for result in results)
    assert raw(module["qkv"]) == before
    assert to_hf(rules, module)["k"].data_ptr() == module["qkv"][4:].data_ptr()


def test_same_bits_is_stricter_than_equal() -> None:
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert not same_bits(zero, -zero)
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, (nan.view(torch.int32) + 1).view(torch.float32))
    assert not same_bits(zero, zero.bfloat16())
    assert not same_bits(zero, torch.zeros(1, 1))
