"""One file per subcommand. A file exports ``COMMAND``; see ``simpletuner_gh200.cli.command``."""
