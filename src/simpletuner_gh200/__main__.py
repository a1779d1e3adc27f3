"""``python -m simpletuner_gh200`` is the ``gh200`` command."""

from simpletuner_gh200.cli.main import main

main()
