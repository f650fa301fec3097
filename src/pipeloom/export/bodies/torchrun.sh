export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"
what=("$here/torchrun.toml" --output.folder "$run" ${given[@]+"${given[@]}"})
if compgen -G "$run/checkpoints/step-*/checkpoint.json" >/dev/null; then
  what+=(--checkpoint.resume "$run") # from the newest one
fi
launch[2]=pipeloom.execute.processes.torchrun # torchrun, with the status of its processes: 75 resumes later
exec "${launch[@]}" -m pipeloom train "${what[@]}" "$@"
