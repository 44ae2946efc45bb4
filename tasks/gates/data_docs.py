"""Data Docs that open offline: one HTML page with its style inside, every value escaped.

Great Expectations' own pages fetch style and script from the network.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.artifacts import write_atomic
from tasks.gates.verdict import GateVerdict

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ title }}</title><style>
:root { color-scheme: light dark; --ok: #18794e; --bad: #c62828; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 2rem }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .6rem; text-align: left;
  vertical-align: top; overflow-wrap: anywhere }
.ok { color: var(--ok) } .bad { color: var(--bad); font-weight: 600 }
code { font-size: .9em } .wide { overflow-x: auto }
</style></head><body>
<h1>{{ title }}</h1>
<table>{% for name, value in facts.items() %}
<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}</table>
{% for verdict in verdicts %}
<h2>{{ verdict.suite }}: <span class="{{ 'ok' if verdict.passed else 'bad' }}">
{{ 'passed' if verdict.passed else 'failed' }}</span></h2>
<p>{{ verdict.evaluated_rows }} rows, {{ verdict.checks|length }} checks,
{{ verdict.failed_checks|length }} failed. {{ verdict.reason }}</p>
<div class="wide"><table><thead><tr><th>Check</th><th>Expectation</th><th>Column</th>
<th>Expected</th><th>Observed</th><th>Failing rows</th><th>Examples</th><th>Result</th></tr></thead>
<tbody>{% for c in verdict.checks %}<tr>
<td>{{ c.code }}</td><td><code>{{ c.expectation }}</code></td><td>{{ c.column or '' }}</td>
<td><code>{{ c.expected or '' }}</code></td>
<td>{{ c.observed if c.observed is not none else '' }}</td>
<td>{{ c.unexpected_count }} ({{ '%.2f'|format(100 * c.unexpected_share) }} %)</td>
<td>{% for e in c.examples %}<code>{{ e }}</code> {% endfor %}{{ c.error }}</td>
<td class="{{ 'ok' if c.passed else 'bad' }}">{{ 'passed' if c.passed else 'failed' }}</td>
</tr>{% endfor %}</tbody></table></div>
{% endfor %}</body></html>
"""


def write_data_docs(
    folder: Path, title: str, facts: Mapping[str, object], verdicts: Sequence[GateVerdict]
) -> Path:
    """Write `index.html` into `folder`, atomically, and return its path."""
    import jinja2

    template = jinja2.Environment(autoescape=True).from_string(_PAGE)
    html = template.render(title=title, facts=facts, verdicts=verdicts)
    return write_atomic(folder / "index.html", html)
