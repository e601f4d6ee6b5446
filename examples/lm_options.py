"""The example's command line: what is wrong with it is said in one line, before any training."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh
from lm_codecs import Compression, compression, parse_codec, parse_compressor
from lm_devices import parse_mesh, parse_process
from lm_model import Config

import xcoll
from xcoll.algorithms import check_choice

ONE_STEP = ("algorithm", "codec", "compressor", "fsdp")
"""Options that describe one step, which is then compared with the plain one."""

PROFILE = ".json"
"""How a topology ends that is the path of a profile."""

QUICK = {"steps": 6, "batch": 8, "seq_len": 32, "dim": 256, "layers": 1}
"""Defaults where it has to be quick."""


def fail(message: object) -> NoReturn:
    """Prints the first line of a message and exits, as argparse does, with code 2."""
    line, *_ = str(message).splitlines() or ["error"]
    print(f"{Path(sys.argv[0]).name}: error: {line}", file=sys.stderr)
    raise SystemExit(2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


class _Defaults(argparse.HelpFormatter):
    """Tells the default of each option that takes something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.nargs != 0 and action.default is not None
        return f"{action.help} (%(default)s)" if has_default else action.help


def arguments(argv: list[str] | None, description: str) -> argparse.Namespace:
    """Parses the command line; exits with code 2 where it asks for something impossible."""
    parser = _Parser(description=description, allow_abbrev=False, formatter_class=_Defaults)
    positive = _whole(1)
    parser.add_argument(
        "--mesh", type=_converted(parse_mesh), help="mesh axes, for example host=2,device=4"
    )
    parser.add_argument(
        "--virtual-devices", type=positive, metavar="N", help="split the CPU into this many devices"
    )
    parser.add_argument(
        "--distributed",
        type=_converted(parse_process),
        nargs="?",
        const=(),
        metavar="ADDRESS,COUNT,INDEX",
        help="one of several processes; a TPU pod and Slurm say which one by themselves. Trains"
        " plain, exact, int8 and int4 with error feedback, unless one step is described by"
        " --algorithm, --codec, --compressor or --fsdp",
    )
    parser.add_argument(
        "--topology",
        type=_converted(_topology),
        help="plan for this hardware: '2*cpu:4@200Mbit', or a profile of xcoll tune, PATH.json",
    )
    parser.add_argument(
        "--algorithm", type=_converted(_algorithm), help="force one algorithm, e.g. ring"
    )
    parser.add_argument(
        "--codec",
        type=_converted(parse_codec),
        metavar="NAME[@AXIS]",
        help="send gradients through a codec too, over one axis or all: int8@host",
    )
    parser.add_argument(
        "--compressor",
        type=_converted(parse_compressor),
        metavar="NAME[:ARG][@AXIS]",
        help="send gradients through a compressor too: top_k:0.01@host, powersgd:4, sign",
    )
    parser.add_argument(
        "--error-feedback",
        action="store_true",
        help="add in the next step what --codec dropped in this one",
    )
    parser.add_argument(
        "--max-ratio",
        type=_converted(_number),
        metavar="PART",
        help="fail where the compressed step sends more than this part of the exact one's bytes",
    )
    parser.add_argument("--fsdp", action="store_true", help="keep parameters in shards")
    parser.add_argument("--steps", type=positive, default=40, metavar="N", help="of each run")
    parser.add_argument(
        "--batch", type=positive, default=16, metavar="N", help="sequences a step, in all"
    )
    parser.add_argument(
        "--seq-len", type=positive, default=128, metavar="N", help="bytes a sequence"
    )
    parser.add_argument(
        "--lr", type=_converted(_number), default=1e-3, metavar="RATE", help="of AdamW"
    )
    parser.add_argument(
        "--seed", type=_whole(0, 2**31 - 1), default=0, metavar="N", help="of parameters and text"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/train_lm"),
        metavar="DIR",
        help="for what is measured",
    )
    parser.add_argument(
        "--dim",
        type=_whole(1, step=Config.heads),
        default=256,
        metavar="N",
        help="width of the model",
    )
    parser.add_argument("--layers", type=positive, default=4, metavar="N", help="of the model")
    parser.add_argument(
        "--target-loss",
        type=_converted(_number),
        metavar="LOSS",
        help="with --distributed: the loss that time is taken to; the lowest that all reach",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="with --distributed: a small model and few steps, unless said otherwise",
    )
    parser.add_argument(
        "--json", action="store_true", help="with --distributed: figures to standard output"
    )
    if "--quick" in (sys.argv[1:] if argv is None else argv):
        parser.set_defaults(**QUICK)
    args = parser.parse_args(argv)
    one = [f"--{name}" for name in ONE_STEP if getattr(args, name)]
    args.variants = args.distributed is not None and not one
    try:
        for option in ("target_loss", "quick", "json"):
            if getattr(args, option) and not args.variants:
                raise ValueError(
                    f"--{option.replace('_', '-')}: is for the variants that --distributed trains"
                    + (f"; {' and '.join(one)} compares one step" if one else "")
                )
        args.compression = compression(args.codec, args.compressor, args.error_feedback)
        if args.max_ratio is not None and args.compression is None:
            raise ValueError(
                f"--max-ratio {args.max_ratio}: of which compression? Add --codec or --compressor"
            )
    except ValueError as err:
        parser.error(str(err))
    return args


def settings(args: argparse.Namespace, mesh: Mesh) -> dict[str, Any]:
    """Returns the options, and what they ran on, as values for JSON."""
    found = vars(args) | {"out": str(args.out), "jax": jax.__version__, "mesh": dict(mesh.shape)}
    found["device_kind"] = mesh.devices.flat[0].device_kind
    for option in ("codec", "compressor", "compression", "variants", "hardware"):
        del found[option]
    if args.compression is not None:
        found["compression"] = args.compression.name
    return found


def common(args: argparse.Namespace) -> dict[str, str]:
    """Returns the options that all processes of a run must have alike, as text.

    Topologies are not among them: xcoll compares what was planned with them.
    """
    own = ("distributed", "out", "json", "target_loss", "topology", "quick")
    derived = ("compression", "variants")
    return {
        name: _as_given(value) for name, value in vars(args).items() if name not in own + derived
    }


def _as_given(value: Any) -> str:
    """Returns an option's value as it is written on the command line."""
    if value is None:
        return "not given"
    if isinstance(value, dict):  # --mesh
        return ",".join(f"{axis}={size}" for axis, size in value.items())
    if isinstance(value, Compression):  # --compressor
        return value.name
    return str(value[0] if isinstance(value, tuple) else value)  # --codec


def read_topology(text: str | None, mesh: Mesh) -> xcoll.Topology | str | None:
    """Returns what to plan for: the profile in a file ``PATH.json``, or the text, once checked.

    Raises:
      ValueError: it describes another mesh, or the file is no profile of this one.
    """
    if text is None:
        return None
    try:
        if text.endswith(PROFILE):
            return xcoll.Topology.load(text, mesh)
        xcoll.Topology.parse(text, axes=dict(mesh.shape))
    except (OSError, ValueError) as err:
        raise ValueError(f"--topology and --mesh: {err}") from err
    return text


def _converted(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Keeps the message of a ValueError, which argparse would replace by one of its own."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as err:
            raise argparse.ArgumentTypeError(str(err)) from None

    return convert


def _whole(low: int, high: int | None = None, step: int = 1) -> Callable[[str], Any]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high) or value % step:
            rule = f"a whole number, at least {low}"
            rule += f", at most {high}" if high is not None else ""
            rule += f", a multiple of {step} (the heads)" if step > 1 else ""
            raise ValueError(f"must be {rule}, not {text!r}")
        return value

    return _converted(parse)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"must be a number above 0, not {text!r}")
    return value


def _topology(text: str) -> str:
    if not text.endswith(PROFILE):
        xcoll.Topology.parse(text)
    elif not Path(text).is_file():
        raise ValueError(f"no file {text!r}; xcoll tune --out {text} measures the mesh")
    return text


def _algorithm(text: str) -> str:
    choice = xcoll.Policy(algorithm=text).forced("psum")
    assert choice is not None
    check_choice(repr(text), choice)
    return text
