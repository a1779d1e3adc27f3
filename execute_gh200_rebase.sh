#!/usr/bin/env bash
# Run in a git checkout of SimpleTuner (or name one with REPO=DIR): goes on with a rebase under way, or starts one.
#   execute_gh200_rebase.sh [--rollback] [--skip-tests]
# ONTO (default <remote>/main) and REMOTE (default upstream if there is such a remote, else origin) say onto what.
set -euo pipefail
usage() { sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
# In a tree with the package in it the command lies beside this script.
command -v gh200 >/dev/null || PATH=$PATH:$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=${REPO:-.}
skip=()
action=start
for argument in "$@"; do
  case $argument in
    --rollback) action=rollback ;;
    --skip-tests) skip=(--skip-tests) ;;
    -h | --help) usage; exit 0 ;;
    *) echo "unknown argument: $argument" >&2; usage >&2; exit 2 ;;
  esac
done
if [[ $action == rollback ]]; then
  exec gh200 rebase rollback --repo "$repo"
fi
state=$(git -C "$repo" rev-parse --git-path gh200-rebase/journal.json)
if (cd "$repo" && [[ -e $state ]]) && ! gh200 rebase status --repo "$repo" --json | tail -n 1 | grep -q '"finished": true'; then
  exec gh200 rebase continue --repo "$repo"
fi
remote=${REMOTE:-$(git -C "$repo" remote | grep -x upstream || echo origin)}
exec gh200 rebase start --repo "$repo" --remote "$remote" --onto "${ONTO:-$remote/main}" "${skip[@]}"
