"""The names of the package: `lazy.py` loads them from here."""

from foretrace.testing.policy import PolicyConformance as PolicyConformance
from foretrace.testing.policy import small_jobs as small_jobs
from foretrace.testing.rows import RowsConformance as RowsConformance
from foretrace.testing.search import SearchConformance as SearchConformance
from foretrace.testing.sync import SyncPolicyConformance as SyncPolicyConformance
from foretrace.testing.technique import TechniqueConformance as TechniqueConformance
from foretrace.testing.technique import recorded as recorded
from foretrace.testing.technique import small_training as small_training
