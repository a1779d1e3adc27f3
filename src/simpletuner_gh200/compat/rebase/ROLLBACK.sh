#!/usr/bin/env bash
# Goes back to where `gh200 rebase start` found this checkout. Works without gh200; asks first unless given --yes.
# Nothing is deleted: the new branch is renamed, the backup branch stays, changes in between are kept as a patch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
field() { sed -n "s/^$1: //p" MERGE_LOG.txt | head -n 1; }
backup=$(field "Backup branch")
original=$(field "Original branch")
new=$(field "New branch")
stamp=$(field "Started")
state=$(git rev-parse --git-path gh200-rebase)
if [[ -z "$backup" ]] || ! git show-ref --verify --quiet "refs/heads/$backup"; then
  echo "MERGE_LOG.txt names no backup branch that exists" >&2
  exit 1
fi
if [[ "${1:-}" != "--yes" ]]; then
  read -rp "Leave the current branch for ${original:-$backup}? Uncommitted changes are kept as a patch only. (y/N) " answer
  [[ "$answer" == [yY] ]] || exit 1
fi
mkdir -p "$state"
kept="$state/uncommitted-$(date +%s).patch"
git diff --binary HEAD >"$kept"
[[ -s "$kept" ]] || rm "$kept"
if [[ "$(git branch --show-current)" == "$new" && -e simpletuner/gh200 ]]; then
  # What was copied and not committed when it was interrupted goes with the branch it belongs to.
  git add --force -- simpletuner/gh200
  git -c core.hooksPath=/dev/null -c commit.gpgsign=false commit --quiet --message Interrupted -- simpletuner/gh200 || true
fi
git switch --quiet --discard-changes "${original:-$backup}"
if git show-ref --verify --quiet "refs/heads/$new"; then
  git branch -M "$new" "gh200-rolled-back-$stamp"
fi
echo "$(date -u +"%Y-%m-%d %H:%M:%SZ") rolled back" >>MERGE_LOG.txt
if [[ -e "$state/journal.json" ]]; then
  mv "$state/journal.json" "$state/journal-$stamp.json"
fi
echo "on ${original:-$backup}; the backup branch $backup is kept"
if [[ "$(git rev-parse HEAD)" != "$(git rev-parse "$backup")" ]]; then
  echo "note: ${original:-$backup} has moved since; the state of then is in $backup" >&2
elif [[ -s gh200-uncommitted.patch ]] && ! git apply gh200-uncommitted.patch; then
  echo "note: what was not committed then is in gh200-uncommitted.patch, which does not apply by itself" >&2
fi
