#!/usr/bin/env bash
# A second copy of NVIDIA's bindings, of the CUDA 12 kind, beside the environment's own: the emulated driver is tested
# with both. Idempotent. Usage: scripts/dev/setup_cuda12_bindings.sh [PYTHON]   (default: .venv/bin/python)
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-.venv/bin/python}
tag=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# The oldest we support where it exists for this Python, so that both ends of the range are tested.
wanted='cuda-bindings>=12.8,<13'
[ "$tag" = 3.11 ] && wanted='cuda-bindings==12.8.*'
target=.cache/cuda12-$tag
if [ -d "$target/cuda/bindings" ]; then
  echo "$target is there"
  exit 0
fi
fresh=$(mktemp -d "${TMPDIR:-/tmp}/cuda12.XXXXXX")
trap 'rm -rf "$fresh"' EXIT
if command -v uv >/dev/null; then
  env -u PIP_FIND_LINKS uv pip install --quiet --python "$python" --no-deps --target "$fresh/site" "$wanted"
else
  "$python" -m pip install --quiet --no-deps --target "$fresh/site" "$wanted"
fi
mkdir -p .cache
rm -rf "$target"
mv "$fresh/site" "$target"
echo "made $target"
