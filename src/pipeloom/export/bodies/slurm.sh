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

# Megatron-LM ends by itself after so many minutes, with a checkpoint: torchrun would kill it 30 s after a signal.
end="$(SLURM_TIME_FORMAT=standard squeue --noheader --job="$SLURM_JOB_ID" --format=%e 2>/dev/null || true)"
if end_s="$(date -d "$end" +%s 2>/dev/null)" && [[ -n $end ]]; then
  minutes=$(((end_s - $(date +%s) - early_s) / 60))
  export STOP_AFTER_MIN=$((minutes > 1 ? minutes : 1))
fi

newest() { # what changes with every new checkpoint: of torchrun.sh, torchtitan.sh, megatron.sh
  compgen -G "$RUN/checkpoints/step-*/checkpoint.json" | sort -V | tail -n 1 || true
  compgen -G "$RUN/checkpoint/step-*/.metadata" | sort -V | tail -n 1 || true
  cat "$RUN/latest_checkpointed_iteration.txt" 2>/dev/null || true
}
before="$(newest)"

# One task per node, which may use all of its cores.
srun --label --kill-on-bad-exit=1 --cpu-bind=none \
  bash -c 'NODE_RANK="$SLURM_NODEID" exec bash "$0" "$@"' "$script" "$@" &
step=$!
is_late=0
# Slurm sends USR1 before the time limit. srun does not pass SIGTERM on: it would end the step with SIGKILL.
trap 'is_late=1; scancel --signal=TERM "$SLURM_JOB_ID" || true' USR1 # to the step alone, not to this script
status=0
wait "$step" || status=$?
if ((is_late)); then
  status=0
  wait "$step" || status=$?
  echo "stopped before the time limit"
fi
failures="$RUN.failures" # how many starts in a row ended without a new checkpoint
if ((status == 0)); then
  rm -f "$failures"
  exit 0
fi
number=0
if [[ "$(newest)" == "$before" ]]; then
  number=$(($(cat "$failures" 2>/dev/null || echo 0) + 1))
fi
if ((number > max_restarts)); then
  echo "ended with status $status, start $number in a row without a new checkpoint: not queued again"
  rm -f "$failures"
  exit "$status"
fi
echo "$number" >"$failures"
if ((status == 75 || is_late)); then
  echo "ended with status $status, to be resumed: queued again" # 75: ended in order
else
  echo "ended with status $status: queued again"
fi
scontrol requeue "$SLURM_JOB_ID"
exit "$status"
