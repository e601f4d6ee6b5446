"""Reading compiled programs: their collectives, what those send and take, budgets, comparisons."""

from xcoll.hlo.auditing import audit as audit
from xcoll.hlo.broken import Blame as Blame
from xcoll.hlo.broken import Breach as Breach
from xcoll.hlo.budget_checks import assert_budget as assert_budget
from xcoll.hlo.budget_checks import breaches as breaches
from xcoll.hlo.budgets import Budget as Budget
from xcoll.hlo.budgets import Limit as Limit
from xcoll.hlo.budgets import read_budget as read_budget
from xcoll.hlo.changes import Comparison as Comparison
from xcoll.hlo.comparing import compare as compare
from xcoll.hlo.count import axes_of as axes_of
from xcoll.hlo.count import crossing_bytes as crossing_bytes
from xcoll.hlo.count import sends as sends
from xcoll.hlo.count import wire_bytes as wire_bytes
from xcoll.hlo.planned import PlanCheck as PlanCheck
from xcoll.hlo.planned import check_plan as check_plan
from xcoll.hlo.reader import KINDS as KINDS
from xcoll.hlo.reader import Collective as Collective
from xcoll.hlo.reader import collectives as collectives
from xcoll.hlo.renaming import canonical as canonical
from xcoll.hlo.result import Audit as Audit
from xcoll.hlo.rows import Advice as Advice
from xcoll.hlo.rows import Row as Row
