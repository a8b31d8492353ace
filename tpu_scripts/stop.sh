#!/usr/bin/env bash
# Asks what runs on the workers to save and end; the pod stays, and costs.
#
#   stop.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$scripts/gcloud.sh"

[ $# = 0 ] || bad "unknown option '$1': stop.sh takes none"
check_pod
count=$(workers)
[ "$count" != NONE ] || failed "$NAME does not exist"
for ((worker = 0; worker < count; worker++)); do
  # at once: those that are left wait for those that have ended
  if dry; then
    ssh_worker "$worker" "bash normstudy/code/tpu_scripts/worker.sh stop"
  else
    ssh_worker "$worker" "bash normstudy/code/tpu_scripts/worker.sh stop" </dev/null &
  fi
done
wait
price
