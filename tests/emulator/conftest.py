"""``emulated/`` and ``with_torch/`` run only in the child processes that test_memory_emulated.py starts."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

collect_ignore_glob = [] if os.environ.get("GH200_EMULATED") else ["emulated/*", "with_torch/*"]
