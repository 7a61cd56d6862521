#!/usr/bin/env bash
# A Slurm of one node on this machine, for the time of a command: single_machine.sh COMMAND...
# Needs root, and Debian's packages: apt-get install slurm-wlm munge
set -euo pipefail

folder=$(mktemp -d /tmp/slurm.XXXXXX)
pids=()
# shellcheck disable=SC2329 # the trap calls it
finish() {
    # The last one first: without munged, a slurmd does not end.
    for ((i = ${#pids[@]} - 1; i >= 0; i--)); do
        kill "${pids[i]}" 2>/dev/null || true
        wait "${pids[i]}" || true
    done
    rm -rf "$folder"
}
trap finish EXIT

mkdir -m 755 "$folder/state" "$folder/spool"
chmod 755 "$folder"
(umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
munged --force --foreground --key-file "$folder/munge.key" --socket "$folder/munge.socket" \
    --pid-file "$folder/munge.pid" --seed-file "$folder/munge.seed" --log-file "$folder/munge.log" 2>/dev/null &
pids+=($!)

host=$(hostname -s)
cat >"$folder/slurm.conf" <<CONF
ClusterName=single
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthInfo=socket=$folder/munge.socket
SlurmctldPort=26817
SlurmdPort=26818
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
CONF
export SLURM_CONF=$folder/slurm.conf
until [[ -S $folder/munge.socket ]]; do sleep 0.1; done
slurmctld -D >"$folder/slurmctld.log" 2>&1 &
pids+=($!)
slurmd -D >"$folder/slurmd.log" 2>&1 &
pids+=($!)
for _ in {1..60}; do
    [[ $(sinfo --noheader --format %T 2>/dev/null) == idle ]] && break
    sleep 0.5
done
sinfo --noheader --format "Slurm on %N is %T" || { tail -n 5 "$folder"/*.log >&2; exit 1; }
code=0
"$@" || code=$?
for _ in {1..60}; do
    [[ -z $(squeue --noheader) ]] && break # else steps that end are lost
    sleep 0.5
done
exit "$code"
