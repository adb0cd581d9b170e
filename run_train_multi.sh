#!/bin/sh
# Trains on every GPU that CUDA_VISIBLE_DEVICES leaves visible, or without one on every core.
# Flags given here come last and win:
#   sh run_train_multi.sh -data_path=/data/flowers
#   sh run_train_multi.sh -cfg=small_data_vit_small_patch16_224 -dataset=folder -data_path=/data/flowers
#   CUDA_VISIBLE_DEVICES=0,1 sh run_train_multi.sh
# Or write them below, a line each (-cfg=... \): -default_cfg counts only without -cfg, a run and -data_path.
here=$(dirname "$(readlink -f "$0")")
[ -z "$VIRTUAL_ENV" ] && [ -x "$here/.venv/bin/python" ] && PATH="$here/.venv/bin:$PATH"
exec python "$here/main_multi_gpu.py" \
-default_cfg=vit_digits \
"$@"
