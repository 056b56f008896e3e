#!/bin/sh
# On every host, at the same time: one of them runs the report, once per day. If it
# fails, another one tries.
run=/opt/locks/bin/aiodlock
$run run "nightly-report:$(date +%F)" --once 172800 --timeout 7200 --quiet -- \
    $run run nightly-report --timeout 7200 --quiet -- /opt/jobs/report.sh --full
code=$?
/opt/jobs/record-exit.sh nightly-report "$code"
exit "$code"
