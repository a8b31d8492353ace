"""Batches are a function of seed and step, and each window comes once an epoch."""

import numpy as np
import pytest
import tiny

from normstudy import data
from normstudy.errors import UserError

TOKENS = np.arange(201, dtype=np.uint16)  # 25 windows of 8 + 1: the first token names the window


def batches(batch: int = 4, seed: int = 0, tokens: np.ndarray = TOKENS, vocab: int = 256):
    return data.batches(tokens, 8, batch, seed, vocab)


def windows(steps: range, **kwargs) -> np.ndarray:
    """First tokens of the windows of these steps, in order."""
    feed = batches(**kwargs)
    return np.concatenate([feed[step][:, 0] for step in steps])


def test_batch_is_int32_of_context_plus_one_neighbouring_tokens():
    batch = batches()[3]
    assert batch.shape == (4, 9) and batch.dtype == np.int32
    np.testing.assert_array_equal(batch, batch[:, :1] + np.arange(9))
    assert (batch[:, 0] % 8 == 0).all()


def test_batch_depends_on_seed_and_step_alone():
    feed = batches(seed=3)
    forwards = [feed[step].copy() for step in range(20)]
    again = batches(seed=3)
    for step in (19, 0, 7, 7, 12):  # any order, from a new object
        np.testing.assert_array_equal(again[step], forwards[step])


def test_every_window_comes_exactly_once_an_epoch():
    for epoch in range(3):  # 25 windows, batches of 5
        found = windows(range(5 * epoch, 5 * epoch + 5), batch=5)
        np.testing.assert_array_equal(np.sort(found), np.arange(0, 200, 8))


def test_every_window_comes_once_an_epoch_where_the_batch_does_not_divide_it():
    found = windows(range(25), batch=4)  # 100 windows: four epochs
    for epoch in range(4):
        own = found[25 * epoch : 25 * epoch + 25]
        np.testing.assert_array_equal(np.sort(own), np.arange(0, 200, 8))


def test_epochs_come_in_another_order():
    assert (windows(range(5), batch=5) != windows(range(5, 10), batch=5)).any()


def test_other_seed_gives_another_order():
    assert (windows(range(5), seed=0) != windows(range(5), seed=1)).any()


def test_windows_cover_the_text_and_share_one_token():
    source = data.Windows(TOKENS, 8)
    assert len(source) == 25
    for i in range(24):
        assert source[i][-1] == source[i + 1][0]
    assert source[0][0] == 0 and source[24][-1] == 200


def test_text_of_exactly_one_batch_is_enough_and_one_token_less_is_not():
    assert batches(tokens=TOKENS[: 4 * 8 + 1])[0].shape == (4, 9)
    with pytest.raises(UserError, match="too few for a batch of 4 windows of 9"):
        batches(tokens=TOKENS[: 4 * 8])


def test_token_outside_the_vocabulary_is_refused_by_its_number():
    batches(vocab=201)
    with pytest.raises(UserError, match="token 200; raise --vocab above it"):
        batches(vocab=200)


def test_probe_batch_of_all_arms_is_the_same_and_held_out():
    a = data.feed(tiny.run())
    b = data.feed(tiny.run(seed=5, lr=0.5, placement="pre"))
    np.testing.assert_array_equal(a.probe_batch, b.probe_batch)
    _, val = a.text.split(0.05)
    assert a.probe_batch[0].astype(np.uint8).tobytes() in val.tobytes()
    assert a.unigram.dtype == np.float32
    np.testing.assert_allclose(a.unigram.sum(), 1, rtol=1e-6)


def test_held_out_text_too_short_for_the_probe_batch_is_refused(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"x" * 2000)  # 100 held out: 12 windows
    with pytest.raises(UserError, match="too few for a batch of 16"):
        data.feed(tiny.run(corpus=str(path), probe_batch=16))
    data.feed(tiny.run(corpus=str(path)))
