#!/usr/bin/env bash
# Builds the operators for the card at hand, tests them on it and times them,
# in a few minutes. Needs torch, pytest, ninja, setuptools and nvcc; mmlaplace
# need not be installed.
#
#   tools/check_cuda.sh [table.json]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export PYTHONPATH=$PWD MMLAPLACE_BUILD=cuda MMLAPLACE_BACKEND=native
export CUBLAS_WORKSPACE_CONFIG=:4096:8
seconds() { printf '%s: %d s\n' "$1" "$SECONDS"; }

python -c 'from mmlaplace.ops import backend; print(backend.status())'
seconds build

tests=(tests/test_ops/test_{laplacian_kernel,newton_schulz,laplacian_attention,native}.py)
# What is about the CPU alone, or takes minutes of plain torch.
skip='not (reference or threads or instruction_set or exact or gradcheck)'
export MMLAPLACE_TEST_DEVICE=cuda
python -m pytest -q -p no:cacheprovider "${tests[@]}" -k "$skip"
seconds tests

if command -v compute-sanitizer > /dev/null; then
  small='native and odd_sizes and (15- or 33-) and float32'
  for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 1 python -m pytest -q \
      -p no:cacheprovider "${tests[@]}" -k "$small"
  done
  seconds sanitizers
fi

python tools/benchmark_ops.py --device cuda --sizes stages --rounds 5 \
  ${1:+--json "$1"}
seconds table

# Last, for compiling takes most of the time.
python tools/benchmark_ops.py --device cuda --sizes stages --rounds 5 \
  --ops attention --compile
seconds 'table with the compiled reference'
