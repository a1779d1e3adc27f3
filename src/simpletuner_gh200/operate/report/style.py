"""The page's only style sheet: narrow screens, dark screens, paper."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--ink:#1a1d21;--soft:#667;--line:#d8dbe0;--paper:#fff;--card:#f6f7f9}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--soft:#9aa;--line:#3a3f46;--paper:#15181c;--card:#1d2126}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.45 system-ui,sans-serif}
main{max-width:1100px;margin:0 auto;padding:1rem}
h1{font-size:1.4rem;overflow-wrap:anywhere}
h2{font-size:1rem;margin:0 0 .4rem}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(10rem,1fr));gap:.6rem;margin:0 0 1rem}
dl div{background:var(--card);padding:.6rem;border-radius:.4rem}
dt{color:var(--soft);font-size:.8rem}
dd{margin:0;font-weight:600;overflow-wrap:anywhere}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr));gap:1rem}
figure{margin:0;background:var(--card);padding:.8rem;border-radius:.4rem;break-inside:avoid}
figcaption{color:var(--soft);font-size:.8rem}
svg{width:100%;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
@media(max-width:500px){svg text{font-size:17px}}
.grid{stroke:var(--line);stroke-width:1}
.legend{list-style:none;margin:.3rem 0;padding:0;display:flex;flex-wrap:wrap;gap:.2rem .9rem;font-size:.8rem}
.legend li{overflow-wrap:anywhere}
.swatch{display:inline-block;width:.8em;height:.8em;margin-right:.35em;border-radius:2px}
details{margin:1rem 0}
summary{font-weight:600;cursor:pointer}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.85rem}
td,th{border-bottom:1px solid var(--line);padding:.3rem .5rem;text-align:left;vertical-align:top;overflow-wrap:anywhere}
@media print{body{background:#fff;color:#000}figure,dl div{background:none;border:1px solid #ccc}main{max-width:none}}
"""
