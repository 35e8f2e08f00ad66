"""The audit table says what the code and the tests say."""

import ast
import inspect
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from attnmon import theory
from attnmon.theory.audit import EMPIRICAL, FALSE, STATEMENTS, TRUE, VERDICTS, render
from attnmon.theory.separation import Separation

ROOT = Path(__file__).resolve().parents[2]


@cache
def functions(path):
    return {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_the_document_is_the_table():
    assert (ROOT / "docs" / "audit.md").read_text() == render(), "run: python -m attnmon.theory.audit > docs/audit.md"


@pytest.mark.parametrize("statement", STATEMENTS, ids=[statement.name for statement in STATEMENTS])
def test_every_statement_has_a_verdict_evidence_and_tests_that_exist(statement):
    assert statement.verdict in VERDICTS
    assert statement.says
    assert statement.source
    assert statement.evidence
    assert statement.instead
    assert statement.tests
    for test in statement.tests:
        path, name = test.split("::")
        assert name in functions(path), f"{test} does not exist"


def test_statements_are_listed_once():
    assert max(Counter(statement.name for statement in STATEMENTS).values()) == 1
    assert {statement.verdict for statement in STATEMENTS} == {TRUE, EMPIRICAL, FALSE}


def test_the_table_has_one_line_for_each_statement():
    lines = [line for line in render().splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(STATEMENTS)
    assert all(line.replace("\\|", "").count("|") == 8 for line in lines)


def test_public_functions_say_which_statement_they_are():
    """A bound is called true; what is false as printed is never called one."""
    for name in theory.__all__:
        text = inspect.getdoc(getattr(theory, name)) or ""
        assert text, name
        if "bound" in name or "limit" in name:
            assert "true" in text.lower(), name
    assert "false as printed" in (theory.paper_expression.__doc__ or "").lower()
    assert "not a bound" in (theory.paper_expression.__doc__ or "")
    assert "not a bound" in (Separation.__doc__ or "")
