"""The command line: ``python -m bench.wire [OPTION...]``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console

from bench.cluster.commands import ClusterError
from bench.timing import write_json
from bench.wire.clusters import FailedError, measured
from bench.wire.options import jobs, parsed
from bench.wire.tables import MEANING, cluster_tables
from xcoll.printing import as_text

_WIDTH = 150


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table a collective, and returns 0; the code of a cluster that failed."""
    options = parsed(list(sys.argv[1:] if arguments is None else arguments))
    found: list[dict[str, Any]] = []
    code = 0
    try:
        for job in jobs(options):
            found.append(measured(job, options.congestion, options.timeout))
            if options.json:  # after each: a long run that is ended keeps what it has measured
                write_json(options.json, {"version": 1, "clusters": found})
            width = Console().width if sys.stdout.isatty() else _WIDTH
            for table in cluster_tables(found[-1], width):
                show(table)
            show("")
    except FailedError as err:
        code = err.code
    except ClusterError as err:
        print(f"bench.wire: {err}", file=sys.stderr)
        code = 125
    if found:
        show(MEANING)
        rows = [row for one in found for cell in one["cells"] for row in cell["rows"]]
        verdicts = [row["met"] for row in rows if row["met"] is not None]
        if verdicts:
            show(f"{sum(verdicts)} of {len(verdicts)} targets met")
    return code


def show(renderable: Any) -> None:
    """Prints a table or a line: in colour on a terminal, plain and wide into a file."""
    if sys.stdout.isatty():
        Console(highlight=False).print(renderable)
    else:
        print(as_text(renderable, least_width=_WIDTH), flush=True)


if __name__ == "__main__":
    sys.exit(main())
