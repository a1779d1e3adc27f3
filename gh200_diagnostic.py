#!/usr/bin/env python3
"""The name the earlier guides use for ``gh200 doctor``; takes the same options."""

import sys

from simpletuner_gh200.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["doctor"]
    main()
