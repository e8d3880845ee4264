#!/usr/bin/env bash
# Tests operators and models with several versions of Python and torch:
#
#   bash tools/test_versions.sh [PYTHON=TORCH ...]
#
# Each pair, such as 3.9=2.4.0, gets an environment of its own in a temporary
# folder with a blank and letters beyond ASCII in its name, about 6 GiB that
# are removed again, and one line of a table, printed at the end. mmengine and
# mmcv-lite are all that is there beside torch. MMLAPLACE_BUILD=none has the
# operators compiled at their first use, not while they are installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

rows=("$@")
if (( $# == 0 )); then
  rows=(3.9=2.4.0 3.10=2.6.0 3.11=2.11.0 3.12=2.15.0 3.13=2.15.0)
fi
temp=$(mktemp -d)
trap 'rm -rf "$temp"' EXIT

test_row() {
  local python=$1 torch=$2 folder="$temp/a path – $1"
  local venv="$folder/venv" source="$folder/source" found operators result
  mkdir -p "$source"
  git ls-files -z | xargs -0 cp --parents --target-directory "$source"
  "python$python" -m venv "$venv"
  install() {
    "$venv/bin/python" -m pip install --quiet --no-cache-dir "$@"
  }
  export TORCH_EXTENSIONS_DIR="$folder/cache"
  # mmengine finds packages through a module that setuptools 82 dropped.
  install "torch==$torch" 'setuptools<81' wheel ninja numpy pytest \
    mmengine==0.10.7 mmcv-lite==2.1.0
  cd "$source"
  install --no-build-isolation --editable .
  found=$("$venv/bin/python" -c 'import numpy, platform, torch
print(platform.python_version(), torch.__version__, numpy.__version__,
      sep=" | ")')
  operators=$("$venv/bin/python" -m mmlaplace.collect_env 2> /dev/null |
    sed -n 's/^cpu operators: \(yes\|no\).*/\1/p')
  result=$("$venv/bin/python" -m pytest tests/test_ops tests/test_models |
    tee "$folder/log" | tail -n 1 | tr -d =) || cat "$folder/log"
  echo "| $found | $operators | $(echo $result) |" >> "$temp/table"
}

for row in "${rows[@]}"; do
  # A row that fails must not hide the others; after || it would not stop.
  set +e
  (set -e; test_row "${row%%=*}" "${row#*=}")
  (( $? == 0 )) || echo "| ${row%%=*} | ${row#*=} | | | failed |" >> "$temp/table"
  set -e
  rm -rf "$temp"/a*
done
echo '| Python | torch | numpy | operators compiled | tests |'
echo '|---|---|---|---|---|'
cat "$temp/table"
! grep -qE 'failed|error' "$temp/table"
