"""Writes docs/configuration.md from the schema (`make docs`)."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Configuration

Every key a profile may set or a command line may override, read off `configs/schema`. Written by
`make docs`; a test holds it to the schema. `rl-pipeline config rl.credit` shows the same.

"""


def main() -> int:
    """Write the page."""
    sys.path.insert(0, str(ROOT))
    from configs.keys import all_keys
    from flows.commands.config_view import markdown

    (ROOT / "docs/configuration.md").write_text(HEAD + markdown(all_keys()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
