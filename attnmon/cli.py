"""The command line: ``attnmon demo | doctor``.

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

from attnmon.errors import AttnmonError, MissingExtra

USER_ERROR = 2
"""Exit status of a command that was asked for something impossible; nothing has been written then."""


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
    parser.add_argument("--heads", type=_integer(1), default=4, metavar="N", help="attention heads a layer")
    parser.add_argument("--dim", type=_integer(1), default=128, metavar="N", help="width; a multiple of --heads")
    parser.add_argument("--length", type=_integer(2), default=128, metavar="N", help="tokens (bytes) a sequence")
    parser.add_argument("--batch", type=_integer(1), default=8, metavar="N", help="sequences a step")
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
        help="planted half-way: 'temperature' cuts the attention temperature of the middle layer to 0.04",
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
            f"--steps {args.steps} is too few for a fault: it is planted half-way and an alert needs up to 10 steps; "
            "give --steps 20 or more, or --fault none"
        )
    text = _read_text(getattr(args, "text", None), at_least=args.batch * args.length)
    _check_writable(args.logdir)
    for package in ("pytorch_lightning", "transformers", "tensorboard", "PIL"):
        if not _installed(package):
            raise MissingExtra(package, "demo", "attnmon demo")

    from attnmon import demo

    return demo.run(
        demo.Options(
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


def _read_text(path: Path | None, at_least: int) -> bytes:
    """The bytes to train on, or an error that says how many there are and how many it takes."""
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
        raise AttnmonError(
            f"{name} has {len(data):,} bytes; --batch times --length asks for at least {at_least:,} of them"
        )
    return data


def _check_writable(directory: Path) -> None:
    """Whether ``directory`` is, or can be made, a folder to write in; makes nothing."""
    parent = directory
    while not os.path.exists(parent) and parent != parent.parent:
        parent = parent.parent
    if not os.path.isdir(parent):
        raise AttnmonError(f"cannot write to --logdir {directory}: {parent} is not a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise AttnmonError(f"cannot write to --logdir {directory}: no permission to write in {parent}")


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="MODULE:FACTORY",
        help="a function without arguments that returns the model, or the model and what to call it with",
    )


def _doctor(args: argparse.Namespace) -> int:
    from attnmon import doctor

    return doctor.run(args.target)


COMMANDS = (
    Command(
        "demo",
        "train a small GPT-2 on English text on the CPU, plant a fault half-way, see it found",
        _demo_arguments,
        _demo,
    ),
    Command(
        "doctor",
        "say which attention modules of a model would be watched, and why others would not, without training",
        _doctor_arguments,
        _doctor,
    ),
)


if __name__ == "__main__":
    sys.exit(main())
