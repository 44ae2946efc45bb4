#!/bin/sh
# Can this device take this bundle? See: preflight.sh --help
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
exec python3 -S -E -B "$here/preflight.py" --bundle "$here" "$@"
