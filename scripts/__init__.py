"""A package, so that tests import the scripts, and no `scripts` of an environment stands in front of it."""
