"""Rows named are those of the field reports, section B3."""

import pytest
import torch

from isomodels.kernels.fixed_order import matmul_nt
from isomodels.kernels.router import route, router_logits
from tests.kernel.battery import (
    DTYPES,
    KINDS,
    ROWS,
    assert_gradients,
    assert_registered,
    assert_row_invariant,
    assert_same_bits,
    hard,
    relative_rms,
    unit_error,
)

EXPERTS = 16
BIAS = hard(EXPERTS, kind="normal", seed=5)
# top_k, scoring, normalize, scale, bias, groups, groups kept
CASES = {
    "softmax": (3, "softmax", False),
    "softmax normalized": (3, "softmax", True),
    "softmax of one": (1, "softmax", True),
    "softmax of all": (EXPERTS, "softmax", False, 0.5),
    "sigmoid": (3, "sigmoid", False, 2.5),
    "sigmoid normalized": (4, "sigmoid", True, 1.8, BIAS),
    "sigmoid in groups": (4, "sigmoid", True, 2.5, BIAS, 4, 2),
    "sigmoid in pairs": (8, "sigmoid", True, 2.5, BIAS, 8, 4),
}
cases = pytest.mark.parametrize("case", CASES)


def logits(rows=ROWS, experts=EXPERTS, kind="normal", seed=0):
    return hard(rows, experts, kind=kind, seed=seed)


def exact(x, top_k, scoring, normalize, scale=1.0, bias=None, n_group=1, topk_group=1, ids=None):
    """fp64, expert by expert in plain Python: the definition, and no tensor operator's ties."""
    scores = x.double().softmax(1) if scoring == "softmax" else x.double().sigmoid()
    if ids is None:
        rows = []
        for score, logit in zip(scores.tolist(), x.tolist(), strict=True):
            choice = logit if scoring == "softmax" else score
            if bias is not None:
                choice = [a + b for a, b in zip(score, bias.tolist(), strict=True)]
            size = len(choice) // n_group
            groups = [range(g * size, (g + 1) * size) for g in range(n_group)]
            best = [sum(sorted((choice[e] for e in g), reverse=True)[:2]) for g in groups]
            kept = sorted(range(n_group), key=lambda g: -best[g])[:topk_group]
            allowed = [e for g in sorted(kept) for e in groups[g]]
            rows.append(sorted(allowed, key=lambda e: -choice[e])[:top_k])
        ids = torch.tensor(rows)
    chosen = scores.gather(1, ids.long())
    if normalize:
        chosen = chosen / (chosen.sum(1, keepdim=True) + (1e-20 if scoring == "sigmoid" else 0))
    return chosen * scale, ids


def complete(case):
    """The settings of a case with those that it leaves at their defaults."""
    return [*CASES[case], *[1.0, None, 1, 1][len(CASES[case]) - 3 :]]


def packed(result):
    """(weights, ids) as one fp32 tensor, every bit of both."""
    weights, ids = result
    return torch.cat((weights, ids.view(torch.float32)), 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "experts"), [(64, 8), (65, 128), (1000, 60), (2048, 64)])
def test_logits_stand_alone(hidden, experts, dtype):
    weight = hard(experts, hidden, seed=1, dtype=dtype)
    assert_row_invariant(lambda x: router_logits(x, weight), hard(ROWS, hidden, dtype=dtype))


def test_row_39_logits_are_fp32_sums_never_rounded():
    x, weight = hard(9, 256, dtype=torch.bfloat16), hard(8, 256, seed=1, dtype=torch.bfloat16)
    assert_same_bits(router_logits(x, weight), matmul_nt(x, weight).contiguous())
    product = x.double() @ weight.double().t()
    assert relative_rms(router_logits(x, weight), product) < unit_error(torch.float32, 256)
    # Two experts nearer than a bf16 unit are still told apart.
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    weight = torch.ones(2, 64, dtype=torch.bfloat16)
    weight[1, 0] = 1.0078125  # the sums are 64 and 64.0078125, in bf16 both 64
    assert route(router_logits(x, weight), 1, "softmax", True)[1].tolist() == [[1]]


@cases
@pytest.mark.parametrize("kind", KINDS)
def test_routes_stand_alone(case, kind):
    assert_row_invariant(lambda x: packed(route(x, *CASES[case])), logits(kind=kind))


@pytest.mark.parametrize("experts", [3, 60, 64, 128, 256, 512])
def test_routes_of_many_experts_stand_alone(experts):
    assert_row_invariant(
        lambda x: packed(route(x, min(8, experts), "softmax", False)), logits(experts=experts)
    )


@cases
def test_rows_32_and_41_the_experts_and_weights_of_fp64(case):
    x = logits(400)
    weights, ids = route(x, *CASES[case])
    expected, chosen = exact(x, *CASES[case])
    assert torch.equal(ids, chosen.int())
    assert relative_rms(weights, expected) < unit_error(torch.float32)
    assert (weights >= 0).all()


def test_logits_that_softmax_cannot_tell_apart_keep_their_order():
    # exp underflows to 0 for all but the first; the order of the logits still stands.
    x = torch.tensor([[-500.0, 0.0, -400.0, -300.0]])
    weights, ids = route(x, 4, "softmax", True)
    assert ids.tolist() == [[1, 3, 2, 0]]
    assert weights.tolist() == [[1.0, 0.0, 0.0, 0.0]]


@cases
def test_row_40_ties_go_to_the_lowest_index(case):
    top_k, scoring, normalize, *rest = CASES[case]
    rest = [*rest[:1], None, *rest[2:]] if len(rest) > 1 else rest
    same = torch.full((5, EXPERTS), 0.25)
    weights, ids = route(same, top_k, scoring, normalize, *rest)
    assert ids.tolist() == [list(range(top_k))] * 5
    assert (weights == weights[:, :1]).all()
    twins = logits()
    twins[:, EXPERTS // 2 :] = twins[:, : EXPERTS // 2]
    weights, ids = route(twins, top_k, scoring, normalize, *rest)
    assert torch.equal(ids, exact(twins, top_k, scoring, normalize, *rest)[1].int())
    zeros = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    assert route(zeros, 3, "softmax", False)[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("seed", range(4))
def test_row_35_chosen_experts_lie_in_chosen_groups_whatever_the_bias(seed):
    generator = torch.Generator().manual_seed(seed)
    x, bias = logits(200, seed=seed), -2 * torch.rand(EXPERTS, generator=generator)
    ids = route(x, 4, "sigmoid", True, 1.0, bias, 4, 2)[1]
    scores = (x.double().sigmoid() + bias.double()).view(200, 4, 4)
    kept = scores.topk(2, 2).values.sum(2).topk(2, 1).indices
    assert ((ids.long() // 4).unsqueeze(2) == kept.unsqueeze(1)).any(2).all()
    # a group may be excluded although its experts score like the worst of the kept ones
    bias = torch.full((EXPERTS,), -torch.inf)
    bias[:4] = 0.0
    ids = route(x, 6, "sigmoid", True, 1.0, bias, 4, 2)[1]
    assert (ids < 8).all()


def test_row_36_weights_come_from_the_scores_without_the_bias():
    x, bias = logits(), 7 + 0.25 * torch.rand(EXPERTS, generator=torch.Generator().manual_seed(1))
    weights, ids = route(x, 4, "sigmoid", True, 2.5, bias)
    shifted, same = route(x, 4, "sigmoid", True, 2.5, bias + 64.0)  # exact: keeps the order
    kept = (ids == same).all(1)
    assert kept.sum() > len(x) // 2
    assert_same_bits(shifted[kept], weights[kept])
    scores = x.double().sigmoid().gather(1, ids.long())
    expected = 2.5 * scores / scores.sum(1, keepdim=True)
    assert relative_rms(weights, expected) < unit_error(torch.float32)


def test_row_37_the_bias_of_another_dtype_is_refused():
    with pytest.raises(ValueError, match=r"bias \[16\] in float32, got \[16\] in torch\.bfloat16"):
        route(logits(), 4, "sigmoid", True, 1.0, BIAS.bfloat16())


@cases
def test_row_33_replay_of_its_own_routes_is_no_change(case):
    settings, x = complete(case), logits()
    chosen = route(x, *settings)
    replayed = route(x, *settings, chosen[1])
    assert_same_bits(packed(replayed), packed(chosen))
    assert replayed[1].data_ptr() != chosen[1].data_ptr()
    # Other experts get the weights of their own scores.
    ids = torch.arange(settings[0], dtype=torch.int32).expand(len(x), -1).contiguous()
    weights, kept = route(x, *settings, ids)
    assert torch.equal(kept, ids)
    assert relative_rms(weights, exact(x, *settings, ids)[0]) < unit_error(torch.float32)


@cases
def test_not_a_number_is_not_hidden(case):
    x = logits()
    x[3, 5] = x[4] = torch.nan
    weights, ids = route(x, *CASES[case])
    assert ((ids >= 0) & (ids < EXPERTS)).all()
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert ids[3, 0] == 5
    normalized = CASES[case][1] == "softmax" or CASES[case][2]
    assert weights[3].isnan().all() if normalized else weights[3, 0].isnan()
    assert weights[4].isnan().all()
    others = [i for i in range(len(x)) if i not in (3, 4)]
    clean = route(logits(), *CASES[case])
    assert_same_bits(packed((weights[others], ids[others])), packed([t[others] for t in clean]))


def test_infinite_logits():
    x = torch.tensor([[1.0, torch.inf, 0.0, -torch.inf]])
    assert route(x, 4, "softmax", True)[1].tolist() == [[1, 0, 2, 3]]
    weights, ids = route(x, 4, "sigmoid", False)
    assert ids.tolist() == [[1, 0, 2, 3]]
    assert weights[0, 0] == 1
    assert weights[0, 3] == 0


@cases
def test_gradients(case):
    settings, x = complete(case), logits(20)
    weights, ids = route(x, *settings)
    if (weights == 1).all():  # one expert's share of itself: fp64 leaves noise
        return
    assert_gradients(
        lambda x: route(x, *settings, ids)[0],
        lambda x: exact(x, *settings, ids)[0],
        x,
        bound=unit_error(torch.float32, EXPERTS),
    )


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_of_extreme_logits_are_finite(scoring, normalize):
    x = torch.tensor([[-200.0, 150.0, 3.0, -90.0], [0.0, -0.0, 88.0, -104.0]], requires_grad=True)
    route(x, 3, scoring, normalize)[0].square().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_logits(dtype):
    inputs = [hard(20, 48, kind="normal", dtype=dtype), hard(8, 48, seed=1, dtype=dtype)]
    bound = unit_error(dtype, 48)
    assert_gradients(router_logits, lambda x, w: x @ w.t(), *inputs, bound=bound)


def test_opcheck():
    assert_registered(router_logits, (hard(3, 8).requires_grad_(), hard(5, 8).requires_grad_()))
    for settings in CASES.values():
        assert_registered(route, (logits(3).requires_grad_(), *settings))


def test_no_tokens():
    weights, ids = route(logits(0), 3, "softmax", True)
    assert weights.shape == ids.shape == (0, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring": "tanh"}, "softmax, sigmoid, not 'tanh'"),
        ({"scoring": "softmax"}, "bias and groups with sigmoid scores only"),
        ({"n_group": 3}, "16 experts cannot lie in 3 equal groups"),
        ({"n_group": 0}, "cannot lie in 0"),
        ({"n_group": 16}, "have only one each"),
        ({"topk_group": 5}, "from 1 to n_group = 4, got 5"),
        ({"topk_group": 0}, "got 0"),
        ({"top_k": 9}, "cannot go to 9 of 8 eligible"),
        ({"top_k": 0}, "cannot go to 0"),
        ({"correction_bias": BIAS[:15]}, r"bias \[16\] in float32, got \[15\]"),
        ({"replay": torch.zeros(4, 4)}, r"ids \[37, 4\] in int32, got \[4, 4\] in torch.float32"),
    ],
)
def test_bad_numbers(changes, message):
    arguments = {
        "top_k": 4,
        "scoring": "sigmoid",
        "normalize": True,
        "correction_bias": BIAS,
        "n_group": 4,
        "topk_group": 2,
    }
    with pytest.raises(ValueError, match=message):
        route(logits(), **arguments | changes)


def test_bad_operands():
    with pytest.raises(TypeError, match=r"logits \[T, E\] in float32, got \[37, 16\] in torch.bf"):
        route(logits().bfloat16(), 2, "softmax", True)
    with pytest.raises(ValueError, match=r"router_logits needs .* \[3, 8\] and \[5, 9\]"):
        router_logits(hard(3, 8), hard(5, 9))


def test_the_battery_can_fail():
    # torch's own order of ties and its own softmax both follow the batch or the vector width
    def naive(x):
        return torch.sigmoid(x).topk(3, 1).values

    with pytest.raises(AssertionError, match="differ, first at"):
        assert_row_invariant(naive, logits(experts=20))
