"""Around the run: launch, environment, project files, baseline, monitor, report; a tree of one's own and its rebase."""
