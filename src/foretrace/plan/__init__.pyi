"""What commands use of the package: `lazy.py` loads it from here."""

from foretrace.plan import answer as answer
from foretrace.plan import cloud as cloud
from foretrace.plan import compression_advice as compression_advice
from foretrace.plan import export as export
from foretrace.plan import look_ups as look_ups
from foretrace.plan import second_order as second_order
from foretrace.plan import sync as sync
from foretrace.plan.codesign.answer import codesign as best_design
from foretrace.plan.codesign.schedule import layer_schedules as layer_schedules
from foretrace.plan.codesign.search import DesignProblem as DesignProblem
from foretrace.plan.data.neighbour_caches import fan_outs as fan_outs
from foretrace.plan.data.neighbour_caches import samplers as samplers
from foretrace.plan.data.plan import GraphSource as GraphSource
from foretrace.plan.data.plan import plan_data as plan_data
from foretrace.plan.data.plan import try_plan as try_data
from foretrace.plan.export.launch import LaunchedPlan as LaunchedPlan
from foretrace.plan.look_ahead.plan import CacheQuestion as CacheQuestion
from foretrace.plan.look_ahead.plan import plan_cache as plan_cache
from foretrace.plan.look_ahead.plan import trace as cache_trace
from foretrace.plan.look_ahead.trial import try_cache as try_cache
from foretrace.plan.result import OptimiseRequest as OptimiseRequest
from foretrace.plan.result import size as size_of
from foretrace.plan.rewrite.session import RewriteRequest as RewriteRequest
from foretrace.plan.rewrite.session import rewrite_named as rewrite_named
from foretrace.plan.rows.plan import exchange as exchange_rows
from foretrace.plan.rows.plan import plan_rows as plan_rows
from foretrace.plan.rows.plan import rows_of as rows_of_placement
from foretrace.plan.rows.plan import run_rows as run_rows
from foretrace.plan.soap.plan import plan_soap as plan_soap
from foretrace.plan.transformers.alpa import unequal_stages as unequal_stages
from foretrace.plan.transformers.plan import plan_decoder as plan_decoder
from foretrace.plan.transformers.shape import OTHERS as TRANSFORMERS
from foretrace.plan.transformers.space import ParallelismProblem as ParallelismProblem
from foretrace.search.named import search_named as search_named

__all__ = [  # under names of their own
    "TRANSFORMERS",
    "best_design",
    "cache_trace",
    "exchange_rows",
    "rows_of_placement",
    "size_of",
    "try_data",
]
