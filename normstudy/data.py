"""Batches as a function of (seed, step): the step is the only state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from normstudy.errors import UserError


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


def batches(
    tokens: np.ndarray, context: int, batch: int, seed: int, vocab: int
) -> Sequence[np.ndarray]:
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
