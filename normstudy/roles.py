"""What every parameter is: one line each. Init, decay, sharding and logs all ask this table.

Rules go by role, never by the number of dimensions: stacked layers give a norm's scale two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Role(NamedTuple):
    fan: tuple[str, str] | None  # (in, out) letters of a matrix in dims.py; None for a vector
    branch: bool  # lies on a residual branch: takes the init gain
    beta: bool  # takes the placement's beta (DeepNet: V, O and both MLP matrices, not Q, K)
    out: bool  # last matrix of its branch: takes 1/sqrt(2L) where that is asked for
    decay: bool  # takes weight decay
    split: int | None  # the dimension that tensor parallelism may divide


# fmt: off
ROLES: dict[str, Role] = {
    #                     fan          branch  beta    out     decay   split
    "embed":     Role(("V", "D"),      False,  False,  False,  False,  -2),
    "positions": Role(("T", "D"),      False,  False,  False,  False,  None),
    "q":         Role(("D", "D"),      True,   False,  False,  True,   -1),
    "k":         Role(("D", "D"),      True,   False,  False,  True,   -1),
    "v":         Role(("D", "D"),      True,   True,   False,  True,   -1),
    "o":         Role(("D", "D"),      True,   True,   True,   True,   -2),
    "up":        Role(("D", "F"),      True,   True,   False,  True,   -1),
    "down":      Role(("F", "D"),      True,   True,   True,   True,   -2),
    "readout":   Role(("D", "V"),      False,  False,  False,  True,   -1),
    "scale":     Role(None,            False,  False,  False,  False,  None),
    "bias":      Role(None,            False,  False,  False,  False,  None),
    "slope":     Role(None,            False,  False,  False,  False,  None),  # of DyT
    "gain":      Role(None,            False,  False,  False,  False,  None),  # of an equation
}
# fmt: on

OF_NORMS = ("scale", "bias", "slope")
BRANCH_MATRICES = tuple(name for name, role in ROLES.items() if role.branch)


def role_of(path: Iterable[str]) -> str:
    """Name of the role of the parameter at a tree path such as ("layers", "attn", "q").

    Raises KeyError when no part of the path names a role: a new parameter needs a row.
    """
    names = list(path)
    for name in reversed(names):
        if name in ROLES:
            return name
    raise KeyError(f"no role for the parameter {'/'.join(names)}: add a row to roles.py")
