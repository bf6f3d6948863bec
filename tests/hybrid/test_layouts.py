"""Hybrids over ranks of tensor parallelism: what each rank holds, and that no bit depends on it."""

import pytest
import torch
from safetensors.torch import load_file

from isomodels.checkpoint import load_checkpoint, load_into, open_checkpoint
from isomodels.config import read_config
from isomodels.errors import UnsupportedError
from isomodels.layers.parallel import Layout, TensorParallel
from isomodels.registry import load_object
from tests.hybrid.models import Engine, in_text_form, make, run_packed, tokens
from tests.kernel.battery import assert_same_bits
from tests.parallel.one_process import Meeting, in_one_process

# four key heads of the rule, of two value heads each, and two of attention, for up to four ranks
FIELDS = {"vocab_size": 1003, "linear_num_key_heads": 4, "linear_num_value_heads": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """folder(name) -> checkpoint in bfloat16, made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp(name), torch.bfloat16, **FIELDS)
        return made[name]

    return get


def rank_of(folder, meeting, rank):
    """One rank's part of the module."""
    checkpoint = open_checkpoint(folder)
    layout = Layout(TensorParallel(rank, meeting.size, meeting))
    model = load_object(checkpoint.spec.model)(
        checkpoint.config, dtype=checkpoint.dtype, layout=layout
    )
    load_into(model, folder)
    return model.requires_grad_(False)


def alone(folder):
    return load_checkpoint(folder).requires_grad_(False)


def over(ranks, folder, work):
    """work(module) of every rank."""
    meeting = Meeting(ranks)
    with in_one_process():
        return meeting.run(lambda rank: work(rank_of(folder, meeting, rank)))


def results(model, hidden):
    return torch.cat((hidden.float(), model.logits(hidden), model.logprobs(hidden)), 1)


def heads(tensor, count, wanted):
    """Rows of the wanted heads, of a tensor whose rows are those of `count` heads."""
    return tensor.unflatten(0, (count, -1))[wanted].flatten(0, 1)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_row_43_of_the_field_reports_each_component_is_cut_by_itself(folder, name):
    _, config = read_config(folder(name))
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    keys = key_heads * config.linear_key_head_dim
    found = in_text_form(load_file(folder(name) / "model.safetensors"), config)
    ranks = [rank_of(folder(name), Meeting(2), rank).state_dict() for rank in range(2)]
    for index in config.layers_of("linear_attention"):
        prefix = f"model.layers.{index}.linear_attn."
        own = {n.removeprefix(prefix): t for n, t in found.items() if n.startswith(prefix)}
        sizes = [keys, keys, len(own["conv1d.weight"]) - 2 * keys]
        for rank, mine in enumerate(ranks):

            def cut(tensor, count, rank=rank):
                each = count // 2
                return heads(tensor, count, range(rank * each, (rank + 1) * each))

            def qkv(tensor, cut=cut, sizes=sizes):
                counts = (key_heads, key_heads, value_heads)
                return [cut(t, n) for t, n in zip(tensor.split(sizes), counts, strict=True)]

            rest = [cut(own[f"in_proj_{part}.weight"], value_heads) for part in "zba"]
            expected = {
                "in_proj.weight": torch.cat([*qkv(own["in_proj_qkv.weight"]), *rest]),
                "conv1d.weight": torch.cat(qkv(own["conv1d.weight"])),
                "gates.A_log": cut(own["A_log"], value_heads).float(),
                "gates.dt_bias": cut(own["dt_bias"], value_heads).float(),
                "out_proj.weight": cut(own["out_proj.weight"].t(), value_heads).t(),
            }
            for part, tensor in expected.items():
                assert_same_bits(mine[prefix + part], tensor.contiguous(), f"{part}, rank {rank}")


@pytest.mark.parametrize("name", ["qwen3_5", "multimodal"])
def test_rows_43_and_56_of_the_field_reports_ranks_give_the_bits_of_one(folder, name):
    """Four of them share two heads of keys and values, between them gates of their own."""
    model, ids, lengths = alone(folder(name)), tokens(90), [20, 70]

    def work(part):
        return results(part, run_packed(part, ids, lengths))

    for ranks in (2, 4):
        for rank, got in enumerate(over(ranks, folder(name), work)):
            assert_same_bits(got, work(model), f"rank {rank} of {ranks}")


def test_row_56_of_the_field_reports_a_rank_has_whole_heads_with_their_gates(folder):
    _, config = read_config(folder("qwen3_5"))
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    found = load_file(folder("qwen3_5") / "model.safetensors")
    prefix = "model.layers.3.self_attn."
    query, key, value = (found[f"{prefix}{n}_proj.weight"] for n in "qkv")
    for rank in range(4):  # a head's query and gate, and the keys and values of its group
        own = [heads(query, 4, [rank]), *(heads(x, 2, [rank // 2]) for x in (key, value))]
        mine = rank_of(folder("qwen3_5"), Meeting(4), rank).state_dict()
        assert_same_bits(mine[f"{prefix}qkv_proj.weight"], torch.cat(own), f"rank {rank}")


def test_row_56_of_the_field_reports_ranks_that_would_cut_a_head_are_refused(folder):
    with pytest.raises(UnsupportedError, match="tensor parallelism of 8 does not divide"):
        rank_of(folder("qwen3_5"), Meeting(8), 0)


def test_row_55_of_the_field_reports_greedy_tokens_of_ranks_are_those_of_one(folder):
    """Decoded from pages and states, over the end of a chunk; and each step's logprobs."""

    def greedy(model):
        engine, step, chosen, rows = Engine(model, [72]), tokens(58), [], []
        for _ in range(12):
            rows.append(model.logprobs(engine.step({0: step})[-1:]))
            step = rows[-1].argmax(-1)
            chosen += step.tolist()
        return chosen, torch.cat(rows)

    chosen, rows = greedy(alone(folder("qwen3_5")))
    assert len(set(chosen)) > 3
    for mine, own in over(2, folder("qwen3_5"), greedy):
        assert mine == chosen
        assert_same_bits(own, rows)
