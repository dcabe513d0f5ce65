"""The report's style sheet. Light and dark are the same rules over other values."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f8fa; --card: #ffffff; --ink: #1f2328; --muted: #5f6771; --rule: #d0d7de; --strong: #dff5ec;
  --work: #009e73; --wire: #5b6b7f; --latency: #b4bfcc; --warning: #d1242f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0d1117; --card: #161b22; --ink: #e6edf3; --muted: #9aa4af; --rule: #30363d; --strong: #12362b;
    --wire: #8494a7; --latency: #465262; --warning: #ff7b72;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1180px; padding: 32px 20px 64px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 4px; }
p { margin: 0 0 10px; }
code { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.muted, figcaption, caption { color: var(--muted); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin: 22px 0; }
.card, figure, .table {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
}
.card { padding: 14px 16px; }
.card b { display: block; font-size: 25px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.card span { display: block; font-size: 13px; }
.card small { display: block; color: var(--muted); font-size: 12px; overflow-wrap: anywhere; }
.bad b { color: var(--warning); }
.pictures { display: grid; grid-template-columns: repeat(2, 1fr); gap: 12px; }
figure { margin: 0; padding: 14px 16px; overflow-x: auto; }
figure.wide { grid-column: 1 / -1; }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: inherit !important; }
figure.wide svg { min-width: 760px; }
.table { overflow-x: auto; margin: 8px 0 0; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; text-align: right; white-space: nowrap; border-top: 1px solid var(--rule); }
th { color: var(--muted); font-weight: 600; font-size: 12px; border-top: 0; }
th { vertical-align: bottom; white-space: normal; }
th.text, td.text { text-align: left; }
td.text { white-space: normal; overflow-wrap: anywhere; min-width: 8em; }
tr.chosen td { background: var(--strong); font-weight: 600; }
.bar { display: flex; width: 160px; height: 10px; }
.bar i { display: block; height: 10px; }
.work { background: var(--work); } .wire { background: var(--wire); } .latency { background: var(--latency); }
.key i { display: inline-block; width: 10px; height: 10px; margin: 0 5px 0 12px; }
footer { margin-top: 40px; padding-top: 16px; border-top: 1px solid var(--rule); font-size: 14px; }
@media (max-width: 820px) { .pictures { grid-template-columns: 1fr; } }
@media print { body { background: none; max-width: none; } .card, figure, .table { break-inside: avoid; } }
""".strip()
