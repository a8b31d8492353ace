#!/usr/bin/env bash
# What there is: the pod's state, its price, the last attempts, checkpoints and finished runs.
#
#   status.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$scripts/gcloud.sh"

[ $# = 0 ] || bad "unknown option '$1': status.sh takes none"
check_pod
DRY_STATE=READY
state=$(pod_state)
say "$NAME: $state"
is_gone "$state" || price
if [ -s "$(logs)/attempts.jsonl" ]; then
  tail -n 5 "$(logs)/attempts.jsonl"
fi
if [ -n "${OUT:-}" ]; then
  check_out
  list_out 'arms/*/*/ckpt/*' 'arms/*/*/outcome.json' 'summary.json'
fi
