"""The command line: ``python -m bench.cluster --hosts 2 --devices 4 -- python SCRIPT ARGS...``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.cluster.commands import ClusterError
from bench.cluster.launch import Settings, run
from bench.cluster.network import MOST_HOSTS
from bench.cluster.quantities import parse_duration, parse_rates
from bench.cluster.report import say
from bench.options import Parser, converted, whole

CANT = 125
"""The exit code where the hosts can't be made."""
_MOST_DEVICES = 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command on the hosts; returns the worst exit code."""
    parser = _parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = words.index("--") if "--" in words else len(words)
    options, command = parser.parse_args(words[:split]), words[split + 1 :]
    if not command:
        parser.error("what to run is missing: -- python SCRIPT ARGS...")
    if command[0] in ("python", "python3"):
        command = [sys.executable, *command[1:]]
    elif shutil.which(command[0]) is None:
        parser.error(f"no program {command[0]!r} was found")
    if options.loopback and (options.rate is not None or options.congestion):
        parser.error("--loopback has no network of its own: no --rate, no --congestion")
    try:
        rates = parse_rates(options.rate, options.hosts) if options.rate is not None else ()
    except ValueError as err:
        parser.error(f"--rate: {err}")
    settings = Settings(
        num_hosts=options.hosts,
        num_devices=options.devices,
        rates_bits_per_s=rates,
        congestion=options.congestion,
        loopback=options.loopback,
        timeout_s=options.timeout,
        grace_s=options.grace,
        logs=options.logs,
    )
    try:
        return run(command, settings)
    except ClusterError as err:
        say(str(err))
        return CANT


def _parser() -> Parser:
    parser = Parser(
        prog="python -m bench.cluster",
        usage="%(prog)s [OPTION...] -- python SCRIPT ARGS...",
        description="Runs a script on several hosts of one machine, each a network namespace. It"
        " joins the others with jax.distributed.initialize(), without arguments; `python` is the"
        " interpreter that runs this. The first host's output is printed; the exit code is the"
        " worst of all. Needs root and iproute2.",
    )
    add = parser.add_argument
    add("--hosts", type=whole(1, MOST_HOSTS), default=2, metavar="N", help="hosts (2)")
    add(
        "--devices",
        type=whole(1, _MOST_DEVICES),
        default=4,
        metavar="N",
        help="devices of each (4)",
    )
    add("--rate", metavar="RATE[,RATE...]", help="of all links, or of each host's:"
        " 200mbit, 1.5gbit, 64kbit; without it they have no limit")  # fmt: skip
    add("--congestion", default="", metavar="NAME", help="TCP's: reno, bbr, cubic, where allowed")
    add("--loopback", action="store_true", help="plain processes, without root and any limit")
    add(
        "--timeout",
        type=converted(parse_duration),
        metavar="TIME",
        help="end all after this: 300s, 5min",
    )
    add("--grace", type=converted(parse_duration), default=30.0, metavar="TIME",
        help="how long the others may still run after one has failed (30s)")  # fmt: skip
    add("--logs", type=Path, metavar="DIR", help="keep the output of the other hosts here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
