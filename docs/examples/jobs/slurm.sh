#!/usr/bin/env bash
# Submit with `sbatch slurm.sh`. One process for each GPU; jax finds the others by Slurm's own variables.
#SBATCH --job-name=memplan-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --output=%x-%j.out
set -euo pipefail

export CHECKPOINTS="${CHECKPOINTS:-$SLURM_SUBMIT_DIR/checkpoints}" # on a file system that all nodes share
export BUDGET="${BUDGET:-90%}"
source "$SLURM_SUBMIT_DIR/.venv/bin/activate"

# A process that fails ends all of them; the next attempt continues from the last checkpoint. If a node fails, Slurm
# puts the job back into the queue (--requeue).
for attempt in 1 2 3; do
  if srun --kill-on-bad-exit=1 --gpu-bind=none python "$SLURM_SUBMIT_DIR/train.py"; then
    exit 0
  fi
  echo "attempt $attempt failed" >&2
done
exit 1
