"""Hardware figures as versioned data, and what they are read into."""

from xcoll.hardware.curves import CodecRate as CodecRate
from xcoll.hardware.curves import Curve as Curve
from xcoll.hardware.links import AxisLinks as AxisLinks
from xcoll.hardware.links import Device as Device
from xcoll.hardware.links import Level as Level
from xcoll.hardware.links import Link as Link
from xcoll.hardware.tables import figure as figure
from xcoll.hardware.tables import kinds as kinds
from xcoll.hardware.tables import load as load
