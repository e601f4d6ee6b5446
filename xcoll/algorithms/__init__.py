"""Collective algorithms: each builds a `xcoll.schedule.Schedule` and states its closed form."""

from xcoll.algorithms.catalog import ALGORITHMS as ALGORITHMS
from xcoll.algorithms.catalog import Algorithm as Algorithm
from xcoll.algorithms.choices import bidirectional_ring as bidirectional_ring
from xcoll.algorithms.choices import bruck as bruck
from xcoll.algorithms.choices import direct as direct
from xcoll.algorithms.choices import double_tree as double_tree
from xcoll.algorithms.choices import halving_doubling as halving_doubling
from xcoll.algorithms.choices import hierarchical as hierarchical
from xcoll.algorithms.choices import native as native
from xcoll.algorithms.choices import pairwise as pairwise
from xcoll.algorithms.choices import recursive_doubling as recursive_doubling
from xcoll.algorithms.choices import ring as ring
from xcoll.algorithms.choices import torus as torus
from xcoll.algorithms.choices import tree as tree
from xcoll.algorithms.registry import build as build
from xcoll.algorithms.registry import closed_form as closed_form
from xcoll.algorithms.registry import part_of as part_of
from xcoll.algorithms.registry import supports as supports
from xcoll.choosing import Option as Option
from xcoll.choosing import check_choice as check_choice
