#!/bin/sh
# trtllm-serve with the sidecar in its app, on one node with four GB300. Further arguments are trtllm-serve's.
#   MODEL=nvidia/... sh examples/tensorrt-llm/serve.sh [--port 8000 ...]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
: "${MODEL:?set MODEL to a name or to a folder with the checkpoint}"
export SIDECAR_ADMIN_PORT="${SIDECAR_ADMIN_PORT:-9464}"
exec sidecar trtllm-serve "$MODEL" --policy "$here/policy.yaml" --config "$here/serve.yaml" \
    --backend pytorch --tp_size 4 --host 0.0.0.0 --port 8000 "$@"
