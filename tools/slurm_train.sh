#!/usr/bin/env bash
# Trains under Slurm. GPUS (in all), GPUS_PER_NODE, CPUS_PER_TASK and SRUN_ARGS
# set the size of the job.
set -euo pipefail

if (( $# < 4 )); then
  echo "usage: $0 PARTITION JOB_NAME CONFIG WORK_DIR [arguments of train.py]" >&2
  exit 2
fi
partition=$1
job_name=$2
config=$3
work_dir=$4
shift 4

gpus=${GPUS:-8}
gpus_per_node=${GPUS_PER_NODE:-$(( gpus < 8 ? gpus : 8 ))}
read -r -a srun_args <<< "${SRUN_ARGS:-}"

tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$tools/..${PYTHONPATH:+:$PYTHONPATH}"
exec srun \
  --partition "$partition" \
  --job-name "$job_name" \
  --gres "gpu:$gpus_per_node" \
  --ntasks "$gpus" \
  --ntasks-per-node "$gpus_per_node" \
  --cpus-per-task "${CPUS_PER_TASK:-5}" \
  --kill-on-bad-exit=1 \
  ${srun_args[@]+"${srun_args[@]}"} \
  "${PYTHON:-python}" -u "$tools/train.py" "$config" \
  --work-dir "$work_dir" --launcher slurm "$@"
