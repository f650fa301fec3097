export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"
what=("$here/torchrun.toml" --output.folder "$run" ${given[@]+"${given[@]}"})
if compgen -G "$run/checkpoints/step-*/checkpoint.json" >/dev/null; then
  what+=(--checkpoint.resume "$run") # goes on from the latest one
fi
exec "${launch[@]}" -m pipeloom train "${what[@]}" "$@"
