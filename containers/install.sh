#!/bin/sh
# What both containers install: as root, on Ubuntu 24.04, in a folder that has the files of a checkout.
set -eu
export DEBIAN_FRONTEND=noninteractive RUSTUP_HOME=/tmp/rustup CARGO_HOME=/tmp/cargo
apt-get update
# gcc and Python's headers stay, since torch compiles kernels while it trains. g++ and Rust are for the two packages of
# SimpleTuner's that have no wheel for aarch64.
apt-get install -y --no-install-recommends \
  ca-certificates ffmpeg g++ gcc git libgl1 libglib2.0-0t64 libnuma1 make python3-dev python3-venv rustup
rustup set profile minimal
rustup default stable
python3 -m venv /opt/gh200
GH200_BUILD_ALLOCATOR=1 /opt/gh200/bin/pip install --no-cache-dir '.[cuda,codecs]'
PIP_NO_CACHE_DIR=1 /opt/gh200/bin/gh200 setup
/opt/gh200/bin/gh200 upstream check
apt-get purge -y rustup
rm -rf /tmp/rustup /tmp/cargo /var/lib/apt/lists/*
