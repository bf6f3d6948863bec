"""What Megatron may hand to forward and the model cannot honour is refused, never ignored."""

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.packed_seq_params import PackedSeqParams

from isomodels.errors import UnsupportedError
from isomodels.megatron import Trainer
from isomodels.megatron.inputs import read_tokens
from isomodels.megatron.packing import pack

IDS = torch.arange(12).view(2, 6)


def thd(*bounds: int, **more) -> PackedSeqParams:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    return PackedSeqParams(
        **{"qkv_format": "thd", "cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens} | more
    )


def test_positions_of_packed_sequences_restart():
    tokens = read_tokens(IDS.view(1, 12), None, None, thd(0, 5, 5, 12), 64)
    assert tokens.positions.tolist() == [*range(5), *range(7)]
    assert tokens.batch.seq_lens.tolist() == [5, 0, 7]


@pytest.mark.parametrize("batch", [1, 2])
def test_causal_mask_and_plain_positions_are_taken(batch):
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1).expand(batch, 1, 6, 6)
    tokens = read_tokens(IDS, torch.arange(6)[None], causal, None, 64)
    assert tokens.positions.tolist() == [*range(6), *range(6)]


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(2, 1, 6, 6, dtype=torch.bool),
        torch.ones(2, 6, dtype=torch.bool),
        torch.ones(2, 1, 6, 6).triu(1),
    ],
    ids=["bidirectional", "padding", "float"],
)
def test_other_masks_are_refused(mask):
    with pytest.raises(UnsupportedError, match="attention_mask must be None or the causal mask"):
        read_tokens(IDS, None, mask, None, 64)


def test_left_padded_positions_are_refused():
    positions = torch.tensor([[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    with pytest.raises(UnsupportedError, match="position_ids must count"):
        read_tokens(IDS, positions, None, None, 64)


def test_a_mask_beside_packed_sequences_is_refused():
    with pytest.raises(UnsupportedError, match="attention_mask must be None for packed"):
        read_tokens(IDS.view(1, 12), None, torch.ones(1, 1, 12, 12) > 0, thd(0, 12), 64)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (thd(0, 5, 11), ValueError, "bounds from 0 to T"),
        (thd(1, 12), ValueError, "bounds from 0 to T"),
        (thd(0, 7, 5, 12), ValueError, "must not decrease"),
        (thd(0, 12, qkv_format="sbhd"), UnsupportedError, "thd"),
        (PackedSeqParams(qkv_format="thd"), ValueError, "neither"),
    ],
)
def test_bad_bounds_are_refused(params, error, message):
    with pytest.raises(error, match=message):
        read_tokens(IDS.view(1, 12), None, None, params, 64)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"cu_seqlens_kv": torch.tensor([0, 12], dtype=torch.int32)}, "cu_seqlens_kv"),
        (
            {
                "cu_seqlens_q_padded": torch.tensor([0, 6, 12], dtype=torch.int32),
                "cu_seqlens_kv_padded": torch.tensor([0, 8, 12], dtype=torch.int32),
            },
            "cu_seqlens_kv",
        ),
        ({"local_cp_size": 2}, "local_cp_size 2"),
    ],
)
def test_keys_of_other_sequences_are_refused(more, named):
    params = thd(0, 5, 12)
    for name, value in more.items():  # some versions have not all of them
        setattr(params, name, value)
    with pytest.raises(UnsupportedError, match=named):
        read_tokens(IDS.view(1, 12), None, None, params, 64)


def test_keys_may_have_bounds_of_their_own_with_the_same_values():
    same = torch.tensor([0, 5, 12], dtype=torch.int64)
    tokens = read_tokens(IDS.view(1, 12), None, None, thd(0, 5, 12, cu_seqlens_kv=same), 64)
    assert tokens.batch.seq_lens.tolist() == [5, 7]


def test_packed_ids_must_be_one_row():
    with pytest.raises(ValueError, match=r"\[1, T\]"):
        read_tokens(IDS, None, None, thd(0, 6), 64)


@pytest.mark.parametrize("params", [None, thd(0, 12)])
def test_longer_than_the_model_is_refused(params):
    with pytest.raises(UnsupportedError, match="longer than max_position_embeddings = 11"):
        read_tokens(IDS.view(1, 12), None, None, params, 11)


def test_arguments_of_forward_that_have_no_meaning_here(checkpoint):
    with Trainer(checkpoint("qwen3", "fp32"), dtype=torch.float32) as trainer:
        for name in ("decoder_input", "inference_context", "inference_params", "padding_mask"):
            with pytest.raises(UnsupportedError, match=name):
                trainer.model(IDS, **{name: torch.zeros(1)})
        with pytest.raises(UnsupportedError, match="extra_block_kwargs"):
            trainer.model(IDS, extra_block_kwargs={"x": 1})
        with pytest.raises(UnsupportedError, match="pipeline"):
            trainer.model.set_input_tensor([torch.zeros(1)])
        with pytest.raises(IndexError, match="outside the vocabulary"):
            trainer.model(IDS, labels=torch.full_like(IDS, -100))


def test_packs_keep_order_and_respect_the_limit():
    packs = pack([[1, 2, 3], [4], [5, 6, 7, 8, 9], [1]], 4)
    assert [one.bounds for one in packs] == [[(0, 3), (3, 4)], [(0, 5)], [(0, 1)]]
    assert packs[0].targets.tolist() == [[2, 3, 0, 0]]
    assert packs[0].keep.tolist() == [True, True, False, False]
    with pytest.raises(ValueError, match="at least one token"):
        pack([[]], 4)
