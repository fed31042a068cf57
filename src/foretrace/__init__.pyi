"""The names of the package: `lazy.py` loads them from here."""

from foretrace import graph as graph
from foretrace import report as report
from foretrace import simulate as simulate
from foretrace import techniques as techniques
from foretrace import trace as trace
from foretrace.errors import ForetraceError as ForetraceError
from foretrace.flow import Run as Run
from foretrace.flow import Scenario as Scenario
from foretrace.flow import compare as compare
from foretrace.flow import estimate as estimate
from foretrace.flow import load as load
from foretrace.flow import read as read
from foretrace.flow import scenario as scenario
from foretrace.graph.taskgraph import TaskGraph as TaskGraph
from foretrace.simulate.timeline import Timeline as Timeline
from foretrace.trace.recorder import record as record
from foretrace.trace.trace import Trace as Trace
from foretrace.training.training import Training as Training
from foretrace.version import __version__ as __version__
