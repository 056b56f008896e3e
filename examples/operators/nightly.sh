#!/bin/sh
# On every host, at the same time: one of them runs the report, once per day. If it
# fails, another one tries.
run=/opt/locks/bin/aiodlock
if [ -z "$AIODLOCK_URL" ]; then
    # aiodlock would ask localhost: each host its own server, so each would run the job.
    echo "$0: AIODLOCK_URL is not set" >&2
    /opt/jobs/record-exit.sh nightly-report 2
    exit 2
fi
name="nightly-report:$(date +%F)"
tries=0
while
    $run run "$name" --once 172800 --timeout 7200 --quiet --note "$(uname -n):$0" -- \
        $run run nightly-report --timeout 7200 --quiet -- \
        timeout 3h /opt/jobs/report.sh --full
    code=$?
    # 69: the store was unreachable. Try again, once a minute, for an hour.
    tries=$((tries + 1))
    [ "$code" = 69 ] && [ "$tries" -lt 60 ]
do
    sleep "${RETRY_AFTER:-60}"
done
/opt/jobs/record-exit.sh nightly-report "$code"
exit "$code"
