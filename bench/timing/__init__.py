"""Times of programs that run on several processes, and the machine they are from.

    meeting = Meeting("wire")
    times = interleaved({"psum": lambda: f(x), "int8": lambda: g(x)}, rounds=9, meeting=meeting)
    facts = machine(meeting)

A time runs from the earliest start to the latest end over all processes: one alone can finish with
its data still in a socket's buffer.
"""

from bench.timing.files import write_json as write_json
from bench.timing.machine import Machine as Machine
from bench.timing.machine import machine as machine
from bench.timing.meeting import Meeting as Meeting
from bench.timing.rounds import NOBODY as NOBODY
from bench.timing.rounds import Elsewhere as Elsewhere
from bench.timing.rounds import Span as Span
from bench.timing.rounds import interleaved as interleaved
from bench.timing.times import Times as Times
from bench.timing.times import over_processes as over_processes
