"""Imports go one way, optional packages stay in their own files, and the core needs none of them."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "attnmon"

# A part may import the parts of lower levels. "__init__" only re-exports.
LEVELS = {
    "errors": 0,
    "types": 0,
    "checks": 0,
    "metrics": 0,
    "flex_mods": 0,
    "tiny_gpt2": 0,
    "call": 0,
    "stats": 1,
    "capture": 1,
    "rules": 1,
    "writers": 1,
    "run": 2,
    "lightning": 3,
    "huggingface": 3,
    "theory": 3,
    "paper": 4,
    "commands": 5,
    "__init__": 6,
}
APART = {1, 3}  # parts of these levels never import one another

# Where each optional third-party package may appear. Everything else that is imported must be a core dependency.
OPTIONAL = {
    "lightning": {"attnmon.lightning"},
    "pytorch_lightning": {"attnmon.lightning", "attnmon.commands.demo"},
    "tensorboard": {"attnmon.writers.tensorboard"},
    "PIL": {"attnmon.writers.heatmap"},
    "transformers": {
        "attnmon.huggingface",
        "attnmon.tiny_gpt2",
        "attnmon.capture.routes.transformers_registry",
        "attnmon.paper.model",
        "attnmon.paper.small_model",
    },
    "triton": {f"attnmon.stats.fused.{part}" for part in ("fields", "math", "tiles", "keys", "merge", "finish")},
    "scipy": {"attnmon.theory.critical"},
    "matplotlib": {"attnmon.paper.figures", "attnmon.paper.report", "attnmon.paper.from_run"},
    "jinja2": {"attnmon.paper.page"},
    "rich": {"attnmon.paper.progress"},
    "pyarrow": {"attnmon.paper.store"},
    "entmax": {"attnmon.theory.sparse_normalizers"},
}
CORE = {"torch", "numpy", "attnmon"}


def modules():
    """Every module of the package: name -> path."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts), path


@cache
def imports(path, typing_too=False):
    """Absolute names that a file imports anywhere: (name, line, at top level).

    Imports under ``if TYPE_CHECKING`` count only if ``typing_too``.
    """
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for statement in block.body
        for node in ast.walk(statement)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in typing_only and not typing_too:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, node in tree.body) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += [(f"{node.module}.{alias.name}", node.lineno, node in tree.body) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            if isinstance(node.args[0], ast.Constant):
                found.append((node.args[0].value, node.lineno, False))
    return found


def part_of(name):
    """The part (room) a dotted attnmon name belongs to; names of the package itself give "__init__"."""
    pieces = name.split(".")
    return pieces[1] if len(pieces) > 1 and pieces[1] in LEVELS else "__init__"


MODULES = dict(modules())


def test_every_module_belongs_to_a_part():
    assert [name for name in MODULES if name.split(".")[1] not in LEVELS] == []


def module_of(name):
    """The module that an imported attnmon name is, or is in."""
    pieces = name.split(".")
    while len(pieces) > 1 and ".".join(pieces) not in MODULES:
        pieces.pop()
    return ".".join(pieces) if len(pieces) > 1 else "attnmon.__init__"


def circle(edges):
    """The nodes of a circle in a graph, or None."""
    graph = {}
    for one, other in edges:
        if one != other:
            graph.setdefault(one, set()).add(other)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


EDGES = [
    (module, module_of(name))
    for module, path in MODULES.items()
    for name, _, _ in imports(path, typing_too=True)
    if name.split(".")[0] == "attnmon"
]


def test_no_files_import_one_another_in_a_circle():
    assert circle([("a", "b"), ("b", "c"), ("c", "a")]) is not None
    assert len(EDGES) > 400
    assert circle(EDGES) is None


@pytest.mark.parametrize("folder", ["attnmon", "attnmon.capture", "attnmon.stats"])
def test_no_folders_import_one_another_in_a_circle(folder):
    depth = len(folder.split("."))

    def room(module):
        pieces = module.split(".")
        inside = module.startswith(f"{folder}.") and (PACKAGE.parent / "/".join(pieces[: depth + 1])).is_dir()
        return pieces[depth] if inside else None

    rooms = [(room(one), room(other)) for one, other in EDGES]
    between = {pair for pair in rooms if None not in pair and pair[0] != pair[1]}
    assert between or folder == "attnmon.stats"
    assert circle(between) is None


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    here = part_of(module)
    wrong = []
    for name, line, _ in imports(MODULES[module], typing_too=True):
        if name.split(".")[0] != "attnmon" or name == "attnmon.__version__":
            continue
        there = part_of(name)
        if there == here:
            continue
        if not (LEVELS[there] < LEVELS[here] or LEVELS[there] == LEVELS[here] not in APART):
            wrong.append(f"line {line}: {name}")
    assert wrong == []


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("attnmon.stats")])
def test_only_the_api_imports_implementations(module):
    implementations = {f"attnmon.stats.{name}" for name in ("reference", "streaming.measure", "fused.launch")}
    found = {
        (implementation, top_level)
        for name, _, top_level in imports(MODULES[module])
        for implementation in implementations
        if implementation != module and (name == implementation or name.startswith(implementation + "."))
    }
    if module == "attnmon.stats.api":
        assert [implementation for implementation, top_level in found if top_level] == [], "imported when needed only"
    else:
        assert found == set()


@pytest.mark.parametrize("module", MODULES)
def test_third_party_packages_stay_in_their_files(module):
    wrong = []
    for name, line, _ in imports(MODULES[module]):
        package = "tensorboard" if name.startswith("torch.utils.tensorboard") else name.split(".")[0]
        if package in CORE or package in sys.stdlib_module_names:
            continue
        if module not in OPTIONAL.get(package, set()):
            wrong.append(f"line {line}: {name}")
    assert wrong == []


BLOCKED_IMPORT = """
import importlib.abc, sys

BLOCKED = {blocked}

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)

sys.meta_path.insert(0, Block())
{code}
"""

OPTIONAL_PACKAGES = (
    "tensorboard", "PIL", "rich", "lightning", "pytorch_lightning", "transformers", "scipy", "matplotlib", "triton",
    "jinja2", "entmax", "pyarrow",
)  # fmt: skip


def run_blocked(code, more=()):
    script = BLOCKED_IMPORT.format(blocked={*OPTIONAL_PACKAGES, *more}, code=code)
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_core_needs_no_optional_package():
    done = run_blocked(
        "import torch, attnmon\n"
        "q, k, v = torch.randn(3, 1, 2, 8, 4)\n"
        "stats = attnmon.attention_stats(q, k, v, is_causal=True, top_n=2)\n"
        "assert stats['entropy'].shape == (2,)\n"
        "print(sorted(attnmon.__all__))"
    )
    assert done.returncode == 0, done.stderr
    assert "watch" in done.stdout


def test_the_theory_needs_scipy_and_entmax_only_where_they_are_used():
    done = run_blocked(
        "import torch\n"
        "from attnmon import theory\n"
        "from attnmon.errors import MissingExtra\n"
        "from attnmon.theory.normalizers import Softmax, Sparsemax\n"
        "p = Softmax().weights(torch.zeros(6))\n"
        "assert float(theory.top_n_distance(p, torch.eye(6), 2)) > 0\n"
        "for use in (lambda: Sparsemax().weights(p), lambda: theory.ks_test([0.0, 1.0], [2.0])):\n"
        "    try:\n"
        "        use()\n"
        "    except MissingExtra as error:\n"
        "        print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pip install 'attnmon[paper]'") == 2


@pytest.mark.parametrize(
    "command",
    [["demo"], ["paper"], ["demo", "--help"], ["paper", "--help"], ["doctor", "--help"], ["--help"], ["--version"]],
)
def test_the_command_line_without_extras(command):
    code = f"from attnmon.commands.cli import main\nsys.exit(main({command!r}))"
    if command[-1].startswith("--"):
        done = run_blocked(code, ("torch", "numpy"))  # quick, since nothing large is imported
        assert done.returncode == 0, done.stderr
    else:
        done = run_blocked(code)
        assert done.returncode == 2, done.stderr
        assert f"pip install 'attnmon[{command[0]}]'" in done.stderr
        assert "Traceback" not in done.stderr
