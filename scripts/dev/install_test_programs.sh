#!/bin/sh
# What tests need, from Debian: Chromium (the report and the Web UI, as a reader sees them), FFmpeg (audio), a C compiler (the emulated
# driver), every shell that `gh200 env` speaks to, and a Slurm with what its scripts are checked by; and from the package registry the
# libraries that the Web UI's pages load. CI calls this and fails where it fails; a person may too, or sees those tests skipped.
set -eu
cd "$(dirname "$0")/../.."
missing=""
PATH="$PATH:/usr/sbin:/sbin"
for program in chromium ffmpeg gcc git make npm zsh fish ksh tcsh shellcheck slurmctld slurmd; do
    command -v "$program" >/dev/null 2>&1 || missing="$missing $program"
done
for pair in srun:slurm-client munged:munge ip:iproute2; do # packages of another name
    command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair#*:}"
done
[ -d /usr/share/fonts/truetype ] || missing="$missing fonts-dejavu-core" # a page without any font has no text
[ -e /usr/include/stdlib.h ] || missing="$missing libc6-dev"
if [ -n "$missing" ]; then
    as_root=""
    [ "$(id -u)" -eq 0 ] || as_root="sudo"
    if ! command -v apt-get >/dev/null 2>&1 || { [ -n "$as_root" ] && ! command -v sudo >/dev/null 2>&1; }; then
        echo "install_test_programs: missing:$missing; needs Debian's apt-get, and to be root or have sudo" >&2
        exit 1
    fi
    $as_root apt-get update -q
    # tcsh's package has csh too.
    # shellcheck disable=SC2086 # several words
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing
fi
python3 -m scripts.dev.page_libraries
