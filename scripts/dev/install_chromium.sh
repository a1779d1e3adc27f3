#!/bin/sh
# Debian's Chromium, for the test that looks at the report as a reader does. CI calls this; a person may too.
set -eu
if command -v chromium >/dev/null 2>&1; then
    exit 0
fi
as_root=""
[ "$(id -u)" -eq 0 ] || as_root="sudo"
$as_root apt-get update -q
$as_root apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core
