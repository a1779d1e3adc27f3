#!/usr/bin/env python3
"""The name the earlier guides use for ``gh200 doctor``; takes the same options."""

import sys

try:
    from simpletuner_gh200.cli.main import main
except ModuleNotFoundError as missing:
    sys.exit(
        f"gh200: {missing}. Install this clone first: {sys.executable} -m pip install '.[cuda,codecs]'; gh200 setup"
    )

if __name__ == "__main__":
    sys.argv[1:1] = ["doctor"]
    main()
