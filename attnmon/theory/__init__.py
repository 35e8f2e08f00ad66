"""The paper's statements on weights and vectors of any model: what is true, what it comes to, and what is false.

"The paper" is "Limitations of Normalization in Attention Mechanism" (arXiv 2508.17821). Every function says whether
its statement is true, empirical or false as printed; ``attnmon.theory.audit`` lists them all.
"""

from attnmon.theory.bounds import entropy_bounds, weight_bounds
from attnmon.theory.critical import critical_n, critical_ns, ks_test
from attnmon.theory.expectation import (
    expected_distance,
    expected_distance_limit,
    expected_distance_monte_carlo,
    expected_distance_residual,
)
from attnmon.theory.geometry import distance, distance_bound, top_n_distance
from attnmon.theory.head import HeadGeometry, head_geometry
from attnmon.theory.jacobian import (
    eigenvalue_estimates,
    entry_bound,
    finite_difference,
    finite_difference_bound,
    frobenius_norm,
    infinity_norm,
    largest_entry,
    norm_bound,
    paper_expression,
    row_directions,
    spectral_norm,
)
from attnmon.theory.separation import Separation, separability

__all__ = [
    "HeadGeometry",
    "Separation",
    "critical_n",
    "critical_ns",
    "distance",
    "distance_bound",
    "eigenvalue_estimates",
    "entropy_bounds",
    "entry_bound",
    "expected_distance",
    "expected_distance_limit",
    "expected_distance_monte_carlo",
    "expected_distance_residual",
    "finite_difference",
    "finite_difference_bound",
    "frobenius_norm",
    "head_geometry",
    "infinity_norm",
    "ks_test",
    "largest_entry",
    "norm_bound",
    "paper_expression",
    "row_directions",
    "separability",
    "spectral_norm",
    "top_n_distance",
    "weight_bounds",
]
