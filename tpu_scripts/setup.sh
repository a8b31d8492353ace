#!/usr/bin/env bash
# Runs on a worker: Python 3.12 by uv, the package with its TPU extra, huge pages. What is done
# already is not done again.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$scripts/env.sh"

code=$(dirname "$scripts")
venv=$NORMSTUDY_HOME/venv
extra=${EXTRA:-tpu}
huge_pages=${HUGE_PAGES:-/sys/kernel/mm/transparent_hugepage/enabled}

wanted="$extra $code $(sha256sum <"$code/pyproject.toml")"
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
  # the system's Python is 3.10 on Ubuntu 22.04, too old for jax
  command -v uv >/dev/null || python3 -m pip install --user --quiet uv || exit 1
  uv venv --quiet --allow-existing --python 3.12 "$venv" || exit 1 # its own 2 is not ours
  # editable: the code is replaced at each launch, and only its dependencies are installed
  uv pip install --quiet --python "$venv/bin/python" -e "${code}[$extra]" || exit 1
  echo "$wanted" >"$venv/.installed"
fi

if [ -e "$huge_pages" ] && ! grep -q '\[always\]' "$huge_pages"; then
  sudo sh -c "echo always >'$huge_pages'" || echo "no huge pages: transfers to the TPU are slower"
fi

"$venv/bin/python" - <<'PYTHON'
import importlib.metadata
import platform

found = {"python": platform.python_version()}
for package in ("jax", "jaxlib", "libtpu", "flax", "orbax-checkpoint"):
    try:
        found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found[package] = "none"
print(platform.node(), *(f"{name} {version}" for name, version in found.items()))
PYTHON
