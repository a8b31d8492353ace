#!/usr/bin/env bash
# Asks for the pod and waits until it is ready. A pod that is there already is left as it is; what is
# left of a preempted or failed one is deleted first.
#
#   create.sh [--no-wait]
#
# Exit codes: 0 ready (or, with --no-wait, asked for), 1 the request failed, 2 bad input,
# 75 taken away again before it was ready.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$scripts/gcloud.sh"

wait=yes
case ${1:-} in
  '') ;;
  --no-wait) wait=no ;;
  *) bad "unknown option '$1': create.sh takes --no-wait alone" ;;
esac
check_pod

asked=no
said=""
while :; do
  state=$(pod_state)
  if [ "$state" != "$said" ]; then
    say "$NAME: $state"
    said=$state
  fi
  if [ "$state" = READY ]; then
    price
    exit 0
  elif is_coming "$state"; then
    [ "$wait" = yes ] || exit 0
    pause "$POLL_SECONDS"
  elif ! is_gone "$state"; then
    failed "$NAME is $state, which neither runs nor comes back by itself; delete.sh removes it"
  elif [ $asked = no ]; then
    [ "$state" = NONE ] || delete_pod
    create_pod
    asked=yes
    DRY_STATE=READY
  elif [ "$state" = FAILED ] || [ "$state" = NONE ]; then
    describe queued-resources state >&2
    failed "the request for $NAME is $state"
  else
    say "$NAME was taken away before it was ready"
    exit 75
  fi
done
