# shellcheck shell=bash
# Sourced by the scripts beside it: settings and their checks, dry runs, waiting, exit codes.
#
# Settings come from the environment, so that one `export` serves every script:
#   NAME ZONE TYPE   the pod: its name, where, what (v4-32, v5p-64, v5litepod-16, v6e-16 ...)
#   PROVISION        on-demand (default), spot or reserved
#   OUT              where the study writes: gs://BUCKET/NAME, or a folder that all workers share
#   PROJECT RUNTIME VALID_UNTIL LOGS DRY_RUN      optional; see README.md

set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$scripts")
SLEEP=${SLEEP:-sleep}
POLL_SECONDS=${POLL_SECONDS:-30}
exec 3>&1 # dry runs print here, also from within $(...)

dry() { [ "${DRY_RUN:-0}" = 1 ]; }

# what a dry run prints can be pasted: words are comments there
say() {
  local text=$*
  if dry; then echo "# ${text//$'\n'/$'\n'# }"; else echo "== $text"; fi
}

# bad REASON: the input is wrong, and nothing was done
bad() {
  echo "error: $*" >&2
  exit 2
}

# failed REASON: the input was right, the world was not
failed() {
  echo "error: $*" >&2
  exit 1
}

# quoted WORD...: one line that a shell reads back as the same words
quoted() {
  local word line="" quote="'\\''"
  for word in "$@"; do
    case $word in
      '' | *[!A-Za-z0-9_@%+=:,./-]*) line+=" '${word//\'/$quote}'" ;;
      *) line+=" $word" ;;
    esac
  done
  printf '%s\n' "${line# }"
}

# run WORD...: run the command, or print it where DRY_RUN=1
run() {
  if dry; then
    quoted "$@" >&3
  else
    "$@"
  fi
}

# pause SECONDS: a signal ends it
pause() {
  dry || {
    "$SLEEP" "$1" &
    wait $! || true
  }
}

# await PID: its exit code, also when a trapped signal breaks into the wait
await() {
  local code
  while :; do
    wait "$1" && code=0 || code=$?
    kill -0 "$1" 2>/dev/null || return "$code"
  done
}

# combined CODE...: the one exit code that stands for all workers. When one process ends, its peers
# are aborted (134) or stopped (143): these codes say least. 75 (preempted, saved) stands for the pod
# unless a worker failed by itself.
combined() {
  local code saved="" aborted=""
  for code in "$@"; do
    case $code in
      0) ;;
      75) saved=75 ;;
      134 | 143) aborted=${aborted:-$code} ;;
      *)
        echo "$code"
        return
        ;;
    esac
  done
  echo "${saved:-${aborted:-0}}"
}

# check_pod: NAME, ZONE, TYPE, PROVISION and RUNTIME are there and well formed
check_pod() {
  local name='^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$'
  local zone='^[a-z]+-[a-z]+[0-9]+-(ai[0-9]+)?[a-z]$'
  [ -n "${NAME:-}" ] || bad "NAME is not set: the pod's name, as in NAME=norms"
  [[ $NAME =~ $name ]] ||
    bad "NAME '$NAME' must be lower-case letters, digits and '-', and begin with a letter"
  [ -n "${ZONE:-}" ] || bad "ZONE is not set: as in ZONE=us-central2-b"
  [[ $ZONE =~ $zone ]] || bad "ZONE '$ZONE' is no zone: they look like us-central2-b"
  [ -n "${TYPE:-}" ] || bad "TYPE is not set: as in TYPE=v4-32"
  check_type
  case ${PROVISION:-on-demand} in
    on-demand | spot | reserved) ;;
    *) bad "PROVISION '$PROVISION' must be on-demand, spot or reserved" ;;
  esac
}

check_type() {
  local kind=${TYPE%-*} count=${TYPE##*-}
  case $kind in
    v2 | v3 | v4 | v5p | v5litepod | v6e) ;;
    v5e) bad "TYPE '$TYPE': Google calls it v5litepod-$count" ;;
    tpu7x | v7x) bad "TYPE '$TYPE' is not in this API: use gke.yaml" ;;
    *) bad "TYPE '$TYPE' must be v2-, v3-, v4-, v5p-, v5litepod- or v6e- and a number" ;;
  esac
  [[ $count =~ ^[1-9][0-9]{0,4}$ ]] || bad "TYPE '$TYPE' must end in a number, as in v4-32"
  case $kind in
    v5litepod | v6e)
      case $count in
        1 | 4 | 8 | 16 | 32 | 64 | 128 | 256) ;;
        *) bad "TYPE '$TYPE': $kind has 1, 4, 8, 16, 32, 64, 128 or 256 chips" ;;
      esac
      ;;
    *) [ $((count % 8)) = 0 ] || bad "TYPE '$TYPE': the number of cores is a multiple of 8" ;;
  esac
}

# chips: of TYPE. Up to v5p the number in a type counts cores, two to a chip; after that, chips
chips() {
  case $TYPE in
    v5litepod-* | v6e-*) echo "${TYPE##*-}" ;;
    *) echo $((${TYPE##*-} / 2)) ;;
  esac
}

# usual_workers: virtual machines of TYPE; four chips each, or one machine of at most eight
usual_workers() {
  case $TYPE in
    v5litepod-[148] | v6e-[148]) echo 1 ;;
    *) echo $(($(chips) / 4)) ;;
  esac
}

# runtime: the system image, RUNTIME or the one for TYPE
runtime() {
  if [ -n "${RUNTIME:-}" ]; then
    echo "$RUNTIME"
    return
  fi
  case $TYPE in
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) echo tpu-ubuntu2204-base ;;
  esac
}

# check_out: OUT is a place that all workers see
check_out() {
  local place='^(gs://[a-z0-9][a-z0-9._-]+)?(/[A-Za-z0-9._@-]+)+$'
  [ -n "${OUT:-}" ] || bad "OUT is not set: where the study writes, as in OUT=gs://BUCKET/norms"
  [[ $OUT =~ $place ]] ||
    bad "OUT '$OUT' must be gs://BUCKET/NAME, or an absolute path that all workers share"
}

# logs: the folder on this machine for what happened to this pod
logs() { echo "${LOGS:-$root/runs/pods/$NAME}"; }

price() { say "$TYPE: $(chips) chips, $(chips) chip-hours for each hour that it exists"; }
