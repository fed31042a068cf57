"""`cuda-graphs`: a step captured once and then launched as a whole; the host work between its launches is gone.

The captured region of a step reaches from the first to the last launch of the chosen phases. Its kernels keep their
order and their waits for each other, follow each other more closely, and start from one launch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from foretrace.graph.edit import Mask, remove
from foretrace.graph.insert import HostTask, edge_columns, extend, typical
from foretrace.graph.select import select
from foretrace.graph.taskgraph import Change, EdgeKind, Phase, TaskGraph, TaskKind
from foretrace.techniques.base import Prior, Technique, derived, parameter, prior
