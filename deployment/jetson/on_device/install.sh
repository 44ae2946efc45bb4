#!/bin/bash
# Installs this bundle from the folder it lies in. Nothing is fetched.
#
#   install.sh [--root DIR] [--allowed-signers FILE] [--python FILE] [--port N]
#              [--skip-hardware] [--smoke] [--headless] [--unit-only]
#
# --headless    the desktop is left for good, which frees up to 865 MB: the service conflicts with
#               the display manager, and the device starts into multi-user.target. uninstall.sh
#               puts the former target back.
# --unit-only   writes the service unit for the release that `current` names, and the API key where
#               there is none, and does nothing else.
#
# DIR/opt/rl-pipeline/NAME/releases/SHA/   this release, read-only
# DIR/opt/rl-pipeline/NAME/current         link to it, switched in one step
# DIR/opt/rl-pipeline/NAME/previous        link to the release before; older ones go
#
# The key file is the one pinned at enrolment, by default DIR/etc/rl-pipeline/allowed_signers.
# It never comes out of the bundle. An unsigned, changed or foreign bundle is refused.
# An API key is made beside it, DIR/etc/rl-pipeline/api_key, where there is none; clients send it.
set -euo pipefail
umask 022

root=/ signers='' python='' port=8080 skip_hardware='' smoke='' headless='' unit_only=''
here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)

die() { printf 'install: %s\n' "$*" >&2; exit 1; }
say() { printf 'install: %s\n' "$*" >&2; }

need_value() { [[ $# -ge 2 && -n $2 ]] || die "$1 needs a value"; }
while [[ $# -gt 0 ]]; do
  case $1 in
    --root) need_value "$@"; root=$2; shift 2 ;;
    --allowed-signers) need_value "$@"; signers=$2; shift 2 ;;
    --python) need_value "$@"; python=$2; shift 2 ;;
    --port) need_value "$@"; port=$2; shift 2 ;;
    --skip-hardware) skip_hardware=--skip-hardware; shift ;;
    --smoke) smoke=yes; shift ;;
    --headless) headless=yes; shift ;;
    --unit-only) unit_only=yes; shift ;;
    -h|--help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$here/install.sh"; exit 0 ;;
    *) die "unknown option $1; see --help" ;;
  esac
done
[[ $port =~ ^[0-9]{1,5}$ && $port -ge 1 && $port -le 65535 ]] || die "--port $port: expected 1 to 65535"
[[ -d $root ]] || die "--root $root is not a folder"
root=$(CDPATH='' cd -- "$root" && pwd -P)
prefix=${root%/}
live=''
[[ $root == / ]] && live=yes
signers=${signers:-$prefix/etc/rl-pipeline/allowed_signers}
python=${python:-/opt/rl-pipeline-runtime/bin/python}
[[ $python == *[[:space:]\"\\%\$]* ]] && die "--python $python: no spaces or quotes, please"
command -v python3 >/dev/null || die "python3 is not installed"
py() { python3 -S -E -B "$@"; }

field() { py -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$1" "$2"; }
name=$(field "$here/manifest.json" name) || die "$here holds no readable manifest.json"
[[ $name =~ ^[a-z0-9][a-z0-9_-]*$ ]] || die "manifest.json: bad name"
app=$prefix/opt/rl-pipeline/$name
unit=rl-pipeline-$name.service
units=$prefix/etc/systemd/system

write_unit() {
  if [[ -n $live ]] && ! id rl-pipeline >/dev/null 2>&1; then
    useradd --system --no-create-home --shell /usr/sbin/nologin rl-pipeline
  fi
  local etc=$prefix/etc/rl-pipeline
  mkdir -p "$units" "$etc"
  if [[ ! -e $etc/api_key ]]; then
    (umask 077; py -c 'import secrets; print(secrets.token_urlsafe(32))' >"$etc/.api_key.$$")
    mv -n -- "$etc/.api_key.$$" "$etc/api_key"
    say "an API key was made: $etc/api_key"
  fi
  if [[ -n $live ]]; then chown rl-pipeline: "$etc/api_key"; fi
  sed -e "s|@APP@|/opt/rl-pipeline/$name|g" -e "s|@PYTHON@|$python|g" -e "s|@PORT@|$port|g" \
    "$app/current/agent.service" >"$units/.$unit.$$"
  mv -T "$units/.$unit.$$" "$units/$unit"
}
leave_desktop() { # the drop-in, and the target the device starts into; what was before is kept
  local target
  mkdir -p "$units/$unit.d"
  cp -- "$app/current/headless.conf" "$units/$unit.d/headless.conf"
  target=$(systemctl --root="$root" get-default) || die 'systemctl does not tell the default target'
  [[ $target == multi-user.target ]] && return
  printf '%s\n' "$target" >"$prefix/etc/rl-pipeline/target_before_headless"
  systemctl --root="$root" set-default multi-user.target >/dev/null
  say "the device starts without a desktop from now on (before: $target)"
}
if [[ -n $unit_only ]]; then
  [[ -f $app/current/agent.service ]] || die "$app/current names no release"
  write_unit
  exit 0
fi
# Once a release is installed, its verifier, which was judged then, judges the next bundle.
judge=$here/verify.py
[[ -f $app/current/verify.py ]] && judge=$app/current/verify.py
work=$(mktemp -d)
incoming=$app/releases/.incoming.$$
trap 'rm -rf "$work" "$incoming"' EXIT
cp -- "$judge" "$work/verify.py" # the release it lies in may be replaced below
verify() { py "$work/verify.py" "$1" --allowed-signers "$signers"; }
verify "$here" || die "nothing was changed"
py "$here/preflight.py" --bundle "$here" --root "$root" --target "$app" --python "$python" \
  ${skip_hardware:+"$skip_hardware"} || die "nothing was changed"

sha=$(sha256sum "$here/manifest.json" | cut -c1-12)
release=$app/releases/$sha
mkdir -p "$app/releases"
exec 9>"$app/.lock"
flock -n 9 || die "another installation of $name is running"
rm -rf "$app"/releases/.incoming.*
if [[ ! -e $release ]] || ! verify "$release"; then
  mkdir "$incoming"
  cp -R -- "$here"/. "$incoming"/
  # The copy is judged again: it is what will run.
  verify "$incoming" || die "the copy is damaged"
  chmod -R a+rX,go-w "$incoming"
  sync -f "$incoming"
  if [[ -e $release ]]; then
    say "the copy of $sha on this device was damaged; it is replaced"
    mv -T "$release" "$app/releases/.incoming.damaged"
  fi
  mv -T "$incoming" "$release"
fi
rm -rf "$app"/releases/.incoming.*

link() { # link NAME RELEASE: switch in one step
  ln -s "releases/$2" "$app/.$1.$$"
  mv -T "$app/.$1.$$" "$app/$1"
}
before=''
[[ -L $app/current ]] && before=$(basename -- "$(readlink -- "$app/current")")
restart() {
  systemctl daemon-reload
  systemctl enable "$unit"
  systemctl restart "$unit"
}
good() { # the release that `current` names starts and answers as recorded
  if [[ -n $live ]]; then
    restart && "$app/current/smoke.sh" --url "http://127.0.0.1:$port"
  elif [[ -n $smoke ]]; then
    "$app/current/smoke.sh" --python "$python"
  fi
}
link current "$sha"
write_unit
if [[ -n $headless ]]; then leave_desktop; fi
if ! good; then
  if [[ -n $before && $before != "$sha" ]]; then
    link current "$before"
    write_unit
    if [[ -n $live ]]; then restart || say "the release before does not start either"; fi
    rm -rf "$release"
    die "release $sha failed its smoke test; $before is current again"
  fi
  die "release $sha failed its smoke test and there is no other release to go back to"
fi
if [[ -n $before && $before != "$sha" ]]; then link previous "$before"; fi
keep=$(basename -- "$(readlink -- "$app/previous" 2>/dev/null || echo none)")
for old in "$app"/releases/*; do
  case $(basename -- "$old") in
    "$sha" | "$keep") ;;
    *) rm -rf "$old" ;;
  esac
done
say "$name: release $sha is current${before:+ (before: $before)}"
[[ -n $live ]] || say "staged under $root; nothing was started"
