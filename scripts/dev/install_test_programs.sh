#!/bin/sh
# What `make` targets need from Debian, installed where it is missing and this user may (root, or sudo without a password); else one line
# names it and the command that installs it. Chromium (the report and the Web UI, as a reader sees them), FFmpeg (audio), a C compiler (the
# emulated driver), shells for `gh200 env` and completion, a Slurm with what its scripts are checked by; and with npm, from the package
# registry, the libraries that the Web UI's pages load.
#
#     sh scripts/dev/install_test_programs.sh                 all that tests need
#     sh scripts/dev/install_test_programs.sh gcc shellcheck  these
set -eu
cd "$(dirname "$0")/../.."
PATH="$PATH:/usr/sbin:/sbin"
[ $# -gt 0 ] || set -- chromium ffmpeg gcc git make npm zsh fish ksh shellcheck slurmctld slurmd srun munged ip
missing=""
for program in "$@"; do
    case $program in # packages of another name
    aarch64-linux-gnu-gcc) package="gcc-aarch64-linux-gnu libc6-dev-arm64-cross" ;;
    ip) package=iproute2 ;;
    munged) package=munge ;;
    qemu-aarch64) package=qemu-user ;;
    srun) package=slurm-client ;;
    *) package=$program ;;
    esac
    command -v "$program" >/dev/null 2>&1 || missing="$missing $package"
    case $program in
    chromium) [ -d /usr/share/fonts/truetype ] || missing="$missing fonts-dejavu-core" ;; # a page without any font has no text
    gcc) [ -e /usr/include/stdlib.h ] || missing="$missing libc6-dev" ;;
    esac
done
if [ -n "$missing" ]; then
    as_root=""
    [ "$(id -u)" -eq 0 ] || as_root="sudo -n"
    if ! command -v apt-get >/dev/null 2>&1 || { [ -n "$as_root" ] && ! $as_root true 2>/dev/null; }; then
        echo "missing:$missing; install with: sudo apt-get install --no-install-recommends$missing" >&2
        exit 1
    fi
    echo "installing:$missing" >&2
    $as_root apt-get update -qq >/dev/null
    # shellcheck disable=SC2086 # several words
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi
case " $* " in *" npm "*) python3 -m scripts.dev.page_libraries ;; esac
