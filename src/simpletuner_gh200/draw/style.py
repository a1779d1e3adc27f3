"""How pictures and pages look: colours for light and dark, wide and narrow screens, and paper."""

from __future__ import annotations

LIGHT = ("#0b6e4f", "#b5432c", "#2f4b7c", "#7b4a90", "#7d5c00", "#2f6478")
DARK = ("#4cc79a", "#ff8f73", "#8fb3f5", "#d3a3ec", "#e3b341", "#7fc4de")
"""Colours of lines, first line first. A test computes their contrast to what they are drawn on."""
PAPER = {"light": "#ffffff", "dark": "#15181c"}
CARD = {"light": "#f6f7f9", "dark": "#1d2126"}
INK = {"light": "#1a1d21", "dark": "#e6e8eb"}
SOFT = {"light": "#555c66", "dark": "#a3adb8"}
GRID = {"light": "#d8dbe0", "dark": "#3a3f46"}
BAD = {"light": "#b00000", "dark": "#ff8589"}


def colour(number: int) -> str:
    """The class of the line with this number, in either scheme."""
    return f"c{number % len(LIGHT)}"


def _variables(scheme: str, colours: tuple[str, ...]) -> str:
    named = {"ink": INK, "soft": SOFT, "paper": PAPER, "card": CARD, "line": GRID, "bad": BAD}
    words = [f"--{name}:{values[scheme]}" for name, values in named.items()]
    return ";".join([*words, *(f"--c{number}:{value}" for number, value in enumerate(colours))])


_CLASSES = "".join(f".c{number}{{--own:var(--c{number})}}" for number in range(len(LIGHT)))

PICTURE = f"""
:root{{color-scheme:light dark;{_variables("light", LIGHT)}}}
@media(prefers-color-scheme:dark){{:root{{{_variables("dark", DARK)}}}}}
{_CLASSES}
svg text{{font:11px system-ui,sans-serif;fill:var(--soft)}}
svg text.label{{font-size:13px}}
svg text.title{{font-size:15px;fill:var(--ink)}}
svg .bad{{fill:var(--bad)}}
.paper{{fill:var(--paper)}}
.grid,path.limit{{stroke:var(--line);stroke-width:1}}
path.limit{{stroke:var(--ink);stroke-width:2}}
path.limit.bad{{stroke:var(--bad)}}
path.mark{{stroke:var(--own);stroke-width:1.8;fill:none}}
circle.mark,rect.mark{{fill:var(--own);stroke:none}}
path.raw{{stroke:var(--own);stroke-width:1;fill:none;opacity:.4}}
path.level{{stroke:var(--own);stroke-width:1.4;stroke-dasharray:6 4;fill:none}}
"""
"""Where a viewer knows no variables, each mark's own attributes give the light scheme."""

PAGE = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.45 system-ui,sans-serif}
main{max-width:1100px;margin:0 auto;padding:1rem}
h1{font-size:1.4rem;overflow-wrap:anywhere}
h2{font-size:1rem;margin:0 0 .4rem}
section{margin:1.2rem 0}
p{margin:.4rem 0}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(10rem,1fr));gap:.6rem;margin:0 0 1rem}
dl div{background:var(--card);padding:.6rem;border-radius:.4rem}
dt{color:var(--soft);font-size:.8rem}
dd{margin:0;font-weight:600;overflow-wrap:anywhere}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr));gap:1rem}
figure{margin:0;background:var(--card);padding:.8rem;border-radius:.4rem;break-inside:avoid}
figcaption{color:var(--soft);font-size:.8rem}
svg{width:100%;height:auto;display:block}
@media(max-width:500px){svg text,svg text.label{font-size:17px}dl{grid-template-columns:1fr 1fr}}
.legend{list-style:none;margin:.3rem 0;padding:0;display:flex;flex-wrap:wrap;gap:.2rem .9rem;font-size:.8rem}
.legend li{overflow-wrap:anywhere}
.swatch{display:inline-block;width:.8em;height:.8em;margin-right:.35em;border-radius:2px;background:var(--own)}
.findings{list-style:none;margin:0;padding:0}
.findings li{background:var(--card);padding:.5rem .8rem;margin:.3rem 0;border-left:4px solid var(--own)}
details{margin:.6rem 0}
summary{font-weight:600;cursor:pointer;padding:.2rem 0}
.wide{overflow:auto;max-height:75vh}
table{border-collapse:collapse;width:100%;font-size:.85rem}
td,th{border-bottom:1px solid var(--line);padding:.3rem .5rem;text-align:left;vertical-align:top}
td{overflow-wrap:break-word}
@media print{body{background:#fff;color:#000}figure,dl div{background:none;border:1px solid #ccc}main{max-width:none}
.wide{max-height:none}details::details-content{content-visibility:visible;block-size:auto}}
"""
