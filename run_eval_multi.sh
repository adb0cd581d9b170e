#!/bin/sh
# Evaluates on every GPU that CUDA_VISIBLE_DEVICES leaves visible, or without one on every core.
# Flags given here come last and win:
#   sh run_eval_multi.sh -eval -pretrained=output/<run>/checkpoints/best
#   CUDA_VISIBLE_DEVICES=0,1 sh run_eval_multi.sh -cfg=vit_small_patch16_224 -data_path=/dataset/imagenet -pretrained=FILE
# Or write them below, a line each (-cfg=... \). Weights of a run bring its configuration along.
here=$(dirname "$(readlink -f "$0")")
[ -z "$VIRTUAL_ENV" ] && [ -x "$here/.venv/bin/python" ] && PATH="$here/.venv/bin:$PATH"
exec python "$here/main_multi_gpu.py" \
-default_cfg=vit_digits \
-eval \
"$@"
