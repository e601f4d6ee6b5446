"""Sharding rules: logical names of dimensions, and the mesh axes that they are split over."""

from xcoll.sharding.presets import data_parallel as data_parallel
from xcoll.sharding.presets import expert_parallel as expert_parallel
from xcoll.sharding.presets import fsdp as fsdp
from xcoll.sharding.presets import fsdp_tensor as fsdp_tensor
from xcoll.sharding.presets import sequence_parallel as sequence_parallel
from xcoll.sharding.presets import tensor_parallel as tensor_parallel
from xcoll.sharding.rules import Rules as Rules
from xcoll.sharding.tensor_costs import TensorCost as TensorCost
