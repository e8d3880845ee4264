#!/usr/bin/env bash
# Trains in several processes; see dist_run.sh for runs on several machines.
set -euo pipefail

if (( $# < 2 )); then
  echo "usage: $0 CONFIG GPUS [arguments of train.py]" >&2
  exit 2
fi
exec bash "$(dirname "${BASH_SOURCE[0]}")/dist_run.sh" \
  train.py "$2" "$1" --launcher pytorch "${@:3}"
