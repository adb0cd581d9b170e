#!/bin/sh
# Trains on several machines under Paddle's launcher. Start it on each of them, with the same flags, which come last and
# win, and a folder that all of them see as -output; the same again goes on from the last checkpoint there:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 sh run_train_multi_node.sh -output=/shared/run ...
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 sh run_train_multi_node.sh -output=/shared/run ...
# NNODES          how many machines
# NODE_RANK       this one's number, from 0
# MASTER_ADDR     an address of machine 0 that the others reach
# MASTER_PORT     a free port there
# NPROC_PER_NODE  processes on this machine; unset: one per visible GPU, or without one, per core
# INIT_TIMEOUT    seconds to wait for the other machines; unset: 300
# HOST            this machine's own address; unset: the one by which it reaches machine 0
# PADDLE_VIT_SECRET_FILE  what all machines hold in common, of mode 600; unset: ~/.paddle_vit_secret, made at first use
# LOG_DIR         where each process's output goes; unset: output/launch_<NODE_RANK, or the host's name>
# Elastic runs, in which the launcher starts again what was lost, need an etcd server that all machines reach and
# the extra "elastic" (docs/guides/distributed.md):
# MASTER          etcd://HOST:PORT, instead of NODE_RANK, MASTER_ADDR and MASTER_PORT; NNODES may be LOW:HIGH
# MAX_RESTART     unset: 3 (Paddle's launcher makes one more)
# ELASTIC_TIMEOUT seconds to wait for more machines once the lowest number is there; unset: 30
# JOB_ID          tells runs on one server apart
here=$(dirname "$(readlink -f "$0")")
[ -z "$VIRTUAL_ENV" ] && [ -x "$here/.venv/bin/python" ] && PATH="$here/.venv/bin:$PATH"
case $1 in -h|-help|--help|-version|--version) exec python "$here/main_multi_gpu.py" "$1"; esac
# Waits for the other machines first: Paddle's launcher would hang if the port is taken or the address is wrong. sys.path
# begins with the current folder, which may have a module with the name of one of Python's. It is replaced by this one.
nodes="import sys; sys.path[0] = sys.argv.pop(1); import runpy; runpy.run_module('launch.nodes', run_name='__main__')"
flags=$(python -c "$nodes" "$here") || exit
case $MASTER in etcd://*)
    export PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python  # etcd3's messages were made for protobuf 3
    export PADDLE_ELASTIC_LEVEL=1 PADDLE_MAX_RESTART="${MAX_RESTART:-3}"
    export PADDLE_ELASTIC_TIMEOUT="${ELASTIC_TIMEOUT:-30}" PADDLE_JOB_ID="${JOB_ID:-default}"
esac
# The same as python -m paddle.distributed.launch, but with Python's zlib loaded first. Otherwise Paddle 2.6's own zlib
# crashes it when etcd3 is imported.
launch="import sys; del sys.path[0]; import runpy, zlib; runpy.run_module('paddle.distributed.launch', run_name='__main__')"
exec python -c "$launch" $flags --log_dir "${LOG_DIR:-$here/output/launch_${NODE_RANK:-$(hostname)}}" \
"$here/main_multi_gpu.py" \
-default_cfg=vit_digits \
-output="$here/output/multi_node" \
-resume=auto \
"$@"
