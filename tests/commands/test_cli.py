"""The command line: help, mistakes, and one small real demo."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnmon.commands.cli import main

ROOT = Path(__file__).resolve().parents[2]


def call(argv, capsys):
    """(exit status, stdout, stderr) of the command, run in this process."""
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_help_lists_the_commands(capsys):
    status, out, _ = call(["--help"], capsys)
    assert status == 0
    assert "demo" in out


def test_demo_help_shows_every_option_with_its_default(capsys):
    status, out, _ = call(["demo", "--help"], capsys)
    assert status == 0
    for option in ("steps", "layers", "heads", "dim", "length", "batch", "text", "fault", "logdir", "seed"):
        assert f"--{option} " in out
    assert "{temperature,none}" in out
    assert "(default: 400)" in out


def test_help_imports_nothing_heavy():
    code = (
        "import sys, types\n"
        f"package = types.ModuleType('attnmon'); package.__path__ = [{str(ROOT / 'attnmon')!r}]\n"
        "package.__version__ = '0'\n"
        "sys.modules['attnmon'] = package\n"  # the package itself may import torch; the command line must not
        "from attnmon.commands.cli import main\n"
        "try: main(['demo', '--help'])\n"
        "except SystemExit: pass\n"
        "print('HEAVY', sorted({'torch', 'numpy', 'transformers', 'pytorch_lightning'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "HEAVY []" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["demo", "--nonsense"], "--nonsense"),
        (["demo", "--steps", "0"], "--steps: 0 is not a whole number of at least 1"),
        (["demo", "--steps", "many"], "--steps: 'many' is not a whole number"),
        (["demo", "--steps", "1e3"], "'1e3' is not a whole number"),
        (["demo", "--steps", "19"], "--steps 19 is too few for a fault"),
        (["demo", "--layers", "-1"], "--layers"),
        (["demo", "--length", "1"], "at least 2"),
        (["demo", "--seed", "-1"], "at least 0 and at most"),
        (["demo", "--dim", "30"], "--dim 30 is not a multiple of --heads 4"),
        (["demo", "--fault", "gremlin"], "gremlin"),
        (["demo", "--text", "absent.txt"], "cannot read --text absent.txt: No such file or directory"),
        (["demo", "--text", "."], "cannot read --text .: Is a directory"),
        (
            ["demo", "--text", "short.txt"],
            "--text short.txt has 5 bytes; --batch times --length asks for at least 1,024",
        ),
        (["demo", "--batch", "1000000"], "the built-in text has"),
        (["demo", "--logdir", "short.txt"], "cannot write to --logdir short.txt: short.txt is not a directory"),
        (["demo", "--logdir", "short.txt/deeper"], "cannot write to --logdir short.txt/deeper"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_a_mistake_is_told_in_one_line_and_nothing_is_written(argv, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    status, out, err = call(argv, capsys)
    assert status == 2
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    assert err.startswith("attnmon")
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def test_an_unwritable_folder_is_told(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("attnmon.commands.cli.os.access", lambda path, mode: False)
    status, _, err = call(["demo", "--logdir", str(tmp_path / "logs")], capsys)
    assert status == 2
    assert f"no permission to write in {tmp_path}" in err


def test_the_built_in_text_is_english_of_some_size():
    from attnmon.commands.cli import _read_text

    text = _read_text(None, at_least=1)
    assert len(text) > 400_000
    assert text.count(b" the ") > 3_000


SMALL = ("--layers", "3", "--heads", "2", "--dim", "32", "--length", "48", "--batch", "8")


def demo(tmp_path, *argv):
    for package in ("pytorch_lightning", "transformers", "tensorboard", "PIL"):
        pytest.importorskip(package)
    return subprocess.run(
        [sys.executable, "-m", "attnmon.commands.cli", "demo", *SMALL, *argv, "--logdir", str(tmp_path / "logs")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.slow
def test_demo_finds_the_fault_in_its_layer_and_nowhere_else(tmp_path):
    done = demo(tmp_path, "--steps", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"planted in (\S+) before step 30 and found (\d+) steps later", done.stdout)
    assert found, done.stdout
    assert found[1].endswith(".1.attn")
    assert int(found[2]) <= 10
    alerts = re.findall(r"^  (\w+) (\w+), (\S+), heads? (.*), from step (\d+)$", done.stdout, re.M)
    assert {module for severity, _, module, _, _ in alerts if severity != "info"} == {found[1]}
    assert ("low_temperature", found[1], "0, 1") in {(rule, module, heads) for _, rule, module, heads, _ in alerts}
    assert "AttnmonWarning" not in done.stderr
    logdir = re.search(r"--logdir (\S+)$", done.stdout, re.M)
    assert logdir
    assert list(Path(logdir[1]).glob("events.out.tfevents.*"))


@pytest.mark.slow
def test_demo_without_a_fault_raises_no_alert(tmp_path):
    done = demo(tmp_path, "--steps", "40", "--fault", "none")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No alerts." in done.stdout
    assert "planted" not in done.stdout
