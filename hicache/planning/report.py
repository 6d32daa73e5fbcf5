"""A plan as one HTML file: nothing is loaded from anywhere, plots are inline SVG, light and dark follow the reader."""

from __future__ import annotations

from html import escape

from hicache.config.units import format_bytes
from hicache.planning.budget import describe_budget
from hicache.planning.plan import Plan
from hicache.planning.report_plots import card, reuse_cards, session_card, tier_cards, time_card
from hicache.planning.suggestion import to_yaml
from hicache.planning.tables import notes, seconds_text, suggestion_text

_STYLE = """
:root{color-scheme:light dark;--page:#f4f4f1;--card:#fff;--ink:#14140f;--soft:#5b5a54;--grid:#e6e5df;--axis:#a9a89f;
--c0:#2a78d6;--c1:#d9622b;--c2:#16976a;--c3:#6a55c9;--c4:#b8860b;--c5:#c2417a;--rest:#dddcd4;
--h0:#c9d9ee;--h1:#9cc0ea;--h2:#6aa3e2;--h3:#2f78cc;--h4:#134c91}
@media(prefers-color-scheme:dark){:root{--page:#121211;--card:#1d1d1b;--ink:#f3f2ec;--soft:#b5b4aa;--grid:#31312e;
--axis:#6d6c65;--c0:#5b9ff0;--c1:#f08a54;--c2:#3cbf90;--c3:#a594f5;--c4:#d9ad3f;--c5:#ea77a8;--rest:#3a3a36;
--h0:#2b3b50;--h1:#33587f;--h2:#3f7cb8;--h3:#66a6ea;--h4:#b4d5fb}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1280px;margin:0 auto;padding:28px 24px 48px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:16px;margin:0 0 6px}
.lead{margin:0 0 20px;color:var(--soft)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:14px;margin-bottom:16px}
.tile,.card{background:var(--card);border:1px solid var(--grid);border-radius:10px;padding:16px 18px}
.tile b{display:block;font-size:26px;font-weight:650;line-height:1.25}.tile span{color:var(--soft);font-size:13px}
.cards{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px}
.wide{grid-column:1/-1}
@media(max-width:900px){.cards{grid-template-columns:1fr}}
svg{display:block;width:100%;height:auto;font-size:12px}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 6px;padding:0}
.legend{font-size:13px;color:var(--soft)}
.legend i{display:inline-block;width:14px;height:14px;border-radius:3px;margin-right:6px;vertical-align:-2px}
p.note{margin:8px 0 0;font-size:13px;color:var(--soft)}.empty{color:var(--soft)}
.grid{stroke:var(--grid)}.axis{stroke:var(--axis)}.tick{fill:var(--soft)}.title{fill:var(--ink);font-size:12.5px}
text.note{fill:var(--soft);font-size:11.5px}.mark{stroke:var(--axis);stroke-dasharray:4 3}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round;stroke:var(--c)}.line.bound{stroke-width:2;stroke-dasharray:6 4}
.bar{fill:var(--c)}.dot{fill:var(--c);stroke:var(--card);stroke-width:1}
.dot.quiet{opacity:0}.dot.quiet:hover{opacity:1}.dot.knee{fill:var(--card);stroke:var(--c);stroke-width:2.5}
.life{stroke:var(--axis);stroke-width:1}
.s0,.a0,.p0{--c:var(--c0)}.s1,.a1{--c:var(--c1)}.s2,.a2,.p1{--c:var(--c2)}.s3{--c:var(--c3)}.s4{--c:var(--c4)}
.s5{--c:var(--c5)}.bound{--c:var(--soft)}.rest{--c:var(--rest)}
.h0{--c:var(--h0)}.h1{--c:var(--h1)}.h2{--c:var(--h2)}.h3{--c:var(--h3)}.h4{--c:var(--h4)}
.legend i{background:var(--c)}
.legend i.bound{height:0;border-radius:0;border-top:2px dashed var(--c);background:none;vertical-align:4px}
.line.dotted{stroke-dasharray:2 4}.line.dashed{stroke-dasharray:10 3 2 3}
.legend i.dotted,.legend i.dashed{height:0;border-radius:0;background:none;vertical-align:4px}
.legend i.dotted{border-top:3px dotted var(--c)}.legend i.dashed{border-top:3px dashed var(--c)}
.legend i.ring{border-radius:50%;background:none;border:2.5px solid var(--c)}
pre{margin:0;overflow-x:auto;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,monospace}
table{border-collapse:collapse;width:100%;font-size:14px}
td,th{text-align:right;padding:4px 10px;border-bottom:1px solid var(--grid)}
td:first-child,th:first-child{text-align:left;padding-left:0}
"""


def to_html(plan: Plan, trace: str) -> str:
    """The whole file."""
    title = f"Tiers for {trace}"
    cards = [*tier_cards(plan), time_card(plan), *reuse_cards(plan), session_card(plan), _outcome(plan), _yaml(plan)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main><h1>{escape(title)}</h1>"
        f'<p class="lead">{escape(_lead(plan))}</p><div class="tiles">{_tiles(plan)}</div>'
        f'<div class="cards">{"".join(cards)}</div></main></body></html>\n'
    )


def _lead(plan: Plan) -> str:
    pages, model = plan.given.pages, plan.given.model
    ranks = f", {plan.given.tp} tensor parallel ranks" if plan.given.tp > 1 else ""
    return (
        f"{model.name}, {model.dtype} KV{ranks} · {len(pages.trace):,} requests with {pages.total_tokens:,} prompt "
        f"tokens · limits: {describe_budget(plan.given.limits)}"
    )


def _tiles(plan: Plan) -> str:
    pages = plan.given.pages
    reachable = plan.explorer.hits.reachable / max(pages.total_tokens, 1)
    footprint = pages.unique_pages * pages.page_size * plan.token_bytes
    tiles = (
        (f"{plan.predicted.hit_rate:.1%}", f"of prompt tokens hit as suggested; {reachable:.1%} without limits"),
        (
            seconds_text(plan.predicted.ttft_mean),
            f"mean time to first token; {seconds_text(plan.nothing.ttft_mean)} without a cache",
        ),
        (format_bytes(footprint), "would hold everything this trace computes"),
        (format_bytes(plan.token_bytes), "of KV a token and rank"),
    )
    return "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(text)}</span></div>' for value, text in tiles
    )


def _outcome(plan: Plan) -> str:
    rows = [("No cache", plan.nothing.hit_rate, plan.nothing.ttft_mean, plan.nothing.ttft_p50, plan.nothing.ttft_p99)]
    best = plan.predicted
    rows.append(("Predicted, without waiting", best.hit_rate, best.ttft_mean, best.ttft_p50, best.ttft_p99))
    if plan.simulated is not None:
        ttft = plan.simulated.ttft
        rate = plan.simulated.replay.hit_rate
        rows.append(("Replayed without bytes, waiting included", rate, ttft.mean, ttft.p50, ttft.p99))
    body = "".join(
        f"<tr><td>{escape(what)}</td><td>{rate:.1%}</td>"
        + "".join(f"<td>{seconds_text(time)}</td>" for time in times)
        + "</tr>"
        for what, rate, *times in rows
    )
    head = "<tr><th></th><th>hits</th><th>TTFT mean</th><th>p50</th><th>p99</th></tr>"
    notes_ = "".join(f'<p class="note">{escape(line[0].upper() + line[1:])}.</p>' for line in notes(plan, "the ring"))
    return card(f"What it comes to: {suggestion_text(plan)}", f"<table>{head}{body}</table>{notes_}")


def _yaml(plan: Plan) -> str:
    return card("Suggested tiers.yaml", f"<pre>{escape(to_yaml(plan.values, []))}</pre>")
