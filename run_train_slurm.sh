#!/bin/bash
# Trains under SLURM, a task per GPU (without GPUs, per core):
#   sbatch run_train_slurm.sh -cfg=vit_base_patch16_224 -dataset=imagenet2012 -data_path=/dataset/imagenet
#   sbatch --nodes=4 --gpus-per-node=4 --ntasks-per-node=4 --time=2:00:00 run_train_slurm.sh ...
# from this folder, which all nodes see. Two minutes before the time limit the ranks are asked to save and stop; the job
# is queued again and goes on from there. MASTER_PORT, if set, is honoured; otherwise the port follows from the job's number.
# A cluster without GPUs refuses --gpus-per-node=8: add --gpus-per-node=0.
#SBATCH --job-name=vit
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
here=${SLURM_SUBMIT_DIR:-$(dirname "$0")}  # SLURM runs a copy of this file, elsewhere
[ -z "$VIRTUAL_ENV" ] && [ -x "$here/.venv/bin/python" ] && PATH="$here/.venv/bin:$PATH"
case $1 in -h|-help|--help|-version|--version) exec python "$here/main_multi_gpu.py" "$1"; esac
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # which srun doesn't take from sbatch by itself
# What the ranks of this run have in common and nobody else; srun hands the environment to all of its tasks.
export PADDLE_VIT_SECRET="${PADDLE_VIT_SECRET:-$(python -I -c 'import secrets; print(secrets.token_hex(32))')}"
srun --kill-on-bad-exit=1 python "$here/main_multi_gpu.py" \
-default_cfg=vit_digits \
-output="$here/output/slurm_$SLURM_JOB_ID" \
-resume=auto \
"$@"
status=$?
# --requeue alone is for nodes that fail. 143: the ranks saved and stopped at SIGTERM.
[ $status -eq 143 ] && scontrol requeue "$SLURM_JOB_ID"
exit $status
