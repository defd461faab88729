"""Orders, micro-batches, padding, and a stream of prompts that can be taken up again."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastrlhf.data.batching import PromptStream, epoch_order, micro_batches, pad_right


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_epoch_order_is_randperm():
    assert epoch_order(100, generator(3)) == torch.randperm(100, generator=generator(3)).tolist()
    g = generator(3)
    assert epoch_order(100, g) != epoch_order(100, g)


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 600))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths, tokens):
    batches = micro_batches(lengths, tokens)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= tokens
    flat = [lengths[i] for b in batches for i in b]
    assert flat == sorted(flat)
    # Greedy: the first row of a batch did not fit into the one before.
    for before, batch in itertools.pairwise(batches):
        assert (len(before) + 1) * lengths[batch[0]] > tokens
    assert batches == micro_batches(list(lengths), tokens)


def test_micro_batches_ties_and_rows_above_the_budget():
    assert micro_batches([5, 5, 5], 10) == [[0, 1], [2]]
    assert micro_batches([50, 3, 60, 3], 10) == [[1, 3], [0], [2]]
    assert micro_batches([], 10) == []


def test_pad_right():
    rows = [np.array([1, 2, 3], dtype=np.int32), np.array([], dtype=np.int32), np.array([4], dtype=np.int32)]
    out = pad_right(rows, fill=9)
    assert out.dtype == torch.int64 and out.tolist() == [[1, 2, 3], [9, 9, 9], [4, 9, 9]]
    assert pad_right(rows, 5).tolist() == [[1, 2, 3, 0, 0], [0] * 5, [4, 0, 0, 0, 0]]
    assert pad_right([]).shape == (0, 0) and pad_right([], 4).shape == (0, 4)
    with pytest.raises(ValueError, match="row 0 has 3 ids, more than length 2"):
        pad_right(rows, 2)


def test_a_stream_passes_over_every_prompt_before_any_comes_again():
    stream = PromptStream(7, generator())
    taken = [i for _ in range(7) for i in stream.take(5)]
    passes = [taken[k : k + 7] for k in range(0, 35, 7)]
    assert all(sorted(p) == list(range(7)) for p in passes)
    assert len({tuple(p) for p in passes}) > 1


def test_taking_more_than_a_pass_at_once():
    stream = PromptStream(3, generator())
    taken = stream.take(10)
    assert all(sorted(taken[k : k + 3]) == [0, 1, 2] for k in (0, 3, 6))
    again = PromptStream(3, generator())
    assert [again.take(1)[0] for _ in range(10)] == taken
    assert stream.take(0) == []


@pytest.mark.parametrize("taken", [0, 1, 6, 7, 8, 30])
def test_a_stream_goes_on_exactly_where_it_was_saved(taken):
    g = generator(5)
    stream = PromptStream(7, g)
    stream.take(taken)
    saved, random = json.loads(json.dumps(stream.state_dict())), g.get_state()
    ahead = stream.take(40)
    g2 = generator(99)
    resumed = PromptStream(7, g2)
    resumed.take(3)
    g2.set_state(random)
    resumed.load_state_dict(saved)
    assert resumed.take(40) == ahead
    assert saved["position"] <= 7  # the saved state was not changed by what followed


def test_a_stream_refuses_another_number_of_prompts_and_none():
    state = PromptStream(3, generator()).state_dict()
    with pytest.raises(ValueError, match="3 prompts, now there are 4"):
        PromptStream(4, generator()).load_state_dict(state)
    with pytest.raises(ValueError, match="at least one"):
        PromptStream(0, generator())
