#!/usr/bin/env python3
"""The name the earlier guides launch: one rank of SimpleTuner with the extension on, as ``gh200 train`` starts it.

accelerate launch --config_file accelerate_config_gh200.yaml train.py --config config/gh200_in_memory_example.json
"""

import sys

try:
    from simpletuner_gh200.launch import leave, main
except ModuleNotFoundError as missing:
    sys.exit(
        f"gh200: {missing}. Install this clone first: {sys.executable} -m pip install '.[cuda,codecs]'; gh200 setup"
    )

if __name__ == "__main__":
    leave(main())
