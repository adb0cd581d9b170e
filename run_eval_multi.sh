#!/bin/sh
# Evaluates on every GPU that CUDA_VISIBLE_DEVICES leaves visible, or without one on every core.
# Flags given here come last and win:
#   sh run_eval_multi.sh -eval -pretrained=output/<run>/checkpoints/best
#   CUDA_VISIBLE_DEVICES=0,1 sh run_eval_multi.sh -cfg=output/<run>/config.yaml -pretrained=output/<run>/checkpoints/best
here=$(dirname "$0")
[ -z "$VIRTUAL_ENV" ] && [ -x "$here/.venv/bin/python" ] && PATH="$here/.venv/bin:$PATH"
exec python "$here/main_multi_gpu.py" \
-cfg="$here/configs/vit/vit_digits.yaml" \
-dataset='digits' \
-eval \
"$@"
