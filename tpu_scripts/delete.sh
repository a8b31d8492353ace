#!/usr/bin/env bash
# Deletes the pod and its request, in whatever state they are. What is in OUT stays.
#
#   delete.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$scripts/gcloud.sh"

[ $# = 0 ] || bad "unknown option '$1': delete.sh takes none"
check_pod
DRY_STATE=ACTIVE
delete_pod
say "$NAME does not exist and costs nothing"
