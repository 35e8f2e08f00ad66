"""The command line: ``attnmon demo | doctor | paper``.

A command is an entry of ``COMMANDS``: its name, one line of help, a function that declares its arguments and one
that runs it and returns the exit status. What a command needs beyond the standard library is imported when it
runs, so that ``--help`` stays quick.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from attnmon import __version__
from attnmon.errors import AttnmonError, MissingExtra

USER_ERROR = 2
"""Exit status of a command that was asked for something impossible; nothing has been written then."""

PAPER_EXPERIMENTS = ("distance-length", "distance-topn", "critical-n", "separability", "sensitivity", "normalizers")
"""A copy of ``attnmon.paper.options.EXPERIMENTS``, whose import would take that of torch."""


@dataclass(frozen=True)
class Command:
    """One subcommand: ``arguments`` declares its options, ``run`` returns the exit status."""

    name: str
    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is one ``--help`` away."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``attnmon`` command; returns the exit status."""
    parser = _build_parser()
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except (AttnmonError, MissingExtra) as error:
        print(f"attnmon {args.command}: error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"attnmon {args.command}: interrupted", file=sys.stderr)
        return 130
    return status


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="attnmon", description="Watches every attention head of a transformer while it trains.")
    parser.add_argument("--version", action="version", version=f"attnmon {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = commands.add_parser(
            command.name,
            help=command.help,
            description=command.help[0].upper() + command.help[1:] + ".",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        command.arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _integer(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number within bounds."""
    wanted = f"a whole number of at least {lowest}" + (f" and at most {highest}" if highest is not None else "")

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
        if value < lowest or (highest is not None and value > highest):
            raise argparse.ArgumentTypeError(f"{value} is not {wanted}")
        return value

    return parse


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=_integer(1), default=400, metavar="N", help="optimizer steps")
    parser.add_argument("--layers", type=_integer(1), default=4, metavar="N", help="transformer layers")
    parser.add_argument("--heads", type=_integer(1), default=4, metavar="N", help="attention heads per layer")
    parser.add_argument("--dim", type=_integer(1), default=128, metavar="N", help="width; a multiple of --heads")
    parser.add_argument("--length", type=_integer(2), default=128, metavar="N", help="tokens (bytes) per sequence")
    parser.add_argument("--batch", type=_integer(1), default=8, metavar="N", help="sequences per step")
    parser.add_argument(
        "--text",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="train on this file (default: the help topics that come with Python, about 465,000 characters)",
    )
    parser.add_argument(
        "--fault",
        choices=("temperature", "none"),
        default="temperature",
        help="planted halfway: 'temperature' cuts the attention temperature of the middle layer to 0.04",
    )
    parser.add_argument(
        "--logdir", type=Path, default=Path("runs/attnmon-demo"), metavar="DIR", help="where the TensorBoard logs go"
    )
    parser.add_argument("--seed", type=_integer(0, 2**32 - 1), default=0, metavar="N", help="random seed")


def _demo(args: argparse.Namespace) -> int:
    if args.dim % args.heads:
        raise AttnmonError(f"--dim {args.dim} is not a multiple of --heads {args.heads}")
    if args.fault != "none" and args.steps < 20:
        raise AttnmonError(
            f"--steps {args.steps} is too few for a fault: it is planted halfway and an alert needs up to 10 steps; "
            "give --steps 20 or more, or --fault none"
        )
    text = _read_text(getattr(args, "text", None), args.batch * args.length, "--batch times --length asks")
    _check_writable(args.logdir)
    for package in ("pytorch_lightning", "transformers", "tensorboard", "PIL"):
        if not _installed(package):
            raise MissingExtra(package, "demo", "attnmon demo")

    from attnmon.commands import demo

    return demo.run(
        demo.DemoOptions(
            text=text,
            steps=args.steps,
            layers=args.layers,
            heads=args.heads,
            dim=args.dim,
            length=args.length,
            batch=args.batch,
            fault=args.fault == "temperature",
            logdir=args.logdir,
            seed=args.seed,
        )
    )


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def _read_text(path: Path | None, at_least: int, who: str = "--text asks") -> bytes:
    """The bytes of a text, or an error that says how many there are, how many it takes and ``who`` asks for them."""
    if path is None:
        from pydoc_data.topics import topics

        name, data = "the built-in text", "\n\n".join(topics.values()).encode()
    else:
        name = f"--text {path}"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise AttnmonError(f"cannot read {name}: {error.strerror}") from error
    if len(data) < at_least:
        raise AttnmonError(f"{name} has {len(data):,} bytes; {who} for at least {at_least:,} of them")
    return data


def _check_writable(directory: Path, option: str = "--logdir") -> None:
    """Whether ``directory`` is, or can be made, a folder to write in; makes nothing."""
    parent = directory
    while not os.path.exists(parent) and parent != parent.parent:
        parent = parent.parent
    if not os.path.isdir(parent):
        raise AttnmonError(f"cannot write to {option} {directory}: {parent} is not a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise AttnmonError(f"cannot write to {option} {directory}: no permission to write in {parent}")


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="MODULE:FACTORY",
        help="a function without arguments that returns the model, or the model and what to call it with",
    )


def _doctor(args: argparse.Namespace) -> int:
    from attnmon.commands import doctor

    return doctor.run(args.target)


def _paper_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=argparse.SUPPRESS,
        metavar="DIR_OR_NAME",
        help="a causal transformers model: a folder, or a name in the local cache (default: train a small GPT-2 first)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="what the model reads (default: the help topics that come with Python)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="folder of results; what is finished there is not done again "
        "(default: runs/attnmon-paper, with --from-run LOGDIR/paper)",
    )
    parser.add_argument(
        "--experiment",
        action="append",
        choices=(*PAPER_EXPERIMENTS, "all"),
        default=argparse.SUPPRESS,
        help="which; may be given several times (default: all)",
    )
    parser.add_argument(
        "--from-run",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="LOGDIR",
        help="instead, draw separability and sensitivity over the steps of a run monitored with a JSON Lines writer",
    )
    lengths, top_n = (32, 64, 128, 256, 512, 1024), (1, 5, 10, 20, 100)
    parser.add_argument("--lengths", type=_integer(2), nargs="+", default=lengths, metavar="L", help="tokens read")
    parser.add_argument("--top-n", type=_integer(1), nargs="+", default=top_n, metavar="N", help="selected keys")
    parser.add_argument("--length-n", type=_integer(1), default=5, metavar="N", help="N of distance-length")
    parser.add_argument("--chunks", type=_integer(1), default=4, metavar="N", help="pieces of text, each the longest L")
    parser.add_argument("--draws", type=_integer(2), default=4, metavar="N", help="random sets a row and N")
    parser.add_argument("--level", type=float, default=0.01, metavar="P", help="of the Kolmogorov-Smirnov test")
    parser.add_argument(
        "--tokens",
        choices=("value", "value_raw", "hidden"),
        default="value",
        help="vectors x: value vectors of unit length, as they are, or hidden states of unit length",
    )
    parser.add_argument("--seed", type=_integer(0, 2**32 - 1), default=0, metavar="N", help="random seed")
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="where the model and the arithmetic run")
    parser.add_argument(
        "--train-steps", type=_integer(1), default=400, metavar="N", help="of the small GPT-2, without --model"
    )
    parser.add_argument("--restart", action="store_true", help="drop results of other settings in --out")


def _paper(args: argparse.Namespace) -> int:
    log: Path | None = getattr(args, "from_run", None)
    out: Path = getattr(args, "out", Path("runs/attnmon-paper") if log is None else log / "paper")
    meaningless = [f"--{name}" for name in ("model", "text", "experiment") if log is not None and hasattr(args, name)]
    if meaningless:
        raise AttnmonError(f"--from-run draws what a run wrote; {', '.join(meaningless)} cannot be given with it")
    _check_writable(out, "--out")
    for package in ("transformers", "matplotlib", "jinja2", "scipy", "rich", "entmax"):
        if not _installed(package):
            raise MissingExtra(package, "paper", "attnmon paper")
    if log is not None:
        from attnmon.paper.from_run import write_run_report

        written = write_run_report(log, out)
    else:
        path: Path | None = getattr(args, "text", None)
        text = _read_text(path, at_least=1)
        from attnmon.paper import command
        from attnmon.paper.options import PaperOptions

        asked = getattr(args, "experiment", ["all"])
        written = command.run(
            PaperOptions(
                text=text,
                text_name="the built-in text" if path is None else f"--text {path}",
                out=out,
                model=getattr(args, "model", None),
                experiments=tuple(name for name in PAPER_EXPERIMENTS if name in asked or "all" in asked),
                lengths=tuple(args.lengths),
                top_n=tuple(args.top_n),
                length_top_n=args.length_n,
                chunks=args.chunks,
                draws=args.draws,
                tokens=args.tokens,
                level=args.level,
                seed=args.seed,
                device=args.device,
                train_steps=args.train_steps,
                restart=args.restart,
            )
        )
    print(f"Wrote {len(written)} files to {out}; open\n  {written[-1]}")
    return 0


COMMANDS = (
    Command(
        "demo",
        "train a small GPT-2 on English text on the CPU, plant a fault halfway, see it found",
        _demo_arguments,
        _demo,
    ),
    Command(
        "doctor",
        "say which attention modules of a model would be watched, and why others would not, without training",
        _doctor_arguments,
        _doctor,
    ),
    Command(
        "paper",
        "repeat the paper's five experiments on a causal model and set its claims beside what is measured",
        _paper_arguments,
        _paper,
    ),
)


if __name__ == "__main__":
    sys.exit(main())
