if [[ $DATA != mock ]]; then
  read -ra data <<<"$DATA"
else
  data=(--mock-data --tokenizer-type NullTokenizer --vocab-size "$mock_vocab")
fi
if ((connections)); then
  export CUDA_DEVICE_MAX_CONNECTIONS=1 # tensor parallelism needs it on GPUs before Blackwell; FSDP does not allow it
fi
export PYTHONPATH="$MEGATRON${PYTHONPATH:+:$PYTHONPATH}"
exec "${launch[@]}" "$MEGATRON/pretrain_gpt.py" "${model[@]}" "${parallel[@]}" "${memory[@]}" "${training[@]}" \
  ${given[@]+"${given[@]}"} "${data[@]}" --save "$run" --load "$run" "$@"
