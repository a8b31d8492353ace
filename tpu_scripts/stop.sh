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
stop='bash normstudy/code/tpu_scripts/worker.sh stop'
pids=()
for ((worker = 0; worker < count; worker++)); do
  if dry; then
    ssh_worker "$worker" "$stop"
  else
    ssh_worker "$worker" "$stop" </dev/null & # at once: those that are left wait for the others
    pids+=($!)
  fi
done
codes=()
for pid in ${pids[@]+"${pids[@]}"}; do
  await "$pid" && codes+=(0) || codes+=($?)
done
price
exit "$(combined ${codes[@]+"${codes[@]}"})"
