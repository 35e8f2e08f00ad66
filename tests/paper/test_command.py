"""``attnmon paper`` as a person calls it: results, going on after a stop, and mistakes."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from attnmon.commands.cli import PAPER_EXPERIMENTS, main
from attnmon.paper import runner
from attnmon.paper.options import EXPERIMENTS, LENGTHS, TOP_N, PaperOptions

transformers = pytest.importorskip("transformers")

TEXT = ("It was the best of times, it was the worst of times, it was the age of wisdom. " * 60).encode()
SMALL = ("--lengths", "16", "32", "48", "--top-n", "1", "5", "20", "--chunks", "2", "--draws", "2")
UNITS = 3 + 1 + 3 + 1 + 1 + 1  # a chunk


def call(argv, capsys):
    """(exit status, stdout, stderr) of the command, run in this process."""
    try:
        status = main(["paper", *map(str, argv)])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def save(config, cls, folder, seed=0):
    torch.manual_seed(seed)
    model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)  # attention far from uniform
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of small models: causal, another of the same shape, and three that will not do."""
    folder = tmp_path_factory.mktemp("models")
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=16, n_layer=2, n_head=2, **ids)
    save(gpt2, transformers.GPT2LMHeadModel, folder / "gpt2")
    save(gpt2, transformers.GPT2LMHeadModel, folder / "other", seed=1)
    shape = {"vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertConfig(**shape, intermediate_size=16)
    save(bert, transformers.BertForMaskedLM, folder / "bert")
    t5 = transformers.T5Config(vocab_size=256, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    save(t5, transformers.T5ForConditionalGeneration, folder / "t5")
    (folder / "empty").mkdir()
    few = transformers.GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=1, n_head=2, **ids)
    save(few, transformers.GPT2LMHeadModel, folder / "few")
    broken = transformers.GPT2LMHeadModel.from_pretrained(folder / "gpt2")
    with torch.no_grad():
        broken.transformer.h[1].attn.c_attn.weight[0, 0] = torch.nan
    broken.save_pretrained(folder / "broken")
    return folder


@pytest.fixture(scope="module")
def finished(models, tmp_path_factory):
    """(folder of results, what was printed) of one whole run."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_bytes(TEXT)
    status = main(["paper", "--model", str(models / "gpt2"), "--text", str(folder / "text.txt"), "--out",
                   str(folder / "out"), *SMALL])  # fmt: skip
    assert status == 0
    return folder


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def again(finished, models, *more):
    return ["--model", models / "gpt2", "--text", finished / "text.txt", "--out", finished / "out", *SMALL, *more]


def test_everything_is_written(finished):
    out = finished / "out"
    assert {path.stem for path in (out / "figures").glob("*.png")} == set(EXPERIMENTS)
    assert {path.stem for path in (out / "figures").glob("*.svg")} == set(EXPERIMENTS)
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in (out / "figures").glob("*.png"))
    assert {path.stem for path in out.glob("*.csv")} == {*EXPERIMENTS, "critical-n-tests"}
    assert len(list((out / "units").iterdir())) == 2 * UNITS
    assert [path for path in out.rglob("*") if path.name.startswith(".")] == []


def test_tables_are_tidy_and_complete(finished):
    rows = table(finished / "out" / "distance-length.csv")
    assert {(int(row["length"]), int(row["chunk"]), int(row["layer"]), int(row["head"])) for row in rows} == {
        (length, chunk, layer, head)
        for length in (16, 32, 48)
        for chunk in (0, 1)
        for layer in (0, 1)
        for head in (0, 1)
    }
    assert len(rows) == 24
    assert all(int(row["rows"]) == int(row["length"]) - 5 for row in rows)
    assert {row["module"] for row in rows} == {"transformer.h.0.attn", "transformer.h.1.attn"}
    assert len(table(finished / "out" / "separability.csv")) == 2 * 4 * 3


def test_the_page_stands_alone_and_gives_each_claim_a_verdict(finished):
    page = (finished / "out" / "paper.html").read_text()
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert page.count("data:image/svg+xml;base64,") == len(EXPERIMENTS)
    verdicts = re.findall(r'<span class="verdict \w+">(true|empirical|false as printed)</span></td>', page)
    assert len(verdicts) == 14
    assert {"true", "empirical", "false as printed"} == set(verdicts)
    assert "value vectors, unit length" in page
    assert "read as bytes, one token each, since the model has no tokenizer" in page


def test_no_false_statement_is_called_a_bound(finished):
    page = (finished / "out" / "paper.html").read_text()
    false: list[str] = []
    for row in re.findall(r"<tr><td>.*?</tr>", page, re.S):
        if any(text in row for text in ("exp(-(r - xi)^2", "min(1/(4T), sqrt 2)", "at most 80 %", "0.06 L")):
            assert "false as printed" in row
            false.append(row)
        if ">true<" in row:
            assert re.search(r"<td>0 of [\d,]+ rows", row)
    assert len(false) == 5
    for heading in re.findall(r"<th[^>]*>(.*?)</th>", page):
        if "expression" in heading:
            assert "not a bound" in heading


def test_verdicts_are_those_of_the_audit(finished):
    from attnmon.paper.claims import claims
    from attnmon.paper.store import read_csv
    from attnmon.paper.summary import merge_chunks, separation_tests
    from attnmon.theory.audit import STATEMENTS

    keys = dict.fromkeys(EXPERIMENTS, ("length", "layer", "module", "head", "top_n"))
    keys["sensitivity"] = ("length", "layer", "module", "head", "temperature", "epsilon")
    merged = {
        name: merge_chunks(read_csv(finished / "out" / f"{name}.csv"), ("experiment", *keys[name]))
        for name in EXPERIMENTS[:5]
    }
    found = claims(merged, separation_tests(merged["critical-n"], 0.01))
    verdicts = {statement.name: statement.verdict for statement in STATEMENTS}
    assert len(found) == 14
    for claim in found:
        if claim.audited:
            assert claim.verdict == verdicts[claim.audited]
        else:
            assert claim.statement.startswith("Ours: ")
    order = [claim.experiment for claim in found]
    assert order == sorted(order, key=EXPERIMENTS.index)


def test_a_second_run_computes_nothing_and_changes_nothing(finished, models, capsys, monkeypatch):
    before = {path: path.read_bytes() for path in (finished / "out").rglob("*") if path.is_file()}
    monkeypatch.setattr(runner, "measure_head", None)  # calling it would fail
    status, out, _ = call(again(finished, models), capsys)
    assert status == 0
    assert "paper.html" in out
    assert {path: path.read_bytes() for path in (finished / "out").rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_where_it_was(finished, models, capsys, monkeypatch, tmp_path):
    argv = again(finished, models)
    argv[argv.index("--out") + 1] = tmp_path / "out"
    real, calls = runner.attention_calls, []

    def stop_at_third(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(runner, "attention_calls", stop_at_third)
    status, _, err = call(argv, capsys)
    assert (status, "interrupted" in err) == (130, True)
    done = {path.name for path in (tmp_path / "out" / "units").iterdir()}
    assert len(done) == 4  # two experiments at each of two lengths
    assert not (tmp_path / "out" / "paper.html").exists()
    calls.clear()
    monkeypatch.setattr(runner, "attention_calls", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    assert call(argv, capsys)[0] == 0
    assert len(calls) == 4  # of six forwards
    for name in (*(f"{experiment}.csv" for experiment in EXPERIMENTS), "critical-n-tests.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (finished / "out" / name).read_bytes()


@pytest.mark.slow
def test_experiments_and_chunks_can_be_added_later(finished, models, capsys, tmp_path):
    argv = again(finished, models)
    argv[argv.index("--out") + 1] = tmp_path / "out"
    argv[argv.index("--chunks") + 1] = "1"
    assert call([*argv, "--experiment", "separability"], capsys)[0] == 0
    assert [path.name for path in (tmp_path / "out" / "units").iterdir()] == ["separability-L48-chunk0.csv"]
    argv[argv.index("--chunks") + 1] = "2"
    assert call([*argv, "--experiment", "separability", "--experiment", "sensitivity"], capsys)[0] == 0
    assert (tmp_path / "out" / "separability.csv").read_bytes() == (finished / "out" / "separability.csv").read_bytes()
    assert not (tmp_path / "out" / "normalizers.csv").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--seed", "1"), "seed: 0 there, 1 now"),
        (("--draws", "3"), "draws: 2 there, 3 now"),
        (("--tokens", "hidden"), "tokens: value there, hidden now"),
        (("--top-n", "1", "6"), "top_n"),
        (("--lengths", "16", "32"), "longest length: 48 there, 32 now"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_other_settings_are_told(finished, models, capsys, more, said):
    before = {path: path.read_bytes() for path in (finished / "out").rglob("*") if path.is_file()}
    status, out, err = call(again(finished, models, *more), capsys)
    assert (status, out) == (2, "")
    assert said in err.splitlines()[-1]
    assert {path: path.read_bytes() for path in (finished / "out").rglob("*") if path.is_file()} == before


def test_another_model_of_the_same_shape_is_told(finished, models, capsys):
    status, _, err = call(["--model", models / "other", *again(finished, models)[2:]], capsys)
    assert status == 2
    assert "holds results of other settings (model: " in err


def test_restart_begins_anew(finished, models, capsys, tmp_path):
    shutil.copytree(finished / "out", tmp_path / "out")
    argv = again(finished, models, "--seed", "1", "--restart", "--experiment", "separability")
    argv[argv.index("--out") + 1] = tmp_path / "out"
    assert call(argv, capsys)[0] == 0
    assert len(list((tmp_path / "out" / "units").iterdir())) == 2
    assert json.loads((tmp_path / "out" / "settings.json").read_text())["seed"] == 1


def test_hidden_states_and_raw_values_serve_too(models, finished, capsys, tmp_path):
    for tokens in ("hidden", "value_raw"):
        argv = again(finished, models, "--tokens", tokens, "--experiment", "separability")
        argv[argv.index("--out") + 1] = tmp_path / tokens
        assert call(argv, capsys)[0] == 0
    tables = [table(folder / "separability.csv") for folder in (tmp_path / "hidden", tmp_path / "value_raw")]
    assert tables[0] != tables[1]


def test_the_models_own_tokenizer_is_used_and_named(models, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    shutil.copytree(models / "gpt2", tmp_path / "model")
    words = sorted(set(TEXT.decode().split()))
    vocabulary = {word: number for number, word in enumerate(["?", *words])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")
    made.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_bytes(TEXT)
    argv = ["--model", tmp_path / "model", "--text", tmp_path / "text.txt", "--out", tmp_path / "out", "--top-n", "1",
            "--experiment", "separability"]  # fmt: skip
    assert call([*argv, "--lengths", "16", "--chunks", "2"], capsys)[0] == 0
    assert "tokenizer of the model (" in (tmp_path / "out" / "paper.html").read_text()
    count = len(TEXT.split())
    status, _, err = call([*argv, "--lengths", "64", "--chunks", "100"], capsys)
    assert status == 2
    assert f"it has {count:,} tokens; 100 chunks of 64 take 6,400" in err


@pytest.mark.slow
def test_without_a_model_a_small_one_is_trained_once(tmp_path, capsys, monkeypatch):
    (tmp_path / "text.txt").write_bytes(TEXT)
    argv = ["--text", tmp_path / "text.txt", "--out", tmp_path / "out", "--train-steps", "2", "--lengths", "16", "32",
            "--top-n", "2", "--experiment", "separability", "--chunks", "1"]  # fmt: skip
    state = torch.get_rng_state()
    assert call(argv, capsys)[0] == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out" / "model").n_positions == 32
    page = (tmp_path / "out" / "paper.html").read_text()
    assert "not trained on" in page
    monkeypatch.setattr("attnmon.paper.small_model._train", None)  # calling it would fail
    assert call([*argv, "--experiment", "distance-topn"], capsys)[0] == 0
    fresh = [*argv]
    fresh[fresh.index("--out") + 1] = tmp_path / "fresh"
    monkeypatch.undo()
    assert call(fresh, capsys)[0] == 0  # the seed decides
    assert table(tmp_path / "fresh" / "separability.csv") == table(tmp_path / "out" / "separability.csv")


MISTAKES = {
    "text too short": (
        ("--model", "{models}/gpt2", "--text", "short.txt", "--lengths", "16", "--top-n", "1"),
        "--text short.txt is too short: it has 20 bytes; 4 chunks of 16 take 64",
    ),
    "text too short to train on": (
        ("--text", "short.txt", "--lengths", "16", "--top-n", "1"),
        "--text short.txt is too short",
    ),
    "empty text": (("--text", "empty.txt"), "--text empty.txt has 0 bytes"),
    "no text": (("--text", "absent.txt"), "cannot read --text absent.txt: No such file or directory"),
    "N = L": (
        ("--model", "{models}/gpt2", "--lengths", "16", "32", "--top-n", "1", "32"),
        "N must be smaller than L: --top-n has 32, the longest of --lengths is 32",
    ),
    "N >= the shortest L": (
        ("--model", "{models}/gpt2", "--lengths", "4", "32", "--top-n", "1", "3"),
        "N must be smaller than L: --length-n is 5, the shortest of --lengths is 4",
    ),
    "not ascending": (("--lengths", "32", "16"), "--lengths must be different whole numbers of at least 2, ascending"),
    "unknown experiment": (("--experiment", "everything"), "invalid choice: 'everything'"),
    "level": (("--level", "2"), "--level must be a finite number > 0 and < 1; got 2.0"),
    "one draw": (("--draws", "1"), "1 is not a whole number of at least 2"),
    "too long for the model": (("--model", "{models}/gpt2"), "gpt2 reads at most 64 tokens; --lengths asks for 1024"),
    "no such model": (
        ("--model", "nobody/nothing"),
        "cannot load --model nobody/nothing: there is no folder of that name, and no model of that name in the cache",
    ),
    "a folder without a model": (("--model", "{models}/empty"), "the folder holds no transformers model"),
    "an encoder": (
        ("--model", "{models}/bert", "--lengths", "16", "--top-n", "1"),
        "bert is no causal model: in bert.encoder.layer.0.attention.self tokens attend to later ones",
    ),
    "an encoder-decoder": (
        ("--model", "{models}/t5", "--lengths", "16", "--top-n", "1"),
        "t5: its architecture is no causal language model",
    ),
    "bytes that the model does not know": (
        ("--model", "{models}/few", "--lengths", "16", "--top-n", "1"),
        "but the model knows 50",
    ),
    "no such device": (
        ("--model", "{models}/gpt2", "--lengths", "16", "--top-n", "1", "--device", "abacus"),
        "--device abacus cannot be used",
    ),
    "no such device for a model to be trained": (
        ("--lengths", "16", "--top-n", "1", "--device", "abacus"),
        "--device abacus cannot be used",
    ),
    "a forward that is not sound": (
        ("--model", "{models}/broken", "--lengths", "16", "--top-n", "1"),
        "transformer.h.1.attn, head 0: a logit or a vector is not finite",
    ),
    "a device without float64": (
        ("--model", "{models}/gpt2", "--lengths", "16", "--top-n", "1", "--device", "mps"),
        "--device mps cannot be used: it has no float64",
    ),
    "out is a file": (("--out", "short.txt"), "cannot write to --out short.txt: short.txt is not a directory"),
    "no run": (("--from-run", "absent"), "--from-run absent: there is no such file or folder"),
    "a run and a model": (
        ("--from-run", ".", "--model", "{models}/gpt2"),
        "--from-run draws what a run wrote; --model cannot be given with it",
    ),
    "no log": (("--from-run", "."), "--from-run .: no attnmon.jsonl in it"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_line_and_nothing_is_written(name, models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("It was the best of t")
    Path("empty.txt").write_text("")
    argv, said = MISTAKES[name]
    argv = [argument.format(models=models) for argument in argv]
    status, out, err = call(argv if "--out" in argv else [*argv, "--out", "out"], capsys)
    assert status == 2
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    assert err.startswith("attnmon paper: error: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt", "short.txt"]


def test_an_unwritable_folder_is_told(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("attnmon.commands.cli.os.access", lambda path, mode: False)
    status, _, err = call(["--model", models / "gpt2", "--out", tmp_path / "out"], capsys)
    assert status == 2
    assert f"no permission to write in {tmp_path}" in err


def test_the_command_line_offers_what_the_experiments_are(capsys):
    assert PAPER_EXPERIMENTS == EXPERIMENTS
    status, out, _ = call(["--help"], capsys)
    assert status == 0
    text = " ".join(out.split())
    defaults = PaperOptions(text=b"", text_name="", out=Path())
    assert f"(default: {LENGTHS})" in text
    assert f"(default: {TOP_N})" in text
    for option, value in (
        ("--length-n", defaults.length_top_n),
        ("--chunks", defaults.chunks),
        ("--draws", defaults.draws),
        ("--level", defaults.level),
        ("--tokens", defaults.tokens),
        ("--seed", defaults.seed),
        ("--device", defaults.device),
        ("--train-steps", defaults.train_steps),
    ):
        shown = re.search(rf" {option} .*?\(default: (.*?)\)", text)
        assert shown[1] == str(value), option
