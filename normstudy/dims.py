"""The letters. The same ones stand in names, einsums and types everywhere.

    B  batch (sequences)          H  heads
    T  time (positions)           K  head size, D = H * K
    D  stream width               F  feed-forward width
    V  vocabulary                 L  layers = blocks (attention + MLP); 2L sublayers
    S  streams, L + 1: x_0..x_L

Papers count "layers" differently; where a formula enters, the code says which count it takes.
Stream x_l is the input of block l, l = 0..L-1; x_L is the output of the last block, before any
final norm.
"""

from jaxtyping import Array, Float, Int

Stream = Float[Array, "B T D"]
Streams = Float[Array, "S B T D"]
Tokens = Int[Array, "B T"]
Logits = Float[Array, "B T V"]
