"""Places of numbers in the kernels' partial results, and the limits of their arithmetic.

Kernels read these as ``tl.constexpr``. The numbers of fields follow from the fields, and the host, which makes room
for them, reads the same numbers as integers.
"""

from __future__ import annotations

import triton.language as tl

NOWHERE = tl.constexpr(2147483647)  # an index beyond every key
LOWEST = tl.constexpr(-1.0e30)  # a running maximum's start: finite, so that 0 * LOWEST is 0
INFINITY = tl.constexpr(float("inf"))

TINY = tl.constexpr(1e-37)  # least divisor
LEAST_NORMAL = tl.constexpr(1.1754944e-38)  # of float32
LEAST_LOG = tl.constexpr(1e-12)  # least divisor of an entropy; the logarithm of one outcome is 0

# The eigenvalue's secular equation; Lambda is its root.
FIRST_STEPS = tl.constexpr(4)  # from the middle of the root's interval, the tail as one pole
MORE_STEPS = tl.constexpr(3)  # from the first estimate, with the tail's true sums
JUST_ABOVE = tl.constexpr(1.00000012)  # the float32 after 1
LIFT = tl.constexpr(1e-30)  # keeps a number above weights that are all 0
LEAST_GAP = tl.constexpr(1e-12)  # of 1 - e_2
LEAST_DEPTH = tl.constexpr(-100.0)  # of log e_2: below, 1 - e_2 is 1, and an empty slot's is -inf
MAX_SINK = tl.constexpr(1e17)  # of e_s; Lambda is 1 in float32 long before, and squares must not overflow

# A sink's logit minus the largest key's, held where exp neither overflows nor is missed.
LEAST_SINK_LEAD = tl.constexpr(-1e4)
MAX_SINK_LEAD = tl.constexpr(80.0)

EXPONENT_LIMIT = tl.constexpr(40.0)  # larger moves would overflow the squares of ``P_MOVE_SQUARE``
LEAST_SHARE = tl.constexpr(0.05)  # of the largest key's growth 1 + E under a move: with less, 1 + E cancels
CANCELS = tl.constexpr(1e-2)  # of D^2 / |s|^2: below, a distance D keeps more digits than its excess over |s|

# Fields of a sampled row, as ``host.row_table`` orders them.
T_POSITION = tl.constexpr(0)
T_LOW = tl.constexpr(1)  # first visible key
T_HIGH = tl.constexpr(2)  # one past the last visible key
T_FIRST = tl.constexpr(3)  # the sequence's first key
T_DIRECTION = tl.constexpr(4)  # place of the row's direction in the table

# Columns of the accumulator that count a head's rows, as ``Packing`` orders them.
A_VALID = tl.constexpr(0)
A_MASKED = tl.constexpr(2)
A_NONFINITE = tl.constexpr(3)

# Fields of a row's partial results, as ``select`` leaves them for each split; all float32.
S_MAX = tl.constexpr(0)  # largest logit m
S_TAIL = tl.constexpr(1)  # sum of e = exp(z - m) over keys beyond the split's K largest
S_TAIL_SQUARE = tl.constexpr(2)  # sum of e^2 over those keys
S_TAIL_DOT = tl.constexpr(3)  # sum of e (z - m) over those keys
S_COUNT = tl.constexpr(4)  # visible keys
S_MEAN = tl.constexpr(5)  # mean of z - m over the visible keys
S_SQUARES = tl.constexpr(6)  # sum of squared differences of z - m from S_MEAN
S_FIRST = tl.constexpr(7)  # logit of the sequence's first key, -inf if it is not in the split
S_NORM = tl.constexpr(8)  # sum of squares of the direction
S_FARTHEST = tl.constexpr(9)  # largest entry of the direction
S_UNCAPPED = tl.constexpr(10)  # largest logit without softcap
S_BAD = tl.constexpr(11)  # 1 if a visible logit is not finite

# Fields of a row's partial results, as ``spread`` leaves them for each split; sums run over keys beyond the row's K
# largest. All float32.
P_RATIO = tl.constexpr(0)  # sum of r = e / (Lambda - e), Lambda the eigenvalue's estimate
P_RATIO_SQUARE = tl.constexpr(1)  # sum of r^2
P_MOVE = tl.constexpr(2)  # sum of e y, y the relative change of e against that of the largest key
P_MOVE_E = tl.constexpr(3)  # sum of e^2 y
P_MOVE_SQUARE = tl.constexpr(4)  # sum of e^2 y^2
P_FAR = tl.constexpr(5)  # sum of distances to s; NaN if a visible key's token vector is not finite
P_LEAST = tl.constexpr(6)  # least excess of a squared distance over |s|^2
P_LEAST_E = tl.constexpr(7)  # e of the key with the least excess
P_MOVED_MAX = tl.constexpr(8)  # largest moved logit, where the step is so large that exp of it overflows
P_MOVED = tl.constexpr(9)  # sum of moved weights w, relative to exp of P_MOVED_MAX
P_MOVED_SQUARE = tl.constexpr(10)  # sum of w^2
P_MOVED_E = tl.constexpr(11)  # sum of w e

# Fields of a row's record, all its splits merged; all float32.
R_MAX = tl.constexpr(0)  # largest logit m
R_COUNT = tl.constexpr(1)  # visible keys
R_BAD = tl.constexpr(2)  # 1 if a visible logit is not finite
R_STD = tl.constexpr(3)  # standard deviation of the logits
R_OTHERS = tl.constexpr(4)  # sum of e over all keys but the largest
R_DOT = tl.constexpr(5)  # sum of e (z - m) over all keys
R_FIRST = tl.constexpr(6)  # e of the sequence's first key
R_TOP = tl.constexpr(7)  # sum of the N largest e
R_UNCAPPED = tl.constexpr(8)  # largest logit without softcap
R_TAIL_SQUARE = tl.constexpr(9)  # sum of e^2 over keys beyond the K largest
R_MU = tl.constexpr(10)  # Lambda - e_2
R_STEP = tl.constexpr(11)  # what a direction's entries are multiplied by
R_DIRECTION = tl.constexpr(12)  # the direction's entry at the largest key
R_REACH = tl.constexpr(13)  # largest move of a key relative to the largest key's
R_S_SQUARE = tl.constexpr(14)  # |s|^2
R_BROKEN = tl.constexpr(15)  # 1 if a token vector among the K largest is not finite
R_SECOND = tl.constexpr(16)  # e_2


def _number_of(prefix: str) -> int:
    """How many fields have this prefix; their places are 0, 1, ... without a gap."""
    places = sorted(int(field.value) for name, field in globals().items() if name.startswith(prefix))
    assert places == list(range(len(places))), f"two fields {prefix}... share a place, or one is empty"
    return len(places)


SELECT_FIELDS = _number_of("S_")
SPREAD_FIELDS = _number_of("P_")
RECORD_FIELDS = _number_of("R_")
S_FIELDS = tl.constexpr(SELECT_FIELDS)
P_FIELDS = tl.constexpr(SPREAD_FIELDS)
