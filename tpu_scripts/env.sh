# shellcheck shell=bash
# Sourced on a worker, before the program: what it finds in its environment.

# refuse_unsafe TEXT...: settings under which a run would not be the run it says it is
refuse_unsafe() {
  if [[ $* =~ spmd_rng[a-z_]*unsafe ]]; then
    echo "error: spmd_rng...unsafe makes random numbers depend on the mesh: remove it" >&2
    return 2
  fi
  if [ -n "${TPU_SKIP_MDS_QUERY+set}" ] || [[ $* == *TPU_SKIP_MDS_QUERY* ]]; then
    echo "error: TPU_SKIP_MDS_QUERY keeps jax from finding the other workers: unset it" >&2
    return 2
  fi
}

# A worker's home: code/ venv/ attempts/
export NORMSTUDY_HOME=${NORMSTUDY_HOME:-$HOME/normstudy}
export PATH="$NORMSTUDY_HOME/venv/bin:$HOME/.local/bin:$PATH"
export PYTHONUNBUFFERED=1 # a log that is minutes late is no log

refuse_unsafe "${LIBTPU_INIT_ARGS:-}" "${XLA_FLAGS:-}"
