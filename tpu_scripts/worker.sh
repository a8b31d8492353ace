#!/usr/bin/env bash
# Runs on a worker: holds the program, so that a lost connection ends nothing.
#
#   worker.sh run ATTEMPT COMMAND...   start it, print its log, exit with its code; when ATTEMPT
#                                      already runs or ran here, attach to that instead
#   worker.sh install                  stop what runs here, put this code in place, set up
#   worker.sh stop                     ask what runs here to save and end (SIGTERM); end it after
#                                      GRACE seconds
#   worker.sh log LINES [-f]           the newest attempt's log
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$scripts/env.sh"

GRACE=${GRACE:-120}
holder=$NORMSTUDY_HOME/holder.pid # "PID START": the program that holds the accelerator
attempts=$NORMSTUDY_HOME/attempts

# started PID: when it did, in clock ticks; with the pid it names one process for good. Nothing for
# a process that has ended
started() {
  awk '{ sub(/.*\) /, ""); if ($1 != "Z") print $20 }' "/proc/$1/stat" 2>/dev/null || true
}

stop_holder() {
  local pid start waited
  [ -s "$holder" ] || return 0
  read -r pid start <"$holder"
  if [ -n "$start" ] && [ "$(started "$pid")" = "$start" ]; then
    echo "== $(hostname): stopping process $pid"
    # the program alone: it tells its children, and they must live until it has saved
    kill -TERM "$pid" 2>/dev/null || true
    for ((waited = 0; waited < 2 * GRACE; waited++)); do
      [ "$(started "$pid")" = "$start" ] || break
      sleep 0.5
    done
    if [ "$(started "$pid")" = "$start" ]; then
      echo "== $(hostname): process $pid did not end in $GRACE seconds: killed"
      kill -KILL -- "-$pid" 2>/dev/null || true
    fi
  fi
  rm -f "$holder"
}

# hold RECORD COMMAND...: run it in a session of its own, write its exit code down
hold() {
  local record=$1 code
  shift
  setsid bash "$scripts/worker.sh" become "$@" >>"$record/log" 2>&1 </dev/null &
  wait $! && code=0 || code=$?
  echo "$code" >"$record/exit_code.new"
  mv "$record/exit_code.new" "$record/exit_code"
}

# become COMMAND...: by the time that it runs, it can be stopped
become() {
  cd "$(dirname "$scripts")"
  echo "$$ $(started $$)" >"$holder.new"
  mv "$holder.new" "$holder"
  exec "$@"
}

# follow RECORD: print its log, exit with its code
follow() {
  local record=$1 tries
  for ((tries = 0; tries < 100; tries++)); do
    [ ! -s "$record/keeper" ] || break
    sleep 0.1
  done
  tail -n +1 -s 0.2 --pid="$(cat "$record/keeper")" -f "$record/log"
  if [ ! -s "$record/exit_code" ]; then
    echo "== $(hostname): what held the program was killed"
    exit 137
  fi
  exit "$(cat "$record/exit_code")"
}

case ${1:-} in
  run)
    record=$attempts/$2
    shift 2
    refuse_unsafe "$@"
    mkdir -p "$attempts"
    if mkdir "$record" 2>/dev/null; then
      stop_holder
      touch "$record/log"
      setsid bash "$scripts/worker.sh" hold "$record" "$@" >/dev/null 2>&1 </dev/null &
      echo $! >"$record/keeper"
      basename "$record" >"$attempts/newest"
    else
      echo "== $(hostname): attached again; the log from its start"
    fi
    follow "$record"
    ;;
  hold)
    shift
    hold "$@"
    ;;
  become)
    shift
    become "$@"
    ;;
  install)
    stop_holder
    code=$NORMSTUDY_HOME/code
    rm -rf "$code"
    mv "$(dirname "$scripts")" "$code"
    exec bash "$code/tpu_scripts/setup.sh"
    ;;
  stop) stop_holder ;;
  log)
    [ -s "$attempts/newest" ] || exit 0
    shift
    tail -n "$@" "$attempts/$(cat "$attempts/newest")/log"
    ;;
  *)
    echo "error: worker.sh takes run, install, stop or log" >&2
    exit 2
    ;;
esac
