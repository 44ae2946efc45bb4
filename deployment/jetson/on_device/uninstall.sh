#!/bin/bash
# Takes an installed agent off: its service, its releases. The pinned key stays.
#
#   uninstall.sh [--root DIR] [--name NAME]
set -euo pipefail

root=/ name=''
here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
die() { printf 'uninstall: %s\n' "$*" >&2; exit 1; }

while [[ $# -gt 0 ]]; do
  case $1 in
    --root) [[ $# -ge 2 ]] || die "--root needs a value"; root=$2; shift 2 ;;
    --name) [[ $# -ge 2 ]] || die "--name needs a value"; name=$2; shift 2 ;;
    -h|--help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$here/uninstall.sh"; exit 0 ;;
    *) die "unknown option $1; see --help" ;;
  esac
done
[[ -d $root ]] || die "--root $root is not a folder"
root=$(CDPATH='' cd -- "$root" && pwd -P)
prefix=${root%/}
if [[ -z $name ]]; then
  name=$(python3 -S -E -B -c \
    'import json, sys; print(json.load(open(sys.argv[1]))["name"])' "$here/manifest.json")
fi
[[ $name =~ ^[a-z0-9][a-z0-9_-]*$ ]] || die "--name $name is not the name of an agent"
unit=rl-pipeline-$name.service
app=$prefix/opt/rl-pipeline/$name
[[ -e $app || -e $prefix/etc/systemd/system/$unit ]] || die "$name is not installed under $root"
if [[ $root == / ]]; then
  systemctl disable --now "$unit" || true
fi
rm -f "$prefix/etc/systemd/system/$unit"
if [[ $root == / ]]; then systemctl daemon-reload; fi
rm -rf "$app"
printf 'uninstall: %s is gone; the pinned key was left in place\n' "$name" >&2
