"""The options of the command line, and the jobs that they ask for."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from functools import partial

from bench.cluster.quantities import parse_duration, parse_rate
from bench.options import Parser, converted, file, output_file, several, whole
from bench.wire.bounds import COLLECTIVES
from bench.wire.jobs import VARIANTS, Job, parse_cluster
from xcoll.units import read_bytes

SMALL_BYTES = (64, 256, 1024, 4096)
SMALL_CALLS = 50


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Returns the options; leaves with exit code 2 where one is wrong."""
    parser = _parser()
    found: argparse.Namespace = parser.parse_args(words)
    if found.loopback and found.congestion:
        parser.error("--loopback has no network of its own: no --congestion")
    found.congestion = found.congestion or ("" if found.loopback else "reno")
    if not jobs(found):
        parser.error("there is nothing to measure: too many lists are empty")
    return found


def jobs(options: argparse.Namespace) -> list[Job]:
    """Returns what to measure: payloads on each cluster at each rate, then small messages."""
    common = {
        "loopback": options.loopback,
        "profile": str(options.profile or ""),
        "tune_s": options.tune,
        "torch_python": options.torch_python,
        "mpi_python": options.mpi_python,
        "breakdown": options.breakdown,
        "cell_s": options.cell,
        "rounds": options.rounds,
    }
    large = [
        Job(
            hosts=hosts,
            devices=devices,
            rate_bits_per_s=rate,
            collectives=tuple(options.collective),
            payloads_bytes=tuple(options.payload),
            variants=tuple(options.variant),
            calls=1,
            **common,
        )
        for hosts, devices in options.cluster
        for rate in options.rate
    ]
    small = [
        Job(
            hosts=hosts,
            devices=devices,
            rate_bits_per_s=rate,
            collectives=("psum",),
            payloads_bytes=tuple(options.small_payload),
            variants=("lax", "exact"),
            calls=SMALL_CALLS,
            **common,
        )
        for hosts, devices in options.small_cluster
        for rate in options.small_rate
    ]
    return [job for job in large + small if job.collectives and job.payloads_bytes and job.variants]


_QUICK = {
    "cluster": "2x4",
    "rate": "200mbit",
    "payload": "16MiB",
    "rounds": 3,
}


def _parser() -> Parser:
    parser = Parser(
        _QUICK,
        prog="python -m bench.wire",
        description="Times collectives on hosts with slow links: jax.lax, xcoll exact and with"
        " codecs between hosts, and other libraries beside them. Makes the hosts on this machine,"
        " which takes root and iproute2. Lists are separated by commas, and empty ones leave out.",
    )
    add = parser.add_argument
    add("--cluster", type=_many(parse_cluster), default="2x4,4x2", metavar="HxD[,...]",
        help="hosts x devices of each (2x4,4x2)")  # fmt: skip
    add("--rate", type=_many(parse_rate), default="50mbit,200mbit,1gbit", metavar="RATE[,...]",
        help="of each host's link, one way (50mbit,200mbit,1gbit)")  # fmt: skip
    add("--payload", type=_many(_bytes), default="1MiB,16MiB,64MiB", metavar="BYTES[,...]",
        help="float32, of each device (1MiB,16MiB,64MiB)")  # fmt: skip
    add("--collective", type=_many(_one_of(COLLECTIVES)), default=",".join(COLLECTIVES),
        metavar="NAME[,...]", help="all of them")  # fmt: skip
    add("--variant", type=_many(_one_of(VARIANTS)), default=",".join(VARIANTS),
        metavar="NAME[,...]", help=",".join(VARIANTS))  # fmt: skip
    add("--small-cluster", type=_many(parse_cluster), default="4x1", metavar="HxD[,...]",
        help="for small messages (4x1)")  # fmt: skip
    add("--small-rate", type=_many(parse_rate), default="200mbit", metavar="RATE[,...]",
        help="for small messages (200mbit)")  # fmt: skip
    add("--small-payload", type=_many(_bytes), default=",".join(map(str, SMALL_BYTES)),
        metavar="BYTES[,...]", help="of small messages (64 to 4096)")  # fmt: skip
    add("--rounds", type=whole(1), default=7, metavar="N",
        help="timed turns of each variant (7)")  # fmt: skip
    add("--cell", type=converted(parse_duration), default=120.0, metavar="TIME",
        help="fewer rounds, down to 3, where a payload would take longer (2min)")  # fmt: skip
    plan = parser.add_mutually_exclusive_group().add_argument
    plan("--profile", type=file, metavar="FILE", help="plan with what `xcoll tune` has measured")
    plan("--tune", type=converted(parse_duration), default=0.0, metavar="TIME",
         help="calibrate each cluster first, and plan with that (else for its rate)")  # fmt: skip
    add("--torch-python", type=_program, default="", metavar="PATH",
        help="an interpreter with PyTorch, for torch.distributed with Gloo")  # fmt: skip
    add("--mpi-python", type=_program, default="", metavar="PATH",
        help="an interpreter with mpi4py; mpirun is found on PATH")  # fmt: skip
    add("--congestion", metavar="NAME",
        help="TCP's: reno, bbr, cubic, where allowed (reno)")  # fmt: skip
    add("--breakdown", action="store_true",
        help="show where the time goes even where no target is missed")  # fmt: skip
    add("--loopback", action="store_true",
        help="plain processes, without root and any limit: to try it out")  # fmt: skip
    add("--quick", action="store_true",
        help="three minutes: 16MiB on 2x4 at 200mbit, and small messages")  # fmt: skip
    add("--timeout", type=converted(parse_duration), default=4 * 3600.0, metavar="TIME",
        help="end a cluster after this (4h)")  # fmt: skip
    add("--json", type=output_file, metavar="FILE", help="write the figures here too")
    return parser


_many = partial(several, fewest=0)


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def one(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r}: must be one of {', '.join(names)}")
        return text

    return one


def _bytes(text: str) -> int:
    num_bytes = read_bytes("a payload of", text)
    if num_bytes < 4:
        raise ValueError(f"{text!r}: a payload is at least one float32, of 4 bytes")
    return num_bytes


def _program(text: str) -> str:
    found = shutil.which(text)
    if text and found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: no such program")
    return found or ""
