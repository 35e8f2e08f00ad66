"""Records of the experiments: those of the live metrics on the same rows, and of the definitions row by row."""

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import attnmon
from attnmon.paper.capture import attention_calls, heads_of
from attnmon.paper.measure import Excerpt, HeadRows, measure_head
from attnmon.paper.options import EPSILONS, EXPERIMENTS, TEMPERATURES, PaperOptions, candidates
from attnmon.stats.reference import row_stats
from attnmon.theory.jacobian import finite_difference, finite_difference_bound, row_directions
from tests.models import DECODERS, build

transformers = pytest.importorskip("transformers")

LENGTH = 150  # more rows than a block
TOKENS = torch.randint(2, 88, (LENGTH,), generator=torch.Generator().manual_seed(5))
OPTIONS = PaperOptions(
    text=b"", text_name="text", out=Path("nowhere"), lengths=(LENGTH,), top_n=(1, 5, 20, 100), draws=3
)


def model(name):
    if name == "gpt2":
        torch.manual_seed(1)
        config = transformers.GPT2Config(
            vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config).eval()
    return build(*DECODERS[name][:2], "sdpa")


@cache
def heads(name):
    found = []
    attention_calls(
        model(name), TOKENS, lambda number, module, call: found.extend(heads_of(number, module, call, "value"))
    )
    return found


@cache
def measured(name):
    """experiment -> records of all heads."""
    records = {experiment: [] for experiment in EXPERIMENTS}
    for head in heads(name):
        for experiment, new in measure_head(head, EXPERIMENTS, OPTIONS, Excerpt(LENGTH, 0, 7)).items():
            records[experiment] += new
    return records


def live_of(name, top_n, epsilon=0.1):
    """metric -> [layers * heads] of the monitor on every row of the same sequence."""
    watched = model(name)
    options = {"rows": None, "sequences": None, "top_n": top_n, "fd_epsilon": epsilon, "rules": (), "on_error": "raise"}
    with attnmon.watch(watched, **options) as monitor:
        with monitor.step(), torch.no_grad():
            watched(input_ids=TOKENS[None])
        snapshot = monitor.flush()
    return {metric: np.concatenate(list(snapshot[metric].values())) for metric in snapshot.metrics}


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
@pytest.mark.parametrize("top_n", [1, 5, 20])
def test_distance_and_separability_are_the_live_metrics(name, top_n):
    expected = live_of(name, top_n)
    distances = [record for record in measured(name)["distance-topn"] if record["top_n"] == top_n]
    separations = [record for record in measured(name)["separability"] if record["top_n"] == top_n]
    for index, (distance, separation) in enumerate(zip(distances, separations, strict=True)):
        if not separation["rows"]:
            assert math.isnan(separation["separability"])
            continue
        # the live mean runs over all rows, those with n <= N being 0
        assert distance["distance"] * distance["rows"] / LENGTH == pytest.approx(expected["distance"][index], rel=1e-4)
        assert separation["separability"] == pytest.approx(expected["separability"][index], abs=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_sensitivity_at_the_models_temperature_is_the_live_metric(name, epsilon):
    expected = live_of(name, 5, epsilon)
    at_one = [r for r in measured(name)["sensitivity"] if r["epsilon"] == epsilon and r["temperature"] == 1.0]
    assert len(at_one) == 8
    np.testing.assert_allclose([record["g"] for record in at_one], expected["jacobian_fd"], rtol=1e-3)
    np.testing.assert_allclose([record["jacobian"] for record in at_one], expected["jacobian"], rtol=1e-3)
    np.testing.assert_allclose([record["jacobian_max"] for record in at_one], expected["jacobian_max"], rtol=1e-3)


def test_every_row_of_a_head_one_at_a_time():
    head = heads("gpt2")[2]
    stats = [
        row_stats(
            head.logits[i, : i + 1].double().numpy(), head.tokens[: i + 1].double().numpy(), query_position=i, top_n=5
        )
        for i in range(LENGTH)
    ]
    (distance,) = [r for r in measured("gpt2")["distance-length"] if (r["layer"], r["head"]) == (head.layer, head.head)]
    assert (distance["top_n"], distance["rows"]) == (5, LENGTH - 5)
    assert distance["distance"] == pytest.approx(np.mean([row["distance"] for row in stats[5:]]), rel=1e-5)
    separation = next(r for r in measured("gpt2")["separability"] if (r["layer"], r["head"], r["top_n"]) == (0, 2, 5))
    assert separation["separability"] == pytest.approx(np.mean([row["separability"] for row in stats[5:]]), abs=1e-3)


def test_experiment_three_says_what_experiment_two_says():
    two = {(r["layer"], r["head"], r["top_n"]): r for r in measured("gpt2")["distance-topn"]}
    three = measured("gpt2")["critical-n"]
    assert {record["top_n"] for record in three} == set(candidates(LENGTH))
    shared = 0
    for record in three:
        other = two.get((record["layer"], record["head"], record["top_n"]))
        if other is not None:
            shared += 1
            assert record["rows"] == other["rows"]
            assert record["distance"] == pytest.approx(other["distance"], rel=1e-5)
            # the same random orders
            assert record["expected"] == pytest.approx(other["expected"], rel=1e-6)
    assert shared == 8 * len({1, 5, 20, 100} & set(candidates(LENGTH)))


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_true_statements_hold_on_every_row(name):
    records = measured(name)
    for experiment in ("distance-length", "distance-topn"):
        for record in records[experiment]:
            assert record["bound_violation_count"] == 0
            if record["rows"]:
                assert record["distance"] <= record["bound"]
                slack = 5 * record["expected_se"] + 1e-6
                assert record["expected_main_term"] - slack <= record["expected"] <= record["expected_limit"] + slack
                most = record["expected_main_term"] + record["expected_residual_bound"]
                assert record["expected"] <= most + slack
    for record in records["separability"]:
        assert record["lower_violation_count"] == 0
        if record["rows"]:
            assert record["lower_bound_xi"] <= record["lower_bound"] + 1e-9 <= record["separability"] + 1e-6
    for record in records["sensitivity"]:
        assert record["bound_violation_count"] == 0
        assert record["g_max"] <= record["bound"] * (1 + 1e-5)
        assert record["jacobian_max"] <= 0.5 / record["temperature"] * (1 + 1e-5)


def test_false_statements_are_seen_to_be_false():
    separation, sensitivity = measured("gpt2")["separability"], measured("gpt2")["sensitivity"]
    assert sum(record["paper_violation_count"] for record in separation) > 0
    assert sum(record["jacobian_over_paper_count"] for record in sensitivity) > 0


def test_g_of_each_temperature_and_step_is_that_of_its_rows():
    head = heads("mistral")[3]
    rows = HeadRows(head, Excerpt(LENGTH, 0, 0), (), OPTIONS)
    records = [r for r in measured("mistral")["sensitivity"] if (r["layer"], r["head"]) == (head.layer, head.head)]
    assert [(r["temperature"], r["epsilon"]) for r in records] == [(t, e) for t in TEMPERATURES for e in EPSILONS]
    directions = row_directions(torch.arange(LENGTH), LENGTH).double()
    for record in records[::7]:
        temperature, epsilon = record["temperature"], record["epsilon"]
        logits = head.logits.double() * head.tau
        g = finite_difference(logits, directions, temperature, epsilon, head.visible)
        assert record["g"] == pytest.approx(float(g.mean()), rel=1e-3)
        assert record["bound"] == finite_difference_bound(temperature, epsilon)
        assert record["rows"] == int((rows.count >= 1).sum()) == LENGTH


def test_normalizers_are_compared_on_rows_of_the_model():
    records = measured("gpt2")["normalizers"]
    names = {record["normalizer"] for record in records}
    assert {"softmax (T = 1)", "sparsemax (T = 1)", "1.5-entmax (T = 1)"} <= names
    assert len(records) == len(names) * 8
    for record in records:
        if record["sums_to_one"]:
            assert record["weight_sum"] == pytest.approx(1.0, abs=1e-6)
        assert record["rows"] == 64
        assert record["jacobian"] <= record["jacobian_max"] * (1 + 1e-9)


def test_a_unit_does_not_depend_on_what_else_is_measured():
    head = heads("gpt2")[1]
    alone = {name: measure_head(head, (name,), OPTIONS, Excerpt(LENGTH, 0, 7))[name] for name in EXPERIMENTS}
    together = measure_head(head, EXPERIMENTS, OPTIONS, Excerpt(LENGTH, 0, 7))
    assert alone == together
