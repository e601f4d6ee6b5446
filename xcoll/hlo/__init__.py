"""Reading compiled programs: their collectives, what those send, and whether two are equal."""

from xcoll.hlo.count import axes_of as axes_of
from xcoll.hlo.count import crossing_bytes as crossing_bytes
from xcoll.hlo.count import sends as sends
from xcoll.hlo.count import wire_bytes as wire_bytes
from xcoll.hlo.reader import KINDS as KINDS
from xcoll.hlo.reader import Collective as Collective
from xcoll.hlo.reader import collectives as collectives
from xcoll.hlo.renaming import canonical as canonical
