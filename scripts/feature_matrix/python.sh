# The Python to test with: GH200_PYTHON, else the active environment's, else the checkout's own.
if [[ -n "${GH200_PYTHON:-}" ]]; then
  PYTHON=$GH200_PYTHON
elif [[ -n "${VIRTUAL_ENV:-}" ]]; then
  PYTHON=$VIRTUAL_ENV/bin/python
elif [[ -x "$here/../.venv/bin/python" ]]; then
  PYTHON=$here/../.venv/bin/python
else
  PYTHON=python3
fi
# The matrix is a package of the checkout, wherever it is started from.
vendored=$here/../simpletuner/gh200/vendor
export PYTHONPATH="$here/..$([[ -d $vendored ]] && echo ":$vendored")${PYTHONPATH:+:$PYTHONPATH}"
