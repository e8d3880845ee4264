#!/usr/bin/env bash
# Tests in several processes, one for each GPU (or on the CPU without any).
# NNODES, NODE_RANK, MASTER_ADDR and PORT describe a run on several machines.
set -euo pipefail

if (( $# < 3 )); then
  echo "usage: $0 CONFIG CHECKPOINT GPUS [arguments of test.py]" >&2
  exit 2
fi
config=$1
checkpoint=$2
gpus=$3
shift 3

tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$tools/..${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes "${NNODES:-1}" \
  --node-rank "${NODE_RANK:-0}" \
  --nproc-per-node "$gpus" \
  --master-addr "${MASTER_ADDR:-127.0.0.1}" \
  --master-port "${PORT:-29500}" \
  "$tools/test.py" "$config" "$checkpoint" --launcher pytorch "$@"
