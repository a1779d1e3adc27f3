"""The ``gh200`` command. Commands parse and print; the rooms below do the work."""
