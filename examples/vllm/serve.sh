#!/bin/sh
# vLLM with the sidecar in its app. Further arguments are vLLM's.
#   MODEL=meta-llama/... sh examples/vllm/serve.sh [--port 8000 ...]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
: "${MODEL:?set MODEL to a name or to a folder with the checkpoint}"
export SIDECAR_POLICY="${SIDECAR_POLICY:-$here/policy.yaml}" SIDECAR_ADMIN_PORT="${SIDECAR_ADMIN_PORT:-9464}"
exec vllm serve "$MODEL" --scheduling-policy priority --middleware sidecar.AdmissionMiddleware "$@"
