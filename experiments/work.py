"""What one training step has to compute, in floating-point operations."""

from __future__ import annotations

from normstudy import config


def matmul_flops(run: config.Run) -> int:
    """Of one step: a multiplication and an addition for each entry of the matrices and each token,
    once forward and twice backward, for the gradients of inputs and of weights. The embedding is
    looked up, and the core of attention (queries by keys, weights by values) is left out."""
    shape = run.model
    layer = 4 * shape.width**2 + 2 * shape.width * shape.ff
    entries = shape.layers * layer + shape.width * shape.vocab
    return 6 * entries * run.data.batch * shape.context


def attention_flops(run: config.Run) -> int:
    """Of the core of attention in one step, every position by every other, as though not causal.
    Source: PaLM, Chowdhery et al. 2022 (2204.02311), appendix B."""
    shape = run.model
    return 12 * shape.layers * shape.width * shape.context * run.data.batch * shape.context
