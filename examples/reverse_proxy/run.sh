#!/bin/sh
# An emulated TensorRT-LLM, the sidecar before it as a process of its own, and three requests. Stops both at the end.
set -eu
cd "$(dirname "$0")/../.."

logs=$(mktemp -d)
pids=
stop() {
    # The sidecar first: it finishes what runs, and would answer 502 without the engine.
    for pid in $pids; do
        kill "$pid" 2>/dev/null || true
        wait "$pid" || true
    done
    rm -rf "$logs"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Prints the address that comes after these words in a log, once it is there: its server listens already.
address() {
    tries=0
    until sed -n "s|^$2 \(http://127\.0\.0\.1:[0-9]*\).*|\1|p" "$1" | grep -m1 .; do
        tries=$((tries + 1))
        [ "$tries" -le 150 ] || { cat "$1" >&2; exit 1; }
        sleep 0.2
    done
}

ask() {
    echo
    echo "$1"
    shift
    curl --silent --show-error --include "$sidecar/v1/chat/completions" -H 'content-type: application/json' "$@" \
        -d '{"model": "emulated", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}' |
        grep -iE '^(HTTP|x-admission)|"content"|"error"'
}

sidecar emulate --engine tensorrt-llm --port 0 >"$logs/engine" 2>&1 &
pids=$!
engine=$(address "$logs/engine" "emulated tensorrt-llm on")
sidecar serve --upstream "$engine" --policy policies/ --port 0 --admin-port 0 >"$logs/sidecar" 2>&1 &
pids="$! $pids"
sidecar=$(address "$logs/sidecar" "sidecar: proxy on")
echo "clients -> $sidecar (sidecar serve) -> $engine (emulated TensorRT-LLM)"

ask 'The interactive tenant, by its key:' -H 'authorization: Bearer sk-demo-interactive'
ask 'The research tenant asks for more than it may:' -H 'authorization: Bearer sk-demo-research' -H 'x-priority: high'
ask 'An unknown key:' -H 'authorization: Bearer sk-unknown'
