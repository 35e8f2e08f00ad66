"""Places of numbers in the kernels' partial results, and limits that several kernels share."""

from __future__ import annotations

import triton.language as tl

NOWHERE = tl.constexpr(2147483647)  # beyond every key
LOWEST = tl.constexpr(-1.0e30)  # a running maximum's start: finite, so that 0 * LOWEST is 0
INFINITY = tl.constexpr(float("inf"))

TINY = tl.constexpr(1e-37)  # least divisor
LEAST_NORMAL = tl.constexpr(1.1754944e-38)  # of float32
JUST_ABOVE = tl.constexpr(1.00000012)  # the float32 after 1

# Fields of a sampled row, as ``host.row_table`` orders them.
T_POSITION = tl.constexpr(0)
T_LOW = tl.constexpr(1)  # first visible key
T_HIGH = tl.constexpr(2)  # one past the last
T_FIRST = tl.constexpr(3)  # the sequence's first key
T_DIRECTION = tl.constexpr(4)  # place of the row's direction in the table

# Fields of a row's partial results, as ``select`` leaves them for each split; all float32.
S_MAX = tl.constexpr(0)  # largest logit m
S_TAIL = tl.constexpr(1)  # sum of e = exp(z - m) over keys beyond the split's K largest
S_TAIL_SQUARE = tl.constexpr(2)  # sum of e^2
S_TAIL_DOT = tl.constexpr(3)  # sum of e (z - m)
S_COUNT = tl.constexpr(4)  # visible keys
S_MEAN = tl.constexpr(5)  # of z - m over them
S_SQUARES = tl.constexpr(6)  # sum of squared differences from the mean
S_FIRST = tl.constexpr(7)  # logit of the sequence's first key, -inf if it is not here
S_NORM = tl.constexpr(8)  # sum of squares of the direction
S_FARTHEST = tl.constexpr(9)  # its largest entry
S_UNCAPPED = tl.constexpr(10)  # largest logit without softcap
S_BAD = tl.constexpr(11)  # 1 if a visible logit is not finite
S_FIELDS = tl.constexpr(12)  # how many; the host reads ``.value``

# ... and of ``spread``; sums run over keys beyond the row's K largest.
P_RATIO = tl.constexpr(0)  # sum of e / (Lambda - e), Lambda the eigenvalue's estimate
P_RATIO_SQUARE = tl.constexpr(1)
P_MOVE = tl.constexpr(2)  # sum of e y, y the relative change of e against that of the largest key
P_MOVE_E = tl.constexpr(3)  # sum of e^2 y
P_MOVE_SQUARE = tl.constexpr(4)  # sum of e^2 y^2
P_FAR = tl.constexpr(5)  # sum of distances to s; NaN if a visible key's token vector is not finite
P_LEAST = tl.constexpr(6)  # least excess of a squared distance over |s|^2
P_LEAST_E = tl.constexpr(7)  # e of that key
P_MOVED_MAX = tl.constexpr(8)  # of a step so large that exp of it overflows: largest moved logit
P_MOVED = tl.constexpr(9)  # sum of moved weights, relative to that
P_MOVED_SQUARE = tl.constexpr(10)
P_MOVED_E = tl.constexpr(11)  # sum of moved weight times e
P_FIELDS = tl.constexpr(12)

# Fields of a merged row.
R_MAX = tl.constexpr(0)
R_COUNT = tl.constexpr(1)
R_BAD = tl.constexpr(2)
R_STD = tl.constexpr(3)
R_OTHERS = tl.constexpr(4)  # sum of e over all keys but the largest
R_DOT = tl.constexpr(5)  # sum of e (z - m) over all keys
R_FIRST = tl.constexpr(6)  # e of the first key
R_TOP = tl.constexpr(7)  # sum of the N largest e
R_UNCAPPED = tl.constexpr(8)
R_TAIL = tl.constexpr(9)
R_TAIL_SQUARE = tl.constexpr(10)
R_MU = tl.constexpr(11)  # Lambda - e_2
R_STEP = tl.constexpr(12)  # what a direction's entries are multiplied by
R_DIRECTION = tl.constexpr(13)  # the direction's entry at the largest key
R_REACH = tl.constexpr(14)  # largest move of a key relative to the largest key's
R_S_SQUARE = tl.constexpr(15)  # |s|^2
R_BROKEN = tl.constexpr(16)
R_SECOND = tl.constexpr(17)  # e_2
R_FIELDS = tl.constexpr(18)

EXPONENT_LIMIT = tl.constexpr(40.0)  # larger moves would overflow the squares of ``P_MOVE_SQUARE``
MAX_SINK_LEAD = tl.constexpr(80.0)  # of a sink's logit over the largest key's; exp of more overflows
