#!/usr/bin/env bash
# Prints a matrix of real runs (test id, scenario, command, outcome); exit code 1 if a test failed. See --help.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/feature_matrix/python.sh
source "$here/feature_matrix/python.sh"
exec "$PYTHON" -m scripts.feature_matrix.main upstream "$@"
