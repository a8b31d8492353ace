# shellcheck shell=bash
# The one file that knows `gcloud compute tpus`, whose API is frozen: another backend (Compute
# Engine, GKE) replaces these functions and nothing else. Sourced after common.sh.

dry || command -v gcloud >/dev/null || bad "gcloud is not installed, or not on PATH"

tpu() {
  local kind=$1 verb=$2
  shift 2
  run gcloud compute tpus "$kind" "$verb" "$@" --zone="$ZONE" \
    ${PROJECT:+--project="$PROJECT"} --quiet
}

# describe queued-resources|tpu-vm FORMAT: what is asked for, or NONE where there is no such thing.
# Fails where gcloud fails for another reason: no network is not the same as no pod.
describe() {
  local answer errors
  if dry; then
    tpu "$1" describe "$NAME" --format="value($2)"
    echo "${DRY_STATE:-NONE}"
    return
  fi
  errors=$(mktemp)
  if answer=$(tpu "$1" describe "$NAME" --format="value($2)" 2>"$errors"); then
    echo "$answer"
  elif grep -q -i -E 'NOT_FOUND|was not found' "$errors"; then
    echo NONE
  else
    cat "$errors" >&2
    rm -f "$errors"
    return 1
  fi
  rm -f "$errors"
}

queue_state() { describe queued-resources state.state; }
vm_state() { describe tpu-vm state; }

# pod_state: of the request while it waits, of the virtual machines once it is ACTIVE (READY,
# PREEMPTED ...); GONE: the request is there, its machines are not; NONE: neither is
pod_state() {
  local queue vm
  queue=$(queue_state) || return
  case $queue in
    ACTIVE | NONE) vm=$(vm_state) || return ;;
    *)
      echo "$queue"
      return
      ;;
  esac
  if [ "$queue:$vm" = ACTIVE:NONE ]; then
    echo GONE
  else
    echo "$vm"
  fi
}

# ACCEPTED is the former name of WAITING_FOR_RESOURCES
is_coming() {
  case $1 in
    ACCEPTED | WAITING_FOR_RESOURCES | CREATING | PROVISIONING) ;;
    STARTING | RESTARTING | REPAIRING | REIMAGING | UNHIDING) ;;
    *) return 1 ;;
  esac
}

is_gone() {
  case $1 in
    NONE | GONE | FAILED | PREEMPTED | TERMINATED | SUSPENDING | SUSPENDED | DELETING) ;;
    *) return 1 ;;
  esac
}

create_pod() {
  local how=""
  case ${PROVISION:-on-demand} in
    spot) how=--spot ;;
    reserved) how=--reserved ;;
  esac
  tpu queued-resources create "$NAME" --node-id="$NAME" --accelerator-type="$TYPE" \
    --runtime-version="$(runtime)" ${how:+"$how"} \
    ${VALID_UNTIL:+--valid-until-duration="$VALID_UNTIL"}
}

# delete_pod: the request and its machines; does nothing where neither is left
delete_pod() {
  local state
  while state=$(queue_state) && [ "$state" = SUSPENDING ] || [ "$state" = DELETING ]; do
    say "$NAME is $state; waiting"
    pause "$POLL_SECONDS"
  done
  [ -n "$state" ] || return 1
  [ "$state" = NONE ] || tpu queued-resources delete "$NAME" --force || return
  DRY_STATE=NONE
  state=$(vm_state) || return
  case $state in
    NONE | DELETING) ;;
    *) tpu tpu-vm delete "$NAME" ;;
  esac
}

# workers: how many virtual machines the pod has
workers() {
  if dry; then
    usual_workers
  else
    describe tpu-vm 'networkEndpoints.len()'
  fi
}

# ssh_worker N COMMAND. gcloud repeats a command whose connection is lost, up to ten times: a
# COMMAND must bear that (worker.sh attaches to what already runs)
ssh_worker() {
  tpu tpu-vm ssh "$NAME" --worker="$1" --ssh-flag="-o ServerAliveInterval=30" --command="$2"
}

# copy_to N FILE NAME_THERE: into the home folder. One worker at a time, for gcloud copies to several
# only where the key is in an ssh agent
copy_to() { tpu tpu-vm scp "$2" "$NAME:$3" --worker="$1"; }

# list_out GLOB...: which of these exist in OUT
list_out() {
  local glob
  for glob in "$@"; do
    case $OUT in
      gs://*) run gcloud storage ls "$OUT/$glob" || true ;;
      *) ssh_worker 0 "ls -d $OUT/$glob || true" ;;
    esac
  done
}
