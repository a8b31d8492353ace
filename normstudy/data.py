"""Batches as a function of (seed, step): the step is the only state."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import grain
import numpy as np

from normstudy import config, corpus
from normstudy.errors import UserError


@runtime_checkable
class Batches(Protocol):
    """What a run reads its batches from: [step], for any step."""

    def __getitem__(self, step: int) -> np.ndarray: ...


class Feed(NamedTuple):
    """All that a run reads: its text, in order, and what is known of it beforehand."""

    text: corpus.Corpus
    unigram: np.ndarray  # frequencies of the training split, (V,) float32
    h1: float  # unigram entropy of the training split, nats
    batches: Batches  # [step] -> (B, T + 1) int32
    held_out: Batches  # the same from the validation split
    probe_batch: np.ndarray  # the fixed sequences that every probe of every arm sees


def feed(run: config.Run) -> Feed:
    """The feed of a run. Raises UserError for a corpus that is missing, damaged or too short."""
    text = corpus.load(run.data.corpus)
    train, val = text.split(run.data.val_fraction)
    unigram = corpus.unigram(train, run.model.vocab)

    def take(tokens: np.ndarray, batch: int) -> Batches:
        return batches(tokens, run.model.context, batch, run.data.data_seed, run.model.vocab)

    return Feed(
        text,
        unigram.astype(np.float32),
        corpus.entropy(unigram),
        take(train, run.data.batch),
        take(val, run.data.batch),
        take(val, run.probe.probe_batch)[0],
    )


class Windows(grain.sources.RandomAccessDataSource):
    """Windows of context + 1 tokens, one after the other; neighbours share one token."""

    def __init__(self, tokens: np.ndarray, context: int):
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> np.ndarray:  # type: ignore[override]
        start = int(index) * self.context
        return self.tokens[start : start + self.context + 1].astype(np.int32)

    def __repr__(self) -> str:
        return f"Windows(tokens={len(self.tokens)}, context={self.context})"


def batches(tokens: np.ndarray, context: int, batch: int, seed: int, vocab: int) -> Batches:
    """An endless grain MapDataset: [step] is an int32 array (batch, context + 1).

    Raises UserError when the text is shorter than one batch, or holds a token outside the vocab.
    """
    source = Windows(tokens, context)
    if len(source) < batch:
        raise UserError(
            f"the text has {len(tokens)} tokens: too few for a batch of {batch} windows of "
            f"{context + 1}; lower --batch or --context, or give a longer text"
        )
    if int(tokens.max()) >= vocab:
        raise UserError(f"the text holds token {int(tokens.max())}; raise --vocab above it")
    dataset: Any = grain.MapDataset.source(source).seed(seed).shuffle().repeat().batch(batch)
    return dataset
