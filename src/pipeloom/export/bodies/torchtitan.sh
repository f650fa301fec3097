if [[ -n "$schedule" ]]; then
  flags+=(--parallelism.pipeline_parallel_schedule_csv "$here/$schedule")
fi
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}" # as in torchtitan's own run_train.sh
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec "${launch[@]}" -m torchtitan.train --module torchtitan_run --config run "${flags[@]}" --dump_folder "$run" \
  --hf_assets_path "$TOKENIZER" --dataloader.dataset "$DATASET" ${given[@]+"${given[@]}"} "$@" "activation_checkpoint:$recompute"
