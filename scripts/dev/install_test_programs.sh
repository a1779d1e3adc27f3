#!/bin/sh
# What some tests look through, from Debian: Chromium (the report, as a reader sees it) and every shell that `gh200 env`
# speaks to. CI calls this and fails where it fails; a person may too, or sees those tests skipped.
set -eu
missing=""
for program in chromium zsh fish ksh tcsh; do
    command -v "$program" >/dev/null 2>&1 || missing="$missing $program"
done
[ -n "$missing" ] || exit 0
as_root=""
[ "$(id -u)" -eq 0 ] || as_root="sudo"
$as_root apt-get update -q
# tcsh's package has csh too; a page without any font has no text.
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing fonts-dejavu-core
