#!/bin/sh
# Replays the golden prompts against a running agent (--url), or one started for it (--python).
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
exec python3 -S -E -B "$here/smoke.py" --bundle "$here" "$@"
