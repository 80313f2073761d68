"""All planted faults."""

from tests.faults.cache_faults import CACHE_FAULTS
from tests.faults.graph_faults import GRAPH_FAULTS
from tests.faults.serving_faults import SERVING_FAULTS
from tests.faults.state_faults import STATE_FAULTS
from tests.faults.tree_faults import TREE_FAULTS

FAULTS = [*TREE_FAULTS, *SERVING_FAULTS, *GRAPH_FAULTS, *CACHE_FAULTS, *STATE_FAULTS]
