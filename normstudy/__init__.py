"""normstudy: why deep post-norm transformers die, measured layer by layer."""

__version__ = "0.1.0"
