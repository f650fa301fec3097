if [[ $DATA != mock ]]; then
  read -ra data <<<"$DATA"
else
  data=(--mock-data --tokenizer-type NullTokenizer --vocab-size "$mock_vocab")
fi
if ((connections)); then
  export CUDA_DEVICE_MAX_CONNECTIONS=1 # tensor parallelism needs it on GPUs before Blackwell; FSDP does not allow it
fi
if [[ -n "${STOP_AFTER_MIN:-}" ]]; then # of a scheduler that ends the job later
  others=$((STOP_AFTER_MIN > step_minutes ? STOP_AFTER_MIN - step_minutes : 1))
  minutes=$((minutes == 0 || others < minutes ? others : minutes))
fi
if ((minutes)); then
  training+=(--exit-duration-in-mins "$minutes")
fi
words=("$@")
for ((i = 0; i < $#; i++)); do
  case "${words[i]}" in # flags after the script's name override those in it
  --train-iters) steps="${words[i + 1]:-$steps}" ;;
  --train-iters=*) steps="${words[i]#*=}" ;;
  esac
done
saved() { # the step of the newest complete checkpoint, which Megatron-LM notes last; 0 for none
  cat "$run/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0
}
before="$(saved)"
export PYTHONPATH="$MEGATRON${PYTHONPATH:+:$PYTHONPATH}"
"${launch[@]}" "$MEGATRON/pretrain_gpt.py" "${model[@]}" "${parallel[@]}" "${memory[@]}" "${training[@]}" \
  ${given[@]+"${given[@]}"} "${data[@]}" --save "$run" --load "$run" "$@" &
agent=$!
is_ended=0 is_waiting=1 status=0
trap 'is_ended=1 is_waiting=1; kill -TERM "$agent" 2>/dev/null || true' TERM INT
while ((is_waiting)); do # a signal ends the wait, not the program
  is_waiting=0 status=0
  wait "$agent" || status=$?
done
# Megatron-LM ends with 0 after its last step, and as well when its time is up or after a signal, with a checkpoint.
# After a signal torchrun ends with 1, whatever its processes end with.
now="$(saved)"
if ((status == 0)) && [[ $now =~ ^[0-9]+$ ]] && ((now >= steps)); then exit 0; fi
if ((status == 0)) || { ((is_ended)) && [[ $now != "$before" ]]; }; then
  echo "${BASH_SOURCE[0]##*/}: ended at step $now of $steps, to resume from its checkpoint: status 75" >&2
  exit 75
fi
exit "$status"
