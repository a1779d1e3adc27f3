"""``emulated/`` and ``with_torch/`` run only in the child processes that test_memory_emulated.py starts."""

import os

collect_ignore_glob = [] if os.environ.get("GH200_EMULATED") else ["emulated/*", "with_torch/*"]
