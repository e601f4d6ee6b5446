"""Gradients over ranks for optax: buckets, compression with error feedback, accumulation."""

from xcoll.gradients.compressed import SyncState as SyncState
from xcoll.gradients.compressor import Compressor as Compressor
from xcoll.gradients.compressor import Feedback as Feedback
from xcoll.gradients.largest import top_k as top_k
from xcoll.gradients.low_rank import powersgd as powersgd
from xcoll.gradients.norms import clip_by_global_norm as clip_by_global_norm
from xcoll.gradients.per_rank import PerRank as PerRank
from xcoll.gradients.per_rank import state_specs as state_specs
from xcoll.gradients.resharding import reshard_residual as reshard_residual
from xcoll.gradients.sampled import random_k as random_k
from xcoll.gradients.signs import sign as sign
from xcoll.gradients.synchronising import sync as sync
from xcoll.gradients.two_shot import error_feedback as error_feedback
from xcoll.gradients.value_and_gradient import ValueAndGrad as ValueAndGrad
from xcoll.gradients.value_and_gradient import value_and_grad as value_and_grad
from xcoll.gradients.windows import AccumulateState as AccumulateState
from xcoll.gradients.windows import accumulate as accumulate
