"""Codecs: stateless encodings of payloads on the wire, each with its law of error."""

from xcoll.codecs.base import FLOOR as FLOOR
from xcoll.codecs.base import Codec as Codec
from xcoll.codecs.block_int4 import Int4 as Int4
from xcoll.codecs.block_int4 import int4 as int4
from xcoll.codecs.block_int8 import Int8 as Int8
from xcoll.codecs.block_int8 import int8 as int8
from xcoll.codecs.casting import Cast as Cast
from xcoll.codecs.casting import cast as cast
from xcoll.codecs.fixed import FixedPoint as FixedPoint
from xcoll.codecs.fixed import fixed_point as fixed_point
from xcoll.codecs.table import CODECS as CODECS
from xcoll.codecs.table import from_dict as from_dict
from xcoll.codecs.table import named as named
