"""Data Docs that open offline: one HTML page with its style inside, every value escaped.

Great Expectations' own pages fetch style and script from the network.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.artifacts import write_atomic
from tasks.gates.verdict import GateVerdict

MAX_ROWS = 200
"""Quarantined rows shown; all of them stand in `quarantine.jsonl`."""
MAX_TEXT = 300
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ title }}</title><style>
:root { color-scheme: light dark; --ok: #18794e; --bad: #c62828; --line: #8884; --soft: #8881 }
@media (prefers-color-scheme: dark) { :root { --ok: #4ccf8f; --bad: #ff7b72 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.5rem }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .8rem .35rem 0; text-align: left;
  vertical-align: top }
thead th { white-space: nowrap } td { overflow-wrap: anywhere; min-width: 5rem }
td.name, td.n { white-space: nowrap; overflow-wrap: normal } td.n { text-align: right }
.ok { color: var(--ok) } .bad { color: var(--bad); font-weight: 600 }
code { font-size: .88em; background: var(--soft); padding: 0 .2em; border-radius: 3px }
.dim { opacity: .75 } .wide { overflow-x: auto } .facts { width: auto }
.facts th { font-weight: 500; white-space: nowrap; padding-right: 2rem }
</style></head><body>
<h1>{{ title }}: <span class="{{ 'ok' if passed else 'bad' }}">
{{- 'passed' if passed else 'failed' }}</span></h1>
{% for reason in reasons %}<p class="bad">{{ reason }}</p>
{% endfor %}<table class="facts">{% for name, value in facts %}
<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}</table>
{% for verdict in verdicts %}
<h2>{{ verdict.suite }}: <span class="{{ 'ok' if verdict.passed else 'bad' }}">
{{- 'passed' if verdict.passed else 'failed' }}</span></h2>
<p class="dim">{{ verdict.evaluated_rows }} rows, {{ verdict.checks|length }} checks,
{{ verdict.failed_checks|length }} failed. {{ verdict.reason }}</p>
<div class="wide"><table><thead><tr><th>Result</th><th>Check</th><th>Expectation</th>
<th>Expected</th><th>Observed</th><th class="n">Failing rows</th></tr></thead>
<tbody>{% for c in verdict.checks %}<tr>
<td class="name {{ 'ok' if c.passed else 'bad' }}">{{ 'passed' if c.passed else 'failed' }}</td>
<td class="name">{{ c.code }}</td>
<td>{% if c.column %}<code>{{ c.column }}</code>: {% endif -%}
<span class="dim">{{ c.expectation|replace('_', ' ') }}</span></td>
<td>{{ shown(c.expected) }}</td>
<td>{{ shown(c.observed) }}{% if c.error %} <span class="bad">{{ shown(c.error) }}</span>{% endif %}
{% for e in c.examples %}<code>{{ shown(e) }}</code> {% endfor %}</td>
<td class="n">{{ c.unexpected_count }} ({{ '%.2f'|format(100 * c.unexpected_share) }} %)</td>
</tr>{% endfor %}</tbody></table></div>
{% endfor %}{% if held %}<h2>Rows set aside</h2>
<p class="dim">{{ held|length }} of {{ held_count }}; <code>rl-pipeline quarantine list</code> shows
all of them, <code>quarantine release</code> lets one back in.</p>
<div class="wide"><table><thead><tr><th>File and line</th><th>Id</th><th>Reason</th><th>Row</th>
</tr></thead><tbody>{% for row in held %}<tr><td class="name">{{ shown(row.source) }}
{%- if row.line is not none %}:{{ row.line }}{% endif %}</td><td>{{ shown(row.row_id) }}</td>
<td>{{ shown(row.reason) }}</td><td><code>{{ shown(row.row) }}</code></td></tr>{% endfor %}
</tbody></table></div>{% endif %}</body></html>
"""


def shown(value: Any) -> str:
    """A value as a person reads it: bounded, with nothing in it that hides or moves text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, float):
        text = f"{value:.4g}"
    elif isinstance(value, Mapping):
        text = ", ".join(f"{name}: {shown(inner)}" for name, inner in value.items())
    elif isinstance(value, list | tuple):
        text = ", ".join(map(shown, value))
    else:
        text = str(value)
    text = _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def write_data_docs(
    folder: Path,
    title: str,
    facts: Mapping[str, object],
    verdicts: Sequence[GateVerdict],
    *,
    reasons: Sequence[str] = (),
    held: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write `index.html` into `folder`, atomically, and return its path.

    Args:
        folder: made where it is missing.
        title: what the page is about.
        facts: names and values for the table at the top.
        verdicts: one table each.
        reasons: why the gate failed; with none it passed.
        held: lines of `quarantine.jsonl`.
    """
    import jinja2

    template = jinja2.Environment(autoescape=True).from_string(_PAGE)
    html = template.render(
        title=title,
        passed=not reasons,
        reasons=[shown(reason) for reason in reasons],
        facts=[(name.replace("_", " "), shown(value)) for name, value in facts.items()],
        verdicts=verdicts,
        held=held[:MAX_ROWS],
        held_count=len(held),
        shown=shown,
    )
    return write_atomic(folder / "index.html", html)
