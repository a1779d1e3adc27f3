#!/usr/bin/env bash
# Goes back to where `gh200 rebase start` found this checkout. Works without gh200; asks first unless given --yes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
field() { sed -n "s/^$1: //p" MERGE_LOG.txt | head -n 1; }
backup=$(field "Backup branch")
original=$(field "Original branch")
if [[ -z "$backup" ]] || ! git show-ref --verify --quiet "refs/heads/$backup"; then
  echo "MERGE_LOG.txt names no backup branch that exists" >&2
  exit 1
fi
if [[ "${1:-}" != "--yes" ]]; then
  echo "Uncommitted changes are lost. The backup is $backup."
  read -rp "Leave the current branch for ${original:-$backup}? (y/N) " answer
  [[ "$answer" == [yY] ]] || exit 1
fi
git switch --discard-changes "${original:-$backup}"
if [[ "$(git rev-parse HEAD)" != "$(git rev-parse "$backup")" ]]; then
  echo "note: ${original:-$backup} has moved since; the state of then is in $backup" >&2
fi
if [[ -s gh200-uncommitted.patch ]] && ! git apply gh200-uncommitted.patch; then
  echo "note: what was not committed then is in gh200-uncommitted.patch" >&2
fi
