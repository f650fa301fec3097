set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?this is for sbatch}"
script="${SCRIPT:-torchrun.sh}"
export RUN="${RUN:-$PWD/run}"
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
export MASTER_ADDR="${hosts%%$'\n'*}"                               # the first host, where SLURM_NODEID is 0
export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}" # jobs on one host need different ports
starts="${SLURM_RESTART_COUNT:-0}"
echo "$script on $SLURM_JOB_NODELIST, node 0 is $MASTER_ADDR:$MASTER_PORT, restarted $starts times"

if ((starts > 0)) && [[ -e "$RUN/config.toml" ]] && ! compgen -G "$RUN/checkpoints/step-*/checkpoint.json" >/dev/null; then
  mv "$RUN" "$RUN.start-$starts" # ended before its first checkpoint: keep its files, and start again
fi

if grep -q "^needs=($" "$script"; then
  ONLY_CHECK=1 bash "$script" # missing variables end the job without a requeue
fi

# One task per node, which may use all of its cores.
srun --label --kill-on-bad-exit=1 --cpu-bind=none \
  bash -c 'NODE_RANK="$SLURM_NODEID" exec bash "$0" "$@"' "$script" "$@" &
step=$!
is_late=0
trap 'is_late=1; kill -TERM "$step" 2>/dev/null || true' USR1 # Slurm sends it before the time limit
status=0
wait "$step" || status=$?
if ((is_late)); then
  wait "$step" || true
  echo "stopped before the time limit"
fi
failures="$RUN.failures" # how many times in a row it failed
if ((status == 0)); then
  rm -f "$failures"
  exit 0
fi
if ((is_late || status == 75)); then
  rm -f "$failures" # 75: ended in order, to go on later
  echo "ended with status $status, to go on: queued again"
  scontrol requeue "$SLURM_JOB_ID"
  exit "$status"
fi
number=$(($(cat "$failures" 2>/dev/null || echo 0) + 1))
echo "$number" >"$failures"
if ((number <= max_restarts)); then
  echo "ended with status $status: queued again"
  scontrol requeue "$SLURM_JOB_ID"
else
  echo "ended with status $status, the failure $number in a row"
  rm -f "$failures"
fi
exit "$status"
