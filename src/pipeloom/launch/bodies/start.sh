set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
run="${RUN:-$here/run}" # checkpoints and everything else that the run leaves behind
if ((nodes > 1)); then
  : "${NODE_RANK:?number of this node, 0 to $((nodes - 1))}"
  : "${MASTER_ADDR:?host of node 0}"
fi
# Static rendezvous: with --rdzv-backend c10d torchrun numbers the nodes by itself, and neighbors may lie apart.
launch=("${PYTHON:-python}" -m torch.distributed.run --nnodes "$nodes" --node-rank "${NODE_RANK:-0}"
  --nproc-per-node "$processes" --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}")
