#!/bin/sh
# Builds the image with buildah, and runs it as Kubernetes does: as nobody, without a capability, on a root file system that
# is read-only. Linux, as root; wants buildah and python3, no daemon, and port 9464. Leaves nothing behind.
#   sh examples/container/check.sh
#   BASE=registry.example.com/python:3.13-slim sh examples/container/check.sh
# BUILD_OPTIONS are further options of `buildah bud`, such as --volume for certificates that pip needs.
set -eu
cd "$(dirname "$0")/../.."
image=localhost/admission-sidecar-check
log=$(mktemp)
container= outer=
clean() {
    [ -z "$outer" ] || kill -KILL "$(innermost "$outer")" 2> /dev/null || true
    [ -z "$container" ] || buildah rm "$container" > /dev/null
    buildah rmi "$image" > /dev/null 2>&1 || true
    rm -f "$log"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fail() {
    echo "check.sh: $*" >&2
    cat "$log" >&2
    exit 1
}

# The process at the end of a line of children: between us and the command stand a shell and unshare.
innermost() {
    pid=$1
    while children=$(cat "/proc/$pid/task/$pid/children" 2> /dev/null) && [ -n "$children" ]; do
        pid=${children%% *}
    done
    echo "$pid"
}

# chroot isolation needs no container runtime, and pip the network of this machine.
# shellcheck disable=SC2086 # options, not one
buildah bud --isolation chroot --network host --format docker --quiet ${BASE:+--build-arg BASE="$BASE"} ${BUILD_OPTIONS:-} \
    --file examples/container/Containerfile --tag "$image" . > /dev/null
container=$(buildah from "$image")
root=$(buildah mount "$container")
config=$(buildah inspect --type image "$image" | python3 -c 'import json, sys; print(json.dumps(json.load(sys.stdin)["Docker"]["config"]))')
user=$(echo "$config" | python3 -c 'import json, sys; print(json.load(sys.stdin)["User"])')
health=$(echo "$config" | python3 -c 'import json, shlex, sys; print(shlex.join(json.load(sys.stdin)["Healthcheck"]["Test"][1:]))')
entry=$(echo "$config" | python3 -c 'import json, sys; (word,) = json.load(sys.stdin)["Entrypoint"]; print(word)')
path=$(echo "$config" | python3 -c 'import json, sys; print(next(word for word in json.load(sys.stdin)["Env"] if word.startswith("PATH=")))')

# Runs a command in the image: process 1 of its own, nothing but its own environment, nothing to write to.
inside() {
    unshare --mount --pid --fork --kill-child sh -eu -c '
        root=$1 user=$2 path=$3
        shift 3
        mount --bind "$root" "$root"
        mount -t proc proc "$root/proc"
        mount -o remount,ro,bind "$root"
        chroot=$(command -v chroot)
        exec env -i "$path" PYTHONDONTWRITEBYTECODE=1 "$chroot" --userspec="$user" "$root" "$@"
    ' sh "$root" "$user" "$path" "$@"
}

[ "$(inside id -u)" != 0 ] || fail "it runs as root"
inside grep -q '^CapEff:[[:space:]]*0*$' /proc/self/status || fail "it has capabilities"
if inside touch /written 2> /dev/null; then
    fail "it can write to its root"
fi
inside "$entry" --version
inside python3 -c 'import hiredis, redis, opentelemetry.exporter.otlp.proto.grpc, opentelemetry.exporter.otlp.proto.http'
policies=$(inside python3 -c 'from sidecar.policy.compiler import shipped_policies; print(shipped_policies())')
inside "$entry" check "$policies" > "$log" || fail "it does not find its own example policies"

inside "$entry" serve --upstream http://127.0.0.1:9 --policy "$policies" --port 0 > "$log" 2>&1 &
outer=$!
tries=0
until eval "inside $health" 2> /dev/null; do
    tries=$((tries + 1))
    [ "$tries" -le 30 ] || fail "it does not become healthy"
    sleep 0.5
done
kill -TERM "$(innermost "$outer")"
tries=0
while kill -0 "$outer" 2> /dev/null; do
    tries=$((tries + 1))
    [ "$tries" -le 30 ] || fail "as process 1 it does not end when it is told to"
    sleep 0.5
done
wait "$outer" || fail "as process 1 it does not end in order"
outer=
grep -q '"event": "stopped"' "$log" || fail "it does not say that it stopped"

if eval "inside $health" 2> /dev/null; then
    fail "it is called healthy when nobody answers"
fi
echo "built, runs as user $user on a read-only root, healthy, ends in order; our layers are $(du -sm "$root/opt/sidecar" | cut -f1) MB"
