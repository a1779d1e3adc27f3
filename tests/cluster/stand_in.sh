#!/bin/sh
# Plays the interpreter that train.sbatch calls gh200 with (-m simpletuner_gh200 doctor|train ...), where only the script
# and Slurm are asked about. Notes what it is told in $STAND_IN/<host>; files there say what it is to do.
shift 2
note() { echo "$*" >>"$STAND_IN/$(hostname)"; }
case "$1" in
doctor)
    note doctor "$2"
    while [ -e "$STAND_IN/doctor-waits" ]; do sleep 0.2; done
    [ ! -e "$STAND_IN/doctor-fails-$(hostname)" ]
    exit
    ;;
esac
told=""
trap 'note SIGUSR1; told=1' USR1
trap 'note SIGTERM; told=1' TERM
again="$5"
note train "$2" "$3" "$4" "node $SLURM_NODEID" "$ACCELERATE_EXTRA_ARGS"
[ ! -e "$STAND_IN/train-fails-$(hostname)" ] || { sleep 2; exit 1; }
[ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || exit 0
while [ -z "$told" ]; do sleep 0.2; done
# As long as a checkpoint takes: a signal that comes twice would be noted twice.
for _ in 1 2 3 4 5 6 7 8 9 10; do sleep 0.2; done
touch "$again"
note checkpoint
