#!/bin/bash
# Takes an installed agent off: its service, its releases, and what it kept. With the last agent
# go the pinned key, the API key, the settings and the user; with --runtime the model server too.
#
#   uninstall.sh [--root DIR] [--name NAME] [--keep-data] [--runtime]
#
# --keep-data   leaves the field log and /etc/rl-pipeline: the device stays enrolled
# --runtime     takes /opt/rl-pipeline-runtime away as well (with the last agent only)
set -euo pipefail

root=/ name='' keep_data='' runtime=''
here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
die() { printf 'uninstall: %s\n' "$*" >&2; exit 1; }
say() { printf 'uninstall: %s\n' "$*" >&2; }

while [[ $# -gt 0 ]]; do
  case $1 in
    --root) [[ $# -ge 2 ]] || die "--root needs a value"; root=$2; shift 2 ;;
    --name) [[ $# -ge 2 ]] || die "--name needs a value"; name=$2; shift 2 ;;
    --keep-data) keep_data=yes; shift ;;
    --runtime) runtime=yes; shift ;;
    -h|--help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$here/uninstall.sh"; exit 0 ;;
    *) die "unknown option $1; see --help" ;;
  esac
done
[[ -d $root ]] || die "--root $root is not a folder"
root=$(CDPATH='' cd -- "$root" && pwd -P)
prefix=${root%/}
live=''
[[ $root == / ]] && live=yes
if [[ -z $name ]]; then
  name=$(python3 -S -E -B -c \
    'import json, sys; print(json.load(open(sys.argv[1]))["name"])' "$here/manifest.json")
fi
[[ $name =~ ^[a-z0-9][a-z0-9_-]*$ ]] || die "--name $name is not the name of an agent"
unit=rl-pipeline-$name.service
units=$prefix/etc/systemd/system
app=$prefix/opt/rl-pipeline/$name
data=$prefix/var/lib/rl-pipeline
etc=$prefix/etc/rl-pipeline
[[ -e $app || -e $units/$unit ]] || die "$name is not installed under $root"

supervisor=$app/run/supervisor.json
if [[ -f $supervisor ]]; then # an agent without systemd: its supervisor ends it
  pid=$(sed -n 's/.*"pid": *\([0-9][0-9]*\).*/\1/p' "$supervisor")
  if [[ -n $pid ]] && grep -qs keep_alive.py "/proc/$pid/cmdline"; then
    kill "$pid"
    for _ in {1..300}; do [[ -d /proc/$pid ]] && sleep 0.1 || break; done
  fi
fi
if [[ -n $live ]]; then systemctl disable --now "$unit" || true; fi
if [[ -f $etc/target_before_headless && -e $units/$unit.d/headless.conf ]]; then
  before=$(<"$etc/target_before_headless")
  systemctl --root="$root" set-default "$before" >/dev/null
  rm -f "$etc/target_before_headless"
  say "the device starts into $before again"
fi
rm -rf "$units/$unit" "$units/$unit.d" "$units/multi-user.target.wants/$unit" "$app"
if [[ -n $live ]]; then systemctl daemon-reload; fi
if [[ -z $keep_data ]]; then rm -f "$data/field/$name"-*.jsonl; fi

others=$(find "$prefix/opt/rl-pipeline" -mindepth 1 -maxdepth 1 2>/dev/null | head -n 1)
if [[ -z $others ]]; then
  rm -rf "$prefix/opt/rl-pipeline"
  if [[ -z $keep_data ]]; then
    rm -rf "$data" "$etc"
    if [[ -n $live ]] && id rl-pipeline >/dev/null 2>&1; then userdel rl-pipeline; fi
  fi
  if [[ -n $runtime ]]; then rm -rf "$prefix/opt/rl-pipeline-runtime"; fi
elif [[ -n $runtime ]]; then
  say 'another agent is installed; the model server stays'
fi
say "$name is gone${keep_data:+; its data and the pinned key were left in place}"
