"""Every statement of the paper (arXiv 2508.17821): true, empirical or false as printed, why, and which test holds it.

``docs/audit.md`` is ``render()``; write it anew with ``python -m attnmon.theory.audit > docs/audit.md``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

TRUE, EMPIRICAL, FALSE = "true", "empirical", "false as printed"
VERDICTS = {
    TRUE: "proved, and no row of the tests breaks it",
    EMPIRICAL: "an observation on one model and one text, or advice drawn from it; yours may differ",
    FALSE: "a counterexample exists; what holds instead stands beside it, and nothing here calls it a bound",
}

_STATEMENTS_TEST = "tests/stats/test_statements.py::"
_BOUNDS = "tests/theory/test_bounds.py::"
_GEOMETRY = "tests/theory/test_geometry.py::"
_SEPARATION = "tests/theory/test_separation.py::"
_JACOBIAN = "tests/theory/test_jacobian.py::"
_CRITICAL = "tests/theory/test_critical.py::"
_NORMALIZERS = "tests/theory/test_normalizers.py::"


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement and what became of it.

    Attributes:
        name: short, unique.
        says: the statement, in our words.
        source: where the paper (or later work) makes it.
        verdict: ``TRUE``, ``EMPIRICAL`` or ``FALSE``.
        evidence: why; the counterexample where it is false.
        instead: what attnmon states or does.
        tests: "file::function", the tests that hold it.
    """

    name: str
    says: str
    source: str
    verdict: str
    evidence: str
    instead: str
    tests: tuple[str, ...]


STATEMENTS: tuple[Statement, ...] = (
    Statement(
        "weights near uniform",
        "1/(1 + (n-1) e^rho) <= p_i <= 1/(1 + (n-1) e^-rho), rho = max z - min z",
        "Lemma 1",
        TRUE,
        "Both sides are reached: one logit above, or below, n - 1 equal ones.",
        "`theory.weight_bounds`",
        (
            _STATEMENTS_TEST + "test_lemma_1",
            _BOUNDS + "test_lemma_1_bounds_hold_on_every_kind_of_row",
            _BOUNDS + "test_weight_bounds_are_reached",
        ),
    ),
    Statement(
        "entropy near uniform",
        "ln n - rho <= H <= ln n",
        "Lemma 1",
        TRUE,
        "Follows from the weights' bounds.",
        "`theory.entropy_bounds`",
        (_STATEMENTS_TEST + "test_lemma_1", _BOUNDS + "test_lemma_1_bounds_hold_on_every_kind_of_row"),
    ),
    Statement(
        "distance bound, top-N sets",
        "d~ <= (1-a) d1 + max_{I_N} |x| (a (n-N) - (1-a)) for I_N the N largest weights",
        "Theorem 1(1)",
        TRUE,
        "Each outsider has p_i <= a, which is all that the proof needs.",
        "`theory.distance_bound`, also in rows with a sink, where 1 - a becomes the weight outside",
        (
            _STATEMENTS_TEST + "test_theorem_1_holds_for_the_largest_weights_only",
            _GEOMETRY + "test_top_n_distance_and_its_bound_are_those_of_the_definitions_and_of_the_live_metric",
        ),
    ),
    Statement(
        "distance bound, arbitrary sets",
        "The same for any set I_N",
        "Theorem 1(1), read for any selected set",
        FALSE,
        "p = (0.8, 0.1, 0.1), all x one unit vector, set {3}: d~ = 0.7, the expression is -0.7.",
        "The bound is offered for top-N sets only; `theory.distance` measures any set.",
        (
            _STATEMENTS_TEST + "test_theorem_1_holds_for_the_largest_weights_only",
            _GEOMETRY + "test_theorem_1_is_no_bound_for_arbitrary_sets",
        ),
    ),
    Statement(
        "expected distance of random sets",
        "E[d~] = (n-N)/n sum_i |(1 + N/(n-1)) p_i x_i - N/(n-1) sum_j p_j x_j| + eps",
        "Theorem 1(2)",
        TRUE,
        "0 <= eps <= `expected_distance_residual`; against all subsets of short rows. eps is no detail at small N.",
        "`theory.expected_distance` is the main term and a lower bound; E itself by "
        "`theory.expected_distance_monte_carlo`, with its standard error",
        (
            _STATEMENTS_TEST + "test_expected_distance_of_random_sets",
            _GEOMETRY + "test_theorem_1_expectation_against_all_subsets",
            _GEOMETRY + "test_monte_carlo_agrees_with_all_subsets_and_tells_its_error",
        ),
    ),
    Statement(
        "expected distance grows linearly",
        "E[d~] grows linearly with the length L",
        "Theorem 1(2) as summarised, experiment 1",
        FALSE,
        "E[d~] <= (n-N)/n (N+1) max |x| for every n: at most 6 for unit vectors and N = 5.",
        "`theory.expected_distance_limit`",
        (
            _STATEMENTS_TEST + "test_expected_distance_does_not_grow_linearly",
            _GEOMETRY + "test_expected_distance_does_not_grow_linearly",
        ),
    ),
    Statement(
        "true distance grows linearly",
        "The true d~ of the top 5 is linear in L",
        "experiment 1",
        EMPIRICAL,
        "It is about (n-N) |s|: linear while the selected mass stays, not for diffuse heads.",
        "`attnmon paper` draws it for your model, with the fitted line",
        (_GEOMETRY + "test_top_n_distance_grows_with_length_only_while_the_selected_mass_stays",),
    ),
    Statement(
        "true and expected distance meet",
        "d~ and E[d~] meet near N = 100 at L = 1024",
        "experiment 2",
        EMPIRICAL,
        "Where they meet depends on the heads: uniform ones meet at N = 1, sharp ones at no N of the list.",
        "`attnmon paper` draws both curves for your model",
        (_CRITICAL + "test_critical_n_is_no_fixed_share_of_the_length",),
    ),
    Statement(
        "critical N",
        "Critical N is about 0.06 L, for any model",
        "experiment 3",
        FALSE,
        "At L = 128, where 0.06 L is 8, synthetic heads of uniform weights have critical N 1, sharp ones none.",
        "`theory.critical_n`; the value found for a model is an observation on that model",
        (_CRITICAL + "test_critical_n_is_no_fixed_share_of_the_length",),
    ),
    Statement(
        "level of the test",
        "The Kolmogorov-Smirnov test is taken at 0.01 (text), at 0.05 (Algorithm 3)",
        "experiment 3, Algorithm 3",
        EMPIRICAL,
        "The two levels disagree, and can give different critical N.",
        "A parameter, default 0.01",
        (
            _CRITICAL + "test_the_level_decides",
            _CRITICAL + "test_statistics_and_p_values_are_scipys",
        ),
    ),
    Statement(
        "separated keys, closed ball",
        "N_s counts the selected keys in the ball that holds no outsider, a closed ball of radius r",
        "definition of N_s",
        FALSE,
        "The nearest outsider lies on the ball's boundary, so a closed ball of that radius always holds one: N_s = 0.",
        "An open ball: D_i < r, strictly",
        (
            _STATEMENTS_TEST + "test_separability_ignores_the_scale_of_x_and_needs_the_open_ball",
            _SEPARATION + "test_the_papers_closed_ball_would_separate_nothing",
        ),
    ),
    Statement(
        "separability, lower bound",
        "N_s/N >= 1 - (1/(rN)) sum |p_i x_i - s| >= 1 - (1/(rN)) sum xi_i",
        "Theorem 2, lower",
        TRUE,
        "Markov's inequality and |p_i x_i - s| <= xi_i. Often negative, and then it says nothing.",
        "`Separation.lower_bound`, `Separation.lower_bound_xi`",
        (
            _STATEMENTS_TEST + "test_theorem_2_lower_bound_holds_and_the_upper_expression_is_no_bound",
            _SEPARATION + "test_theorem_2_lower_bounds_hold",
        ),
    ),
    Statement(
        "separability, upper expression",
        "N_s/N <= (1/N) sum exp(-(r - xi_i)^2 / (16 M^2))",
        "Theorem 2, upper",
        FALSE,
        "p = (0.46, 0.46, 0.04, 0.04), x = (1, 0), (0, 1), (-1, 0), (0, -1), N = 2: N_s/N = 1, the expression 0.997.",
        '`Separation.paper_expression`, drawn as "the paper\'s expression (not a bound)"',
        (
            _STATEMENTS_TEST + "test_theorem_2_lower_bound_holds_and_the_upper_expression_is_no_bound",
            _SEPARATION + "test_a_row_that_breaks_the_papers_upper_expression",
            _SEPARATION + "test_the_papers_upper_expression_is_no_bound",
        ),
    ),
    Statement(
        "at most 80 % separated",
        "By Theorem 2 at most 80 % of the selected keys can be told apart",
        "Theorem 2 as summarised",
        FALSE,
        "The expression it is drawn from is never below exp(-1/16) = 0.939; N = 1 always gives 100 %.",
        "No upper limit below 1 is stated",
        (
            _SEPARATION + "test_the_papers_upper_expression_is_no_bound",
            _SEPARATION + "test_one_selected_key_is_always_separated",
        ),
    ),
    Statement(
        "plateau of separability",
        "N_s/N falls until N is about 16, then stays at 0.70 to 0.85",
        "experiment 4",
        EMPIRICAL,
        "GPT-2 on one text. Other clouds of vectors give less than 0.6 or more than 0.9 at N = 16.",
        "The live metric is watched for its change at fixed N, not for its level",
        (
            _SEPARATION + "test_separability_is_no_constant_of_nature",
            _STATEMENTS_TEST + "test_theorem_2_lower_bound_holds_and_the_upper_expression_is_no_bound",
        ),
    ),
    Statement(
        "masked keys",
        "Masked keys are no part of a row; kept with weight 0 they change its geometry",
        "ours",
        TRUE,
        "Kept, each of them adds |s| to d~ and caps r at |s|, while the entropy stays as it is and hides it.",
        "A row is its visible keys",
        (_STATEMENTS_TEST + "test_masked_keys_kept_with_weight_zero_change_the_geometry",),
    ),
    Statement(
        "Jacobian, spectral norm",
        "|J|_2 <= min(1/(4T), sqrt 2)",
        "sensitivity",
        FALSE,
        "Two tied logits: |J|_2 = 1/(2T), so 0.5 against 0.25 at T = 1, and 5 against sqrt 2 at T = 0.1.",
        "1/(2 tau), sharp, for the spectral, the Frobenius and the infinity norm: `theory.norm_bound`",
        (
            _STATEMENTS_TEST + "test_jacobian_bounds_are_sharp_and_the_papers_fails",
            _JACOBIAN + "test_norms_are_those_of_the_matrix_and_bounds_hold",
            _JACOBIAN + "test_bounds_are_reached",
            _JACOBIAN + "test_the_papers_spectral_bound_fails",
        ),
    ),
    Statement(
        "Jacobian, largest entry",
        "max |J_ij| <= 1/(4T)",
        "sensitivity (the norm in which 1/(4T) is right)",
        TRUE,
        "The largest entry is max p_i (1 - p_i) / T; reached at p_i = 1/2.",
        "`theory.entry_bound`",
        (
            _STATEMENTS_TEST + "test_jacobian_bounds_in_three_norms",
            _JACOBIAN + "test_norms_are_those_of_the_matrix_and_bounds_hold",
            _JACOBIAN + "test_bounds_are_reached",
        ),
    ),
    Statement(
        "Jacobian, exact norm",
        "max p_i (1-p_i) <= lambda_max <= min(p_max, 2 max p_i (1-p_i), sqrt(S2 (1-S2))), S2 = sum p^2",
        "ours",
        TRUE,
        "Gershgorin, interlacing, Frobenius; the exact value is a root found in O(n).",
        "`theory.spectral_norm`, `theory.eigenvalue_estimates`",
        (
            _STATEMENTS_TEST + "test_sandwich_of_the_largest_eigenvalue",
            _JACOBIAN + "test_estimates_enclose_the_eigenvalue",
            _JACOBIAN + "test_the_exact_norm_keeps_its_digits_in_one_hot_rows",
        ),
    ),
    Statement(
        "finite difference",
        "g(T, eps) <= min(1/(4T), sqrt 2)",
        "sensitivity, Algorithm 5",
        FALSE,
        "Two tied logits along (1, -1)/sqrt 2, eps -> 0: g = 1/(2T). sqrt 2, the simplex's diameter, bounds g eps.",
        "g <= min(1/(2 tau), sqrt(2)/eps): `theory.finite_difference_bound`",
        (
            _STATEMENTS_TEST + "test_finite_difference_bound",
            _JACOBIAN + "test_the_finite_difference_is_the_live_one_and_stays_under_its_bound",
            _JACOBIAN + "test_g_follows_one_over_t_only_at_ties",
        ),
    ),
    Statement(
        "g follows 1/T",
        "g follows 1/T below T = 0.1 and is about two orders lower at T >= 1; the curves of the three eps part",
        "experiment 5",
        EMPIRICAL,
        "1/T at ties only; g vanishes at separated logits. The curves part where sqrt(2)/eps caps g.",
        "`attnmon paper` draws g with its bound",
        (
            _JACOBIAN + "test_g_follows_one_over_t_only_at_ties",
            _STATEMENTS_TEST + "test_finite_difference_bound",
        ),
    ),
    Statement(
        "a random direction",
        "g along one random direction stands for the sensitivity",
        "Algorithm 5",
        EMPIRICAL,
        "It sees |J|_F / sqrt(n): two tied logits among n = 1024 give 0.5/32 (root mean square), their norm is 0.5.",
        "`jacobian` is the figure to alert on, `jacobian_fd` the paper's",
        (_STATEMENTS_TEST + "test_random_direction_sees_the_frobenius_norm_over_the_root_of_n",),
    ),
    Statement(
        "gradients explode as T -> 0",
        "Low temperature makes the gradient explode",
        "sensitivity",
        FALSE,
        "Near ties only. Two logits with gap g have their worst norm, 0.448/g, at T = 0.648 g; T = 0.1, g = 1: 0.0009.",
        "Low temperature has two faces, blow-up and freezing",
        (
            _STATEMENTS_TEST + "test_low_temperature_has_two_faces",
            _JACOBIAN + "test_low_temperature_means_blow_up_at_a_tie_and_freezing_elsewhere",
        ),
    ),
    Statement(
        "general form",
        "alpha = F(l)/sum F has J = (diag a - a a^T) diag(F'/F), |J|_2 <= max |F'/F| / 2",
        "general form; ours (norm)",
        TRUE,
        "Against autograd; reached by F = exp at a tie.",
        "`theory.normalizers.General`",
        (
            _STATEMENTS_TEST + "test_other_normalizers",
            _NORMALIZERS + "test_general_form_bound_holds",
            _NORMALIZERS + "test_jacobian_norm_is_that_of_autograd",
        ),
    ),
    Statement(
        "sparse normalizers",
        "Sparsemax: |J|_2 = 1/T, 0 for a support of one. alpha-entmax: J = (diag s - s s^T / sum s)/T, s = p^(2-alpha)",
        "arXiv 1602.02068, 1905.05702; ours (norm)",
        TRUE,
        "Against autograd and finite differences.",
        "`theory.normalizers.Sparsemax`, `Entmax`",
        (
            _STATEMENTS_TEST + "test_entmax_and_sparsemax",
            _NORMALIZERS + "test_jacobian_norm_is_that_of_autograd",
            _NORMALIZERS + "test_sparsemax_norm_is_one_over_t_or_nothing",
        ),
    ),
    Statement(
        "advice 1",
        "Keep the active set small",
        "advice",
        EMPIRICAL,
        "On random heads N_s/N falls as N grows; separation is no quality score.",
        "N is an option, and shown with every number",
        (_SEPARATION + "test_a_larger_active_set_is_separated_less_on_a_random_head",),
    ),
    Statement(
        "advice 2",
        "Watch entropy and N_s/N: entropy rising, or N_s/N falling, is an early sign of a saturated head",
        "advice",
        EMPIRICAL,
        "0.7 to 0.8 is also GPT-2's normal level, so a level alone says nothing; entropy falling is the other failure.",
        "Alerts on change from the head's own baseline; falling entropy shows in `entropy_norm`, without an alert yet",
        (
            "tests/rules/test_relative.py::test_uniform_names_the_head_and_converts_the_limit",
            "tests/rules/test_relative.py::test_uniform_ignores_collapse_and_moves_near_the_ends",
            "tests/rules/test_ruleset.py::test_every_fault_is_told_with_the_right_head",
        ),
    ),
    Statement(
        "advice 3",
        "Avoid T < 0.1",
        "advice",
        EMPIRICAL,
        "What T does depends on the gaps between logits: blow-up at ties, a frozen head elsewhere.",
        "The live metrics `effective_temperature`, `jacobian` and `jacobian_max` show which",
        (_JACOBIAN + "test_low_temperature_means_blow_up_at_a_tie_and_freezing_elsewhere",),
    ),
)


_INTRODUCTION = (
    '"The paper" is "Limitations of Normalization in Attention Mechanism", arXiv 2508.17821 (NeurIPS 2025). Its',
    "statements are given in our words. Notation: p are the softmax weights of a row's n visible keys, x_i their",
    "vectors, M the largest |x|, I_N the N keys of the largest weights, a their sum, s = sum over I_N of p_j x_j,",
    "d~ = sum over the other keys of |p_i x_i - s|, r the least of these, J = (diag p - p p^T)/T, tau = T relative to",
    "the usual scale.",
)


def render() -> str:
    """The audit as Markdown: the text of docs/audit.md."""
    lines = [
        "# The paper's statements, audited",
        "",
        *_INTRODUCTION,
        "",
        *(f"- **{verdict}**: {meaning}." for verdict, meaning in VERDICTS.items()),
        "",
        "This file is made by `python -m attnmon.theory.audit > docs/audit.md`.",
        "",
        "| statement | says | source | verdict | evidence or counterexample | in attnmon | held by |",
        "|---|---|---|---|---|---|---|",
    ]
    for statement in STATEMENTS:
        tests = "<br>".join(f"`{test}`" for test in statement.tests)
        cells = (
            statement.name,
            statement.says,
            statement.source,
            f"**{statement.verdict}**",
            statement.evidence,
            statement.instead,
        )
        escaped = (cell.replace("|", "\\|").replace("<=", "≤").replace(">=", "≥") for cell in cells)
        lines.append(f"| {' | '.join(escaped)} | {tests} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
