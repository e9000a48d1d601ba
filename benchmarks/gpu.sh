#!/bin/sh
# What one NVIDIA GPU makes of this code: tests, learning, inference, whole runs. For a
# machine with Python 3.12 and PyTorch, without a network:
#
#     make gpu-bundle                      # Here: wheels into dist/gpu
#     sh benchmarks/gpu.sh dist/gpu OUT    # There: OUT/gpu.json, gpu.png, tests.txt
#
# Without a GPU the parts that need one are left out, and say so.
set -eu
wheels=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
venv=$(mktemp -d)/venv
python3.12 -m venv --system-site-packages "$venv"
"$venv/bin/python" -m pip install --quiet --no-index --no-deps "$wheels"/*.whl
cd "$(dirname "$0")/.."
if "$venv/bin/python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"
then
    "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/cuda.py \
        > "$out/tests.txt" 2>&1 || echo "tests failed: $out/tests.txt"
    tail -n 3 "$out/tests.txt"
else
    echo "no GPU here: tests/cuda.py is left out"
fi
exec "$venv/bin/python" benchmarks/gpu.py --out "$out"
