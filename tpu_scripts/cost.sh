#!/usr/bin/env bash
# Chip-hours: of HOURS, or of the attempts so far as attempts.jsonl has them. A pod costs from the
# moment it is ready until it is deleted, also between attempts: those are a lower bound.
#
#   cost.sh [HOURS]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

check_pod
price
if [ $# = 1 ]; then
  [[ $1 =~ ^[0-9]+(\.[0-9]+)?$ ]] || bad "HOURS '$1' must be a number"
  awk -v chips="$(chips)" -v hours="$1" \
    'BEGIN { printf "%d chips x %s hours = %.1f chip-hours\n", chips, hours, chips * hours }'
elif [ -s "$(logs)/attempts.jsonl" ]; then
  sed 's/.*"seconds": \([0-9]*\).*"chips": \([0-9]*\).*/\1 \2/' "$(logs)/attempts.jsonl" |
    awk '{ spent += $1 * $2 / 3600 }
      END { printf "%d attempts so far: %.1f chip-hours, waits between them not counted\n", NR, spent }'
fi
