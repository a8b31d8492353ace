"""What is measured: one line each. Logs, tables, figures and README take names and units from here.

A name in the logs is NAME or NAME/PART (a sublayer or a matrix); NAME_se is its standard error.
"""

from __future__ import annotations

from typing import NamedTuple


class Quantity(NamedTuple):
    group: str  # what `normstudy probe --what` calls it
    unit: str  # "1": a pure number
    kind: str  # exact (on the batch given), sampled (has a standard error), lower bound
    text: str


# fmt: off
QUANTITIES: dict[str, Quantity] = {
    "probe_loss":            Quantity("stream", "nats", "exact", "loss on the batch"),
    "unigram_kl":            Quantity("stream", "nats", "exact", "KL from letter frequencies to the prediction; 0: the model predicts these and nothing else"),
    "rms":                   Quantity("stream", "1", "exact", "root mean square of x_l"),
    "offset":                Quantity("stream", "1", "exact", "mean of x_l over its channels, over their standard deviation, each as root mean square over positions: what a norm has to subtract"),
    "similarity":            Quantity("stream", "1", "exact", "mean cosine between x_l at different positions of a sequence; 1: all positions look alike"),
    "cosine_to_next":        Quantity("stream", "1", "exact", "mean over positions of the cosine between x_l and x_{l+1}; 1: the block changes no direction"),
    "cosine_to_start":       Quantity("stream", "1", "exact", "mean over positions of the cosine between x_0 and x_l"),
    "norm_factor":           Quantity("stream", "1", "exact", "mean over positions of rms(gain) / sigma in each norm"),
    "branch_share":          Quantity("stream", "1", "exact", "variance of the branch over variance of the (alpha-scaled) skip path at each add"),
    "skip_factor":           Quantity("stream", "1", "exact", "rms of alpha, which multiplies the skip path, where it is learned or another in each layer"),
    "stream_gradient":       Quantity("gradient", "nats", "exact", "Frobenius norm of d loss / d x_l, all layers from one backward pass"),
    "gradient":              Quantity("gradient", "nats", "exact", "Frobenius norm of the loss gradient of each matrix, before any clipping; of the training batch in the logs of a run, of the held-out batch in normstudy probe"),
    "weight":                Quantity("gradient", "1", "exact", "Frobenius norm of each matrix"),
    "jacobian_to_end":       Quantity("jacobian", "1", "sampled", "sqrt(E |J^T v|^2 / (B T D)), J = d x_L / d x_l, v random signs; 1 for the identity"),
    "jacobian_of_block":     Quantity("jacobian", "1", "sampled", "as jacobian_to_end, for J = d x_{l+1} / d x_l"),
    "jacobian_minus_identity": Quantity("jacobian", "1", "sampled", "as jacobian_of_block, for J - 1: how far a block is from the identity; a LayerNorm on the skip path alone gives sqrt(2 / D)"),
    "jacobian_of_sublayer":  Quantity("jacobian", "1", "sampled", "as jacobian_to_end, for J of each sublayer alone"),
    "skip_gain":             Quantity("jacobian", "1", "sampled", "jacobian_to_end with the gradient stopped in every branch: the skip path alone"),
    "skip_gain_cut":         Quantity("skips", "1", "sampled", "jacobian_to_end with the gradient stopped in the attention or in the MLP branches alone"),
    "sigma_max_of_block":    Quantity("spectrum", "1", "lower bound", "largest singular value of d x_{l+1} / d x_l, the largest over the sequences"),
    "sigma_max_to_end":      Quantity("spectrum", "1", "lower bound", "largest singular value of d x_L / d x_l, over all sequences"),
    "sigma_max_of_norm":     Quantity("spectrum", "1", "exact", "largest singular value of each norm's own Jacobian, the largest over 8 positions"),
    "singular_value":        Quantity("singular-values", "1", "exact", "quantiles (max, q90, median, q10, min) of the whole spectrum of a block's Jacobian, first sequence"),
    "stable_rank":           Quantity("singular-values", "1", "exact", "sum of squared singular values over the largest squared; T D for an isometry"),
    "function_update":       Quantity("update", "1", "exact", "relative change of x_l by one update, on the batch that caused it"),
    "logits_update":         Quantity("update", "1", "exact", "relative change of the logits by one update, on the batch that caused it"),
    "sigma_update":          Quantity("update", "1", "exact", "mean over positions of |sigma' / sigma - 1| in each norm"),
    "loss_change":           Quantity("update", "nats", "exact", "actual change of the loss by one update, on the batch that caused it"),
    "loss_change_predicted": Quantity("update", "nats", "exact", "first-order prediction: gradient times update"),
    "loss_change_second":    Quantity("update", "nats", "exact", "second-order prediction: with half the update's curvature"),
    "update":                Quantity("update", "1", "exact", "Frobenius norm of what the optimizer applied to each matrix"),
    "moved":                 Quantity("update", "1", "exact", "share of a matrix's entries that the update changed; below 1 updates get lost to rounding"),
    "sharpness":             Quantity("curvature", "nats", "lower bound", "largest eigenvalue of the loss's Hessian"),
    "sharpness_adam":        Quantity("curvature", "1", "lower bound", "largest eigenvalue of the Hessian H as Adam sees it, P^-1/2 H P^-1/2, P what Adam divides by"),
    "edge_ratio":            Quantity("curvature", "1", "lower bound", "sharpness (Adam's where Adam runs) times learning rate over its threshold, 2 for SGD, (2 + 2 b1) / (1 - b1) for Adam; above 1 a step along that direction overshoots more each time"),
}
# fmt: on

GROUPS = (*dict.fromkeys(quantity.group for quantity in QUANTITIES.values()), "wiring", "finite")


def as_rows() -> list[dict[str, str]]:
    """The table for people."""
    return [
        {
            "name": f"`{name}`",
            "what it is": quantity.text,
            "unit": quantity.unit,
            "kind": quantity.kind,
            "`--what`": quantity.group,
        }
        for name, quantity in QUANTITIES.items()
    ]


def of(name: str) -> Quantity:
    """The quantity behind a name in the logs. Raises KeyError for a name that has no line here."""
    return QUANTITIES[split(name)[0]]


def split(name: str) -> tuple[str, str]:
    """(name in the table, part): NAME, NAME_NORM/SUBLAYER or NAME/PART, e.g. ("norm_factor",
    "post/attn"). Raises KeyError for a name that has no line here.
    """
    base, _, part = name.partition("/")
    known = [own for own in QUANTITIES if base == own or base.startswith(f"{own}_")]
    if not known:
        raise KeyError(f"{name} has no line in quantities.py")
    own = max(known, key=len)
    return own, "/".join(word for word in (base[len(own) + 1 :], part) if word)
