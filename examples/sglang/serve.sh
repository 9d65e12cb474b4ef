#!/bin/sh
# SGLang with the sidecar in its app. Further arguments are SGLang's.
#   MODEL=meta-llama/... sh examples/sglang/serve.sh [--port 30000 ...]
# Untagged requests would count as less important than any other, and be preempted by them: they get a value.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
: "${MODEL:?set MODEL to a name or to a folder with the checkpoint}"
export SIDECAR_ADMIN_PORT="${SIDECAR_ADMIN_PORT:-9464}"
exec sidecar sglang-serve "$MODEL" --policy "$here/policy.yaml" \
    --enable-priority-scheduling --default-priority-value 0 "$@"
