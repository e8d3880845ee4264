#!/usr/bin/env bash
# What dist_train.sh and dist_test.sh share: dist_run.sh TOOL GPUS [arguments]
# runs a tool in several processes, one for each GPU (or on the CPU without
# any). NNODES, NODE_RANK, MASTER_ADDR and PORT describe a run on several
# machines.
set -euo pipefail
tool=$1
gpus=$2
shift 2

tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$tools/..${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes "${NNODES:-1}" \
  --node-rank "${NODE_RANK:-0}" \
  --nproc-per-node "$gpus" \
  --master-addr "${MASTER_ADDR:-127.0.0.1}" \
  --master-port "${PORT:-29500}" \
  "$tools/$tool" "$@"
