#!/usr/bin/env bash
# Keeps a study going until it is done: makes the pod where there is none, launches, starts again.
#
#   supervise.sh [--retries N] [--delete-when-done] [WHAT launch.sh TAKES]...
#
# 0 ends it, 2 (bad input), 3 (does not fit) and 130 (Ctrl-C) end it too. After 75 (preempted, saved)
# or where the pod is gone it starts again at once, as often as that happens. Any other code is
# tried again N times (default 3), later each time. Each attempt is a line of attempts.jsonl:
# `waited` seconds for the pod, then `seconds` with it.
# --delete-when-done deletes the pod at the end, also after giving up, but not when stopped by hand.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$scripts/gcloud.sh"

retries=3
delete=no
rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --retries)
      [[ ${2:-} =~ ^[0-9]+$ ]] || bad "--retries takes a number, not '${2:-}'"
      retries=$2
      shift
      ;;
    --delete-when-done) delete=yes ;;
    --)
      rest+=("$@")
      break
      ;;
    *) rest+=("$1") ;;
  esac
  shift
done
check_pod
[ "${rest[0]:-}" = -- ] || check_out

stopping=no
child=""
trap 'stopping=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true' INT TERM

# attempt: the exit code of create.sh where that fails, or else of launch.sh; sets `waited` and
# `seconds`, how long each took
attempt() {
  local code
  SECONDS=0 seconds=0
  child_of "$scripts/create.sh" && code=0 || code=$?
  waited=$SECONDS
  [ $code = 0 ] || return $code
  SECONDS=0
  child_of "$scripts/launch.sh" ${rest[@]+"${rest[@]}"} && code=0 || code=$?
  seconds=$SECONDS
  return $code
}

# child_of COMMAND...: its exit code; a signal to us reaches it
child_of() {
  local code
  [ $stopping = no ] || return 130
  "$@" &
  child=$!
  await "$child" && code=0 || code=$?
  child=""
  return $code
}

# judge CODE: sets `next` to end, again or later, and `why`
judge() {
  local code=$1 state tries=1
  if [ $stopping = yes ]; then
    next=end why="stopped by hand, exit code $code"
    return
  fi
  case $code in
    0) next=end why="done" ;;
    2) next=end why="bad input" ;;
    3) next=end why="does not fit in memory" ;;
    75) next=again why="preempted, saved" ;;
    130) next=end why="interrupted" ;;
    *)
      next=later why="exit code $code"
      # a connection breaks before the pod's state says why
      [ "$code" != 255 ] || tries=3
      while [ $tries -gt 0 ] && state=$(pod_state); do
        if [ "$state" != FAILED ] && is_gone "$state"; then
          next=again why="the pod is gone ($state)"
          break
        fi
        tries=$((tries - 1))
        [ $tries = 0 ] || pause "$POLL_SECONDS"
      done
      ;;
  esac
}

now() { date -u +%Y-%m-%dT%H:%M:%SZ; }

record=$(logs)
dry || mkdir -p "$record"
number=0
[ ! -e "$record/attempts.jsonl" ] || number=$(grep -c '' "$record/attempts.jsonl")
failures=0
hasty=0
while :; do
  number=$((number + 1))
  start=$(now)
  attempt && code=0 || code=$?
  ! dry || exit "$code"
  judge "$code"
  printf '{"attempt": %d, "start": "%s", "end": "%s", "waited": %d, "seconds": %d, "exit_code": %d, "why": "%s", "chips": %d}\n' \
    "$number" "$start" "$(now)" "$waited" "$seconds" "$code" "$why" "$(chips)" >>"$record/attempts.jsonl"
  say "attempt $number: $why"
  case $next in
    end) break ;;
    again)
      # free, but what ends within a minute each time must not spin
      if [ "$seconds" -lt 60 ]; then hasty=$((hasty + 1)); else hasty=0; fi
      [ $hasty -lt 2 ] || pause "$POLL_SECONDS"
      ;;
    later)
      failures=$((failures + 1))
      hasty=0
      if [ $failures -gt "$retries" ]; then
        say "given up after $failures failures"
        break
      fi
      wait_s=$((POLL_SECONDS << (failures < 6 ? failures - 1 : 5)))
      say "failure $failures of at most $retries that are tried again, in $wait_s seconds"
      pause $wait_s
      ;;
  esac
  [ $stopping = no ] || break
done

if [ $delete = yes ] && [ $stopping = no ]; then
  "$scripts/delete.sh" || say "$NAME could not be deleted and still costs: run delete.sh"
else
  say "$NAME is left as it is: if it exists, it costs; delete.sh ends that"
  price
fi
exit "$code"
