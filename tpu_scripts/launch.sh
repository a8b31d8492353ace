#!/usr/bin/env bash
# Copies this tree to all workers, sets them up, and runs one command on each until all have ended.
#
#   launch.sh [OPTION OF experiments/reproduce.py]...
#   launch.sh -- COMMAND [ARGUMENT]...
#
# Each worker's log is kept there and here (runs/pods/NAME/ATTEMPT/worker_N.log). What ran there
# before is stopped first. A lost connection ends nothing, Ctrl-C asks the workers to save and end.
# Exit codes: the program's (75: preempted, saved); 255 where a worker cannot be reached.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$scripts/gcloud.sh"

study() {
  check_out
  command=(python experiments/reproduce.py --preset tpu --out "$OUT" "$@")
}

check_pod
if [ "${1:-}" = -- ]; then
  shift
  [ $# -gt 0 ] || bad "after -- comes a command"
  command=("$@")
else
  study "$@"
fi

ATTEMPT=${ATTEMPT:-$(date -u +%Y%m%dT%H%M%SZ)-$$}
record=$(logs)/$ATTEMPT
run mkdir -p "$record"

# on_worker N copy|setup|run
on_worker() {
  case $2 in
    copy) copy_to "$1" "$archive" normstudy-code.tgz ;;
    setup) logged "$1" "setup_$1.log" "$unpack" ;;
    run) logged "$1" "worker_$1.log" "bash normstudy/code/tpu_scripts/worker.sh run $(quoted "$ATTEMPT" "${command[@]}")" ;;
  esac
}

# logged N LOG COMMAND: its output goes to the file LOG and, with N before it, to ours
logged() {
  if dry; then
    ssh_worker "$1" "$3"
    return
  fi
  ssh_worker "$1" "$3" 2>&1 |
    tee "$record/$2" |
    awk -v worker="$1" '{ print "[worker " worker "] " $0; fflush() }' ||
    exit "${PIPESTATUS[0]}"
}

# on_all WHAT: on_worker N WHAT for every worker at once; the exit code that stands for all of them
on_all() {
  local what=$1 worker pid code pids=() codes=()
  for ((worker = 0; worker < count; worker++)); do
    if dry; then
      on_worker "$worker" "$what"
    else
      on_worker "$worker" "$what" </dev/null &
      pids+=($!)
    fi
  done
  for pid in ${pids[@]+"${pids[@]}"}; do
    await "$pid" && code=0 || code=$?
    codes+=("$code")
  done
  code=$(combined ${codes[@]+"${codes[@]}"})
  [ "$code" = 0 ] || say "$what: exit codes of workers 0 to $((count - 1)): ${codes[*]}"
  return "$code"
}

# shellcheck disable=SC2329 # trap calls it
stop() {
  [ "$stopping" = no ] || exit 130
  stopping=yes
  say "asking the workers to save and stop; once more not to wait for them"
  "$scripts/stop.sh" &
}

# the first connection makes the ssh key; a machine that has just become ready may not listen yet
for ((tries = 1; ; tries++)); do
  ssh_worker 0 true && break
  [ $tries -lt 5 ] || {
    say "$NAME cannot be reached"
    exit 255
  }
  pause "$POLL_SECONDS"
done
count=$(workers)
[[ $count =~ ^[1-9][0-9]*$ ]] || failed "$NAME has no workers ($count)"

archive=$record/code.tgz
run tar -czf "$archive" -C "$root" --exclude=./.git --exclude='./.venv*' --exclude=./runs \
  --exclude=./build --exclude=__pycache__ --exclude='*.egg-info' --exclude='./.*_cache' --exclude=code.tgz .
unpack='rm -rf normstudy/new && mkdir -p normstudy/new && tar -xzf normstudy-code.tgz -C normstudy/new || exit 1; bash normstudy/new/tpu_scripts/worker.sh install'

# each worker's connection is a process group of its own: Ctrl-C at a terminal does not cut it
set -m
on_all copy
on_all setup

stopping=no
trap stop INT TERM
say "$NAME: attempt $ATTEMPT on $count workers: $(quoted "${command[@]}")"
on_all run && code=0 || code=$?
rm -f "$archive"
exit "$code"
