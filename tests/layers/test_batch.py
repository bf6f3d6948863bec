import dataclasses

import pytest
import torch

from isomodels.batch import Batch


def cu_seqlens(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def test_packed_sequences():
    batch = Batch.packed(cu_seqlens(3, 0, 5))
    assert batch.cu_seqlens_q.tolist() == [0, 3, 3, 8]
    assert batch.seq_lens.tolist() == [3, 0, 5]
    assert batch.cu_seqlens_q.dtype == batch.seq_lens.dtype == torch.int32
    assert (batch.max_seqlen_q, batch.max_seqlen_k, batch.paged) == (5, 5, None)


def test_positions_start_again_with_each_sequence():
    positions = Batch.positions(cu_seqlens(3, 0, 1, 2))
    assert positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert positions.dtype == torch.int64


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_no_tokens(lengths):
    assert Batch.packed(cu_seqlens(*lengths)).max_seqlen_q == 0
    assert Batch.positions(cu_seqlens(*lengths)).shape == (0,)


def test_a_batch_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Batch.packed(cu_seqlens(1)).max_seqlen_q = 2
