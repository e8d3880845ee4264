#!/usr/bin/env bash
# Tests in several processes; see dist_run.sh for runs on several machines.
set -euo pipefail

if (( $# < 3 )); then
  echo "usage: $0 CONFIG CHECKPOINT GPUS [arguments of test.py]" >&2
  exit 2
fi
exec bash "$(dirname "${BASH_SOURCE[0]}")/dist_run.sh" \
  test.py "$3" "$1" "$2" --launcher pytorch "${@:4}"
