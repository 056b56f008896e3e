#!/bin/sh
# Usage: record-exit.sh NAME EXIT_CODE
# Write how a job ended, for the textfile collector of Prometheus' node_exporter.
set -eu
code=$2
case $code in
'' | *[!0-9]*) code=255 ;; # systemd names a signal, such as KILL
esac
directory=${TEXTFILES:-/var/lib/node_exporter/textfile_collector}
file="$directory/aiodlock_$1.prom"
cat >"$file.new" <<END
# TYPE aiodlock_run_exit_code gauge
aiodlock_run_exit_code{name="$1"} $code
# TYPE aiodlock_run_ended_seconds gauge
aiodlock_run_ended_seconds{name="$1"} $(date +%s)
END
mv "$file.new" "$file"
# In a file of its own: no later run of this host writes it over.
if [ "$code" = 0 ]; then
    file="$directory/aiodlock_$1_success.prom"
    cat >"$file.new" <<END
# TYPE aiodlock_run_succeeded_seconds gauge
aiodlock_run_succeeded_seconds{name="$1"} $(date +%s)
END
    mv "$file.new" "$file"
fi
