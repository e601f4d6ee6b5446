"""Calibration: measure a mesh, fit the terms of the cost model, keep the profile."""

from xcoll.calibration.result import Calibration as Calibration
from xcoll.calibration.result import Sample as Sample
from xcoll.calibration.result import Term as Term
from xcoll.calibration.tuning import tune as tune
