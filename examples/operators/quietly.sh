#!/bin/sh
# Usage: quietly.sh NAME COMMAND [ARGUMENT...]
# Run a command under a lock. When another host holds the lock, print nothing and end with 0.
name=$1
shift
errors=$(mktemp) || exit 70
trap 'rm -f "$errors"' EXIT
trap 'kill -TERM "$child"' TERM INT HUP
aiodlock run "$name" --nonblock -- "$@" 2>"$errors" &
child=$!
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do # a signal has ended the wait, not the command
    wait "$child"
    code=$?
done
[ "$code" -eq 75 ] && exit 0
cat "$errors" >&2
exit "$code"
