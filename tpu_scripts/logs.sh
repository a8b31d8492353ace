#!/usr/bin/env bash
# The newest log of one worker, as it is there.
#
#   logs.sh [WORKER] [-n LINES] [-f]      default: worker 0, 100 lines; -f goes on until Ctrl-C
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$scripts/gcloud.sh"

worker=0
lines=100
follow=""
while [ $# -gt 0 ]; do
  case $1 in
    -f) follow=-f ;;
    -n)
      [[ ${2:-} =~ ^[0-9]+$ ]] || bad "-n takes a number of lines, not '${2:-}'"
      lines=$2
      shift
      ;;
    *)
      [[ $1 =~ ^[0-9]+$ ]] || bad "unknown option '$1': logs.sh takes WORKER, -n LINES, -f"
      worker=$1
      ;;
  esac
  shift
done
check_pod
ssh_worker "$worker" "bash normstudy/code/tpu_scripts/worker.sh log $lines${follow:+ $follow}"
