"""The style of reports: colours and rules of the live page of a server, within one element.

``crates/tierbed-serve/src/admin/page.html`` has the same colours; a test compares them.
"""

__all__ = ["DARK", "LIGHT", "STYLE"]

LIGHT = """
  --page: #f5f6f8; --card: #fff; --edge: #d9dde3; --text: #1b2026; --faint: #5a6470;
  --line: #1f6feb; --area: #1f6feb22; --track: #e6e9ee;
  --good: #1a7f37; --warn: #9a6700; --bad: #c5221f;
"""
DARK = """
    --page: #101418; --card: #181d23; --edge: #2d353f; --text: #e6e9ed; --faint: #9aa5b1;
    --line: #6cb0ff; --area: #6cb0ff26; --track: #2a323b;
    --good: #56d364; --warn: #e3b341; --bad: #ff7b72;
"""

# Notebooks have rules of their own for tables, so that all is said here, for one class.
STYLE = (
    f".tierbed {{{LIGHT}}}\n"
    f"@media (prefers-color-scheme: dark) {{ .tierbed {{{DARK}}} }}\n"
    """
.tierbed, .tierbed * { box-sizing: border-box; }
.tierbed { color-scheme: light dark; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; padding: 14px 16px 18px; text-align: left;
  container-type: inline-size; }
body.tierbed { margin: 0; min-height: 100vh; }
.tierbed > * { max-width: 1240px; margin-left: auto; margin-right: auto; }
.tierbed h1 { font-size: 1.3rem; line-height: 1.3; margin-top: 0; margin-bottom: 0;
  overflow-wrap: anywhere; color: inherit; }
.tierbed h2 { font-size: 1rem; margin: 0 0 8px; color: inherit; }
.tierbed .note { color: var(--faint); font-size: .85rem; overflow-wrap: anywhere; }
.tierbed p.note { margin-top: 6px; margin-bottom: 0; max-width: 90ch; }
.tierbed h1 + p.note { max-width: 1240px; margin-top: 0; }
.tierbed main { display: grid; gap: 12px; grid-template-columns: repeat(12, minmax(0, 1fr));
  margin-top: 12px; }
.tierbed section { background: var(--card); border: 1px solid var(--edge); border-radius: 8px;
  padding: 12px 14px; min-width: 0; }
.tierbed .figure { grid-column: span 3; } .tierbed .half { grid-column: span 6; }
.tierbed .third { grid-column: span 4; } .tierbed .full { grid-column: 1 / -1; }
.tierbed .figure h2 { color: var(--faint); font-weight: 500; font-size: .9rem; margin: 0; }
.tierbed .value { font-size: 1.6rem; font-weight: 600; line-height: 1.35;
  font-variant-numeric: tabular-nums; }
.tierbed svg { display: block; width: 100%; height: 90px; margin-top: 6px; overflow: visible; }
.tierbed polyline { fill: none; stroke: var(--line); stroke-width: 1.5;
  vector-effect: non-scaling-stroke; }
.tierbed polygon { fill: var(--area); }
.tierbed line { stroke: var(--edge); stroke-width: 1; vector-effect: non-scaling-stroke; }
.tierbed line.now { stroke: var(--faint); stroke-dasharray: 4 3; }
.tierbed .scale { display: flex; justify-content: space-between; margin-top: 4px; }
.tierbed .scale span { width: 0; display: flex; justify-content: center; white-space: nowrap; }
.tierbed .scale span:first-child { justify-content: start; }
.tierbed .scale span:last-child { justify-content: end; }
.tierbed .wider { overflow-x: auto; }
.tierbed table { width: 100%; border-collapse: collapse; border: 0; margin: 0; font-size: inherit;
  font-variant-numeric: tabular-nums; color: inherit; }
.tierbed th { text-align: left; font-weight: 500; color: var(--faint); font-size: .85rem;
  vertical-align: bottom; }
.tierbed td { text-align: left; overflow-wrap: anywhere; }
.tierbed th, .tierbed td { padding: 4px 16px 4px 0; vertical-align: middle; border: 0;
  background: none; }
.tierbed th:last-child, .tierbed td:last-child { padding-right: 0; }
.tierbed tbody tr { border-top: 1px solid var(--edge); background: none; }
.tierbed td:has(.bar) { width: 34%; min-width: 120px; }
.tierbed .number { text-align: right; white-space: nowrap; }
.tierbed .bar { display: flex; align-items: center; gap: 8px; white-space: nowrap; }
.tierbed .track { flex: 1; min-width: 30px; height: 8px; border-radius: 4px;
  background: var(--track); }
.tierbed .fill { height: 100%; border-radius: 4px; background: var(--line); }
.tierbed .bar span { min-width: 4.2em; text-align: right; }
.tierbed .now td { font-weight: 600; }
.tierbed code { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; color: inherit;
  background: none; padding: 0; }
@container (max-width: 900px) { .tierbed .figure, .tierbed .third { grid-column: span 6; }
  .tierbed .half { grid-column: 1 / -1; } }
@container (max-width: 640px) { .tierbed .third { grid-column: 1 / -1; }
  .tierbed section { padding: 10px; } .tierbed .value { font-size: 1.3rem; }
  .tierbed .wide { display: none; } }
"""
)
