"""Sequences laid beside each other."""

from tasks.models.batching import right_padded


def test_right_padding_by_hand():
    ids, valid = right_padded([(5, 6, 7), (8,), (0, 0)])
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0], [0, 0, 0]]
    assert valid.tolist() == [[True] * 3, [True, False, False], [True, True, False]]
