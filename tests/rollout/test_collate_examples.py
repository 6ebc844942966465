"""Examples of fixed data as a flat batch."""

import torch
from fixtures.batches import sequences_of
from fixtures.models import random_model
from hypothesis import given, settings
from hypothesis import strategies as st

from trl.models.forward import token_logps
from trl.rollout.collate import SHARED_TOKENS, Example, collate_examples

CPU = torch.device("cpu")
LONG = [10 + i % 40 for i in range(SHARED_TOKENS)]


def collated(*examples):
    return collate_examples(examples, CPU)


def test_prompts_completions_and_masks_stand_one_after_the_other():
    batch = collated(Example([7, 8], [9, 10, 11], [True, False, True]), Example([12], [13]))
    assert batch.prompt_ids.tolist() == [7, 8, 12]
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert batch.prompt_of_seq.tolist() == [0, 1]
    assert batch.completion_ids.tolist() == [9, 10, 11, 13]
    assert batch.completion_lengths.tolist() == [3, 1]
    assert batch.loss_mask.tolist() == [True, False, True, True]
    assert batch.unit_of_seq is None


def test_long_prompts_are_stored_once_and_short_ones_for_each():
    batch = collated(*(Example(LONG, [i]) for i in (7, 8)), Example(LONG[1:], [9]), Example(LONG[1:], [10]))
    assert batch.prompt_of_seq.tolist() == [0, 0, 1, 2]
    assert batch.prompt_lengths.tolist() == [SHARED_TOKENS, SHARED_TOKENS - 1, SHARED_TOKENS - 1]
    assert [prompt for prompt, _ in sequences_of(batch)] == [LONG, LONG, LONG[1:], LONG[1:]]


def test_prompts_are_shared_between_examples_that_are_apart():
    other = [*LONG[:-1], 7]
    batch = collated(Example(LONG, [7]), Example(other, [8]), Example([9], [10]), Example(LONG, [11]))
    assert batch.prompt_of_seq.tolist() == [0, 1, 2, 0]


def test_units_are_kept():
    batch = collated(Example([7], [8], unit=0), Example([7], [9], unit=0), Example([10], [11], unit=1))
    assert batch.unit_of_seq.tolist() == [0, 0, 1]


def test_any_iterable_serves_and_an_empty_completion_stays():
    batch = collate_examples((Example([7], ids) for ids in ([], [8])), CPU)
    assert batch.completion_lengths.tolist() == [0, 1]
    assert batch.loss_mask.tolist() == [True]


ids = st.integers(7, 63)
prompts = st.one_of(st.lists(ids, min_size=1, max_size=3), st.sampled_from([LONG, [*LONG, 50], LONG[:-1]]))
examples = st.lists(st.tuples(prompts, st.lists(ids, min_size=1, max_size=4)), min_size=1, max_size=5)


@given(examples)
def test_nothing_is_lost(pairs):
    batch = collated(*(Example(list(p), c) for p, c in pairs))
    assert sequences_of(batch) == [(list(p), c) for p, c in pairs]


@settings(max_examples=15, deadline=None)
@given(examples)
def test_packed_and_padded_rows_have_the_same_log_probs_as_each_alone(pairs):
    model = random_model(packed=True)
    batch = collated(*(Example(list(p), c) for p, c in pairs))
    with torch.no_grad():
        packed, padded = (token_logps(model, batch, packed=layout).logps for layout in (True, False))
        alone = [
            model(torch.tensor([[*p, *c]])).logits[0, len(p) - 1 : -1].log_softmax(-1)[range(len(c)), c]
            for p, c in pairs
        ]
    torch.testing.assert_close(packed, torch.cat(alone), atol=2e-4, rtol=1e-5)
    torch.testing.assert_close(padded, torch.cat(alone), atol=2e-4, rtol=1e-5)
