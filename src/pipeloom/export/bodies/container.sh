here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if ((RESTARTS > 0 && NODE_RANK == 0)) && [[ -e "$RUN/config.toml" ]] &&
  ! compgen -G "$RUN/checkpoints/step-*/checkpoint.json" >/dev/null; then
  mv "$RUN" "$RUN.start-$(date +%s)" # ended before its first checkpoint: keep its files, and start again
fi
# exec: the process that gets SIGTERM is torchrun, which passes it on; 75 is its status where the run resumes later.
exec bash "$here/torchrun.sh" "$@"
