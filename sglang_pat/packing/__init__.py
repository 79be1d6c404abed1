"""From radix-tree events to a plan of work items. Knows nothing of torch or SGLang.

C++ makes the plans (native.py, csrc/packing). tests/oracle makes the same in Python, which is easier to read.
"""

from sglang_pat.packing.cost import CostModel
from sglang_pat.packing.plan import OPEN, Plan, WorkItem
from sglang_pat.packing.prices import POLICIES, PackConfig
from sglang_pat.packing.spec import FORMATS, AttentionSpec
from sglang_pat.packing.tiles import CPU_TILES, TileTable, WideSteps
from sglang_pat.packing.tree import Batch, Node
