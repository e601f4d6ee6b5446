"""xcoll: a collective compiler pass for JAX.

Write `jax.lax` collectives as ever; put one line on the step:

    step = jax.jit(xcoll.optimize(step), donate_argnums=0)

Every collective is found, planned per mesh axis, rewritten where that helps, and reported.
"""

from xcoll import algorithms as algorithms
from xcoll import aot as aot
from xcoll import codecs as codecs
from xcoll import gradients as gradients
from xcoll import hlo as hlo
from xcoll import sharding as sharding
from xcoll.calibration.result import Calibration as Calibration
from xcoll.calibration.tuning import tune as tune
from xcoll.collectives import all_gather as all_gather
from xcoll.collectives import all_to_all as all_to_all
from xcoll.collectives import pbroadcast as pbroadcast
from xcoll.collectives import pmax as pmax
from xcoll.collectives import pmean as pmean
from xcoll.collectives import pmin as pmin
from xcoll.collectives import ppermute as ppermute
from xcoll.collectives import psum as psum
from xcoll.collectives import psum_scatter as psum_scatter
from xcoll.device_order import make_mesh as make_mesh
from xcoll.errors import HostLostError as HostLostError
from xcoll.errors import PlanMismatchError as PlanMismatchError
from xcoll.errors import ScheduleError as ScheduleError
from xcoll.errors import StartError as StartError
from xcoll.errors import UnknownAxisError as UnknownAxisError
from xcoll.errors import UnsupportedError as UnsupportedError
from xcoll.errors import XcollWarning as XcollWarning
from xcoll.hlo.auditing import audit as audit
from xcoll.hlo.budget_checks import assert_budget as assert_budget
from xcoll.hlo.planned import PlanCheck as PlanCheck
from xcoll.hlo.planned import check_plan as check_plan
from xcoll.hlo.result import Audit as Audit
from xcoll.hosts import Hosts as Hosts
from xcoll.hosts import initialize as initialize
from xcoll.measure import Measured as Measured
from xcoll.measure import measure_error as measure_error
from xcoll.mesh_analysis import explain_mesh as explain_mesh
from xcoll.mesh_report import MeshReport as MeshReport
from xcoll.plan import Plan as Plan
from xcoll.policy import Policy as Policy
from xcoll.primitives import disable as disable
from xcoll.report import Report as Report
from xcoll.report import Site as Site
from xcoll.rooted import all_reduce as all_reduce
from xcoll.rooted import barrier as barrier
from xcoll.rooted import pgather as pgather
from xcoll.rooted import pprod as pprod
from xcoll.rooted import preduce as preduce
from xcoll.rooted import pscatter as pscatter
from xcoll.topology import Topology as Topology
from xcoll.transform import explain as explain
from xcoll.transform import optimize as optimize
