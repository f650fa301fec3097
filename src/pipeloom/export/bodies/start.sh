set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
run="${RUN:-$here/run}" # folder for checkpoints and all other output
if ((nodes > 1)) && [[ -z "${ONLY_CHECK:-}" ]]; then
  needs+=("NODE_RANK - number of this node, 0 to $((nodes - 1))" "MASTER_ADDR - host of node 0")
fi
missing="" given=()
for need in ${needs[@]+"${needs[@]}"}; do
  read -r name flag what <<<"$need"
  if [[ -n "${!name:-}" ]]; then
    export "${name?}"
    if [[ $flag != - ]]; then given+=("$flag" "${!name}"); fi
  elif [[ -z $settings ]] || ! grep -Eq "^${flag##*.} *=" "$here/$settings"; then
    missing+=$'\n'"  $name: $what"
  fi
done
if [[ -n $missing ]]; then
  echo "${BASH_SOURCE[0]##*/}: not started; set these variables of the environment:$missing" >&2
  exit 2
fi
if [[ -n "${ONLY_CHECK:-}" ]]; then exit 0; fi
# Static rendezvous: with --rdzv-backend c10d torchrun numbers the nodes itself, and pipeline neighbors may be far apart.
launch=("${PYTHON:-python}" -m torch.distributed.run --nnodes "$nodes" --node-rank "${NODE_RANK:-0}"
  --nproc-per-node "$processes" --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}")
